// AVX-512, with VNNI and BF16, in terms of AVX2: the intrinsics that csrc uses, so that CPUs without them can test what
// is written in them. Included before anything else (tests/emulate.sh).
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef union em_512 {
  __m512 ps;
  __m512i si;
  __m256 f[2];
  __m256i h[2];
  __m128i q[4];
  float s[16];
  int8_t b[64];
  uint8_t ub[64];
  int16_t w[32];
  uint16_t uw[32];
  int32_t d[16];
  uint32_t ud[16];
  int64_t l[8];
} em_512;

#define EM static inline __attribute__((always_inline, unused))
#define EM_HALF for (int i = 0; i < 2; i++)
#define EM_LANE for (int i = 0; i < 16; i++)

// -- what AVX2 has for one half

#define EM_TWO(name, half)                                                                                             \
  EM __m512i em_##name(__m512i a, __m512i b) {                                                                         \
    em_512 x = {.si = a}, y = {.si = b};                                                                               \
    EM_HALF x.h[i] = half(x.h[i], y.h[i]);                                                                             \
    return x.si;                                                                                                       \
  }
EM_TWO(add_epi32, _mm256_add_epi32)
EM_TWO(and_si512, _mm256_and_si256)
EM_TWO(madd_epi16, _mm256_madd_epi16)
EM_TWO(maddubs_epi16, _mm256_maddubs_epi16)
EM_TWO(max_epu16, _mm256_max_epu16)
EM_TWO(or_si512, _mm256_or_si256)
EM_TWO(packs_epi32, _mm256_packs_epi32)
EM_TWO(shuffle_epi8, _mm256_shuffle_epi8)
EM_TWO(sub_epi16, _mm256_sub_epi16)
EM_TWO(sub_epi32, _mm256_sub_epi32)
EM_TWO(unpackhi_epi16, _mm256_unpackhi_epi16)
EM_TWO(unpackhi_epi32, _mm256_unpackhi_epi32)
EM_TWO(unpackhi_epi64, _mm256_unpackhi_epi64)
EM_TWO(unpacklo_epi16, _mm256_unpacklo_epi16)
EM_TWO(unpacklo_epi32, _mm256_unpacklo_epi32)
EM_TWO(unpacklo_epi64, _mm256_unpacklo_epi64)
EM_TWO(xor_si512, _mm256_xor_si256)

#define EM_TWO_PS(name)                                                                                                \
  EM __m512 em_##name(__m512 a, __m512 b) {                                                                            \
    em_512 x = {.ps = a}, y = {.ps = b};                                                                               \
    EM_HALF x.f[i] = _mm256_##name(x.f[i], y.f[i]);                                                                    \
    return x.ps;                                                                                                       \
  }
EM_TWO_PS(max_ps)
EM_TWO_PS(min_ps)
EM_TWO_PS(sub_ps)
EM_TWO_PS(unpackhi_ps)
EM_TWO_PS(unpacklo_ps)

// The last argument is a constant.
#define EM_SHIFT(a, n, half)                                                                                           \
  ({                                                                                                                   \
    em_512 x_ = {.si = (a)};                                                                                           \
    x_.h[0] = half(x_.h[0], n);                                                                                        \
    x_.h[1] = half(x_.h[1], n);                                                                                        \
    x_.si;                                                                                                             \
  })
#define em_slli_epi16(a, n) EM_SHIFT(a, n, _mm256_slli_epi16)
#define em_slli_epi32(a, n) EM_SHIFT(a, n, _mm256_slli_epi32)
#define em_srli_epi16(a, n) EM_SHIFT(a, n, _mm256_srli_epi16)
#define em_srli_epi32(a, n) EM_SHIFT(a, n, _mm256_srli_epi32)
#define em_srai_epi32(a, n) EM_SHIFT(a, n, _mm256_srai_epi32)
#define em_shuffle_epi32(a, n) EM_SHIFT(a, n, _mm256_shuffle_epi32)
#define em_shufflehi_epi16(a, n) EM_SHIFT(a, n, _mm256_shufflehi_epi16)
#define em_shufflelo_epi16(a, n) EM_SHIFT(a, n, _mm256_shufflelo_epi16)
#define em_permute_ps(a, n)                                                                                            \
  ({                                                                                                                   \
    em_512 x_ = {.ps = (a)};                                                                                           \
    x_.f[0] = _mm256_permute_ps(x_.f[0], n);                                                                           \
    x_.f[1] = _mm256_permute_ps(x_.f[1], n);                                                                           \
    x_.ps;                                                                                                             \
  })
#define em_roundscale_ps(a, how)                                                                                       \
  ({                                                                                                                   \
    em_512 x_ = {.ps = (a)};                                                                                           \
    x_.f[0] = _mm256_round_ps(x_.f[0], how);                                                                           \
    x_.f[1] = _mm256_round_ps(x_.f[1], how);                                                                           \
    x_.ps;                                                                                                             \
  })
#define em_shuffle_ps(a, b, n)                                                                                         \
  ({                                                                                                                   \
    em_512 x_ = {.ps = (a)}, y_ = {.ps = (b)};                                                                         \
    x_.f[0] = _mm256_shuffle_ps(x_.f[0], y_.f[0], n);                                                                  \
    x_.f[1] = _mm256_shuffle_ps(x_.f[1], y_.f[1], n);                                                                  \
    x_.ps;                                                                                                             \
  })

EM __m512 em_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  em_512 x = {.ps = a}, y = {.ps = b}, z = {.ps = c};
  EM_HALF x.f[i] = _mm256_fmadd_ps(x.f[i], y.f[i], z.f[i]);
  return x.ps;
}
EM __m512 em_sqrt_ps(__m512 a) {
  em_512 x = {.ps = a};
  EM_HALF x.f[i] = _mm256_sqrt_ps(x.f[i]);
  return x.ps;
}
EM __m512 em_cvtepi32_ps(__m512i a) {
  em_512 x = {.si = a};
  EM_HALF x.f[i] = _mm256_cvtepi32_ps(x.h[i]);
  return x.ps;
}
EM __m512i em_cvtps_epi32(__m512 a) {
  em_512 x = {.ps = a};
  EM_HALF x.h[i] = _mm256_cvtps_epi32(x.f[i]);
  return x.si;
}
EM __m512 em_cvtph_ps(__m256i a) {
  em_512 x;
  x.f[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(a));
  x.f[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
  return x.ps;
}
EM __m256i em_cvtps_ph(__m512 a, int how) { // to nearest is all that is used
  em_512 x = {.ps = a};
  return _mm256_set_m128i(_mm256_cvtps_ph(x.f[1], _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(x.f[0], _MM_FROUND_TO_NEAREST_INT));
}

// -- constants, memory, parts

#define EM_SET1(name, member, type, n)                                                                                 \
  EM __m512i em_##name(type v) {                                                                                       \
    em_512 x;                                                                                                          \
    for (int i = 0; i < (n); i++) x.member[i] = v;                                                                     \
    return x.si;                                                                                                       \
  }
EM_SET1(set1_epi8, b, int8_t, 64)
EM_SET1(set1_epi16, w, int16_t, 32)
EM_SET1(set1_epi32, d, int32_t, 16)
EM_SET1(broadcast_i32x4, q, __m128i, 4)
EM __m512 em_broadcast_f32x8(__m256 v) {
  em_512 x = {.f = {v, v}};
  return x.ps;
}
EM __m512i em_mask_broadcast_i32x4(__m512i a, unsigned mask, __m128i v) {
  em_512 x = {.si = a}, y = {.si = em_broadcast_i32x4(v)};
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) x.d[i] = y.d[i];
  return x.si;
}
EM __m512i em_i32gather_epi32(__m512i index, const void *from, int scale) {
  em_512 x = {.si = index};
  for (int i = 0; i < 16; i++) memcpy(&x.d[i], (const char *)from + (int64_t)x.d[i] * scale, sizeof x.d[i]);
  return x.si;
}
EM __m512 em_set1_ps(float v) { return (__m512){v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
EM __m512i em_setzero_si512(void) { return em_set1_epi32(0); }
#define em_setr_ps(...) ((em_512){.s = {__VA_ARGS__}}.ps)
#define em_setr_epi32(...) ((em_512){.d = {__VA_ARGS__}}.si)
#define em_setr_epi64(...) ((em_512){.l = {__VA_ARGS__}}.si)
EM __m512i em_loadu_si512(const void *p) {
  em_512 x;
  memcpy(&x, p, sizeof x);
  return x.si;
}
EM __m512 em_loadu_ps(const void *p) { return (__m512)em_loadu_si512(p); }
EM void em_storeu_si512(void *p, __m512i a) { memcpy(p, &a, sizeof a); }
EM void em_storeu_ps(void *p, __m512 a) { memcpy(p, &a, sizeof a); }
EM void em_store_si512(void *p, __m512i a) {
  if ((uintptr_t)p % 64) __builtin_trap();
  memcpy(p, &a, sizeof a);
}
EM __m512 em_maskz_loadu_ps(uint16_t mask, const float *p) {
  em_512 x;
  EM_LANE x.s[i] = mask >> i & 1 ? p[i] : 0;
  return x.ps;
}
EM __m256i em_256_maskz_loadu_epi16(uint16_t mask, const void *p) {
  uint16_t w[16];
  EM_LANE w[i] = mask >> i & 1 ? ((const uint16_t *)p)[i] : 0;
  return _mm256_loadu_si256((const __m256i *)w);
}
EM __m256 em_castps512_ps256(__m512 a) { return (em_512){.ps = a}.f[0]; }
EM __m256 em_extractf32x8_ps(__m512 a, int half) { return (em_512){.ps = a}.f[half]; }
EM __m512 em_castsi512_ps(__m512i a) { return (__m512)a; }
EM __m512i em_castps_si512(__m512 a) { return (__m512i)a; }
EM __m512i em_castsi256_si512(__m256i a) { return (em_512){.h = {a}}.si; }
EM __m512i em_inserti64x4(__m512i a, __m256i b, int i) {
  em_512 x = {.si = a};
  x.h[i] = b;
  return x.si;
}

// -- lane by lane

#define EM_LANES(name, type, in, result, member, ...)                                                                  \
  EM result em_##name(type a) {                                                                                        \
    em_512 x = {.in = a}, y;                                                                                           \
    EM_LANE __VA_ARGS__;                                                                                               \
    return y.member;                                                                                                   \
  }
EM_LANES(abs_ps, __m512, ps, __m512, ps, y.ud[i] = x.ud[i] & 0x7fffffff)
EM_LANES(cvtepi32_epi8, __m512i, si, __m128i, q[0], y.b[i] = (int8_t)x.d[i])
EM_LANES(cvtepi32_epi16, __m512i, si, __m256i, h[0], y.w[i] = (int16_t)x.d[i])
EM_LANES(cvtepi8_epi32, __m128i, q[0], __m512i, si, y.d[i] = x.b[i])
EM_LANES(cvtepu8_epi32, __m128i, q[0], __m512i, si, y.d[i] = x.ub[i])
EM_LANES(cvtepu16_epi32, __m256i, h[0], __m512i, si, y.d[i] = x.uw[i])

EM __m512 em_scalef_ps(__m512 a, __m512 n) {
  em_512 x = {.ps = a}, y = {.ps = n};
  EM_LANE x.s[i] = ldexpf(x.s[i], (int)fminf(fmaxf(floorf(y.s[i]), -1000), 1000));
  return x.ps;
}
EM uint16_t em_cmp_ps_mask(__m512 a, __m512 b, int how) { // less, ordered, is all that is used
  em_512 x = {.ps = a}, y = {.ps = b};
  uint16_t mask = 0;
  EM_LANE mask |= (uint16_t)((x.s[i] < y.s[i]) << i);
  return mask;
}
EM __m512i em_mask_blend_epi16(uint32_t mask, __m512i a, __m512i b) {
  em_512 x = {.si = a}, y = {.si = b};
  for (int i = 0; i < 32; i++) x.w[i] = mask >> i & 1 ? y.w[i] : x.w[i];
  return x.si;
}
EM __m512 em_mask_blend_ps(uint16_t mask, __m512 a, __m512 b) {
  em_512 x = {.ps = a}, y = {.ps = b};
  EM_LANE if (mask >> i & 1) x.s[i] = y.s[i];
  return x.ps;
}
EM __m512i em_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  em_512 x = {.si = a}, y = {.si = b}, z = {.si = c};
  EM_LANE {
    uint32_t r = 0;
    for (int k = 0; k < 8; k++)
      if (table >> k & 1)
        r |= (k & 4 ? x.ud[i] : ~x.ud[i]) & (k & 2 ? y.ud[i] : ~y.ud[i]) & (k & 1 ? z.ud[i] : ~z.ud[i]);
    x.ud[i] = r;
  }
  return x.si;
}
EM __m512i em_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  em_512 s = {.si = sum}, x = {.si = a}, y = {.si = b};
  for (int i = 0; i < 64; i++) s.ud[i / 4] += (uint32_t)(x.ub[i] * y.b[i]);
  return s.si;
}
EM __m512i em_dpwssd_epi32(__m512i sum, __m512i a, __m512i b) { return em_add_epi32(sum, em_madd_epi16(a, b)); }
EM int32_t em_reduce_add_epi32(__m512i a) {
  em_512 x = {.si = a};
  uint32_t sum = 0;
  EM_LANE sum += x.ud[i];
  return (int32_t)sum;
}
EM float em_reduce_add_ps(__m512 a) {
  em_512 x = {.ps = a};
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) x.s[i] += x.s[i + n];
  return x.s[0];
}
EM float em_reduce_max_ps(__m512 a) {
  em_512 x = {.ps = a};
  for (int i = 1; i < 16; i++) x.s[0] = x.s[0] > x.s[i] ? x.s[0] : x.s[i];
  return x.s[0];
}

// -- across lanes

EM __m512i em_permutexvar_epi16(__m512i order, __m512i a) {
  em_512 o = {.si = order}, x = {.si = a}, y;
  for (int i = 0; i < 32; i++) y.w[i] = x.w[o.w[i] & 31];
  return y.si;
}
EM __m512i em_permutexvar_epi64(__m512i order, __m512i a) {
  em_512 o = {.si = order}, x = {.si = a}, y;
  for (int i = 0; i < 8; i++) y.l[i] = x.l[o.l[i] & 7];
  return y.si;
}
EM __m512 em_permutexvar_ps(__m512i order, __m512 a) {
  em_512 o = {.si = order}, x = {.ps = a}, y;
  EM_LANE y.s[i] = x.s[o.d[i] & 15];
  return y.ps;
}
EM __m512i em_shuffle_i32x4(__m512i a, __m512i b, int n) {
  em_512 x = {.si = a}, y = {.si = b}, z;
  for (int i = 0; i < 4; i++) z.q[i] = (i < 2 ? x : y).q[n >> 2 * i & 3];
  return z.si;
}

// -- bf16: denormals are 0, a NaN stays one

EM uint16_t em_bf16(uint32_t v) {
  if ((v & 0x7f800000) == 0) return (v >> 16) & 0x8000;
  if ((v & 0x7fffffff) > 0x7f800000) return (uint16_t)(v >> 16 | 0x40);
  return (uint16_t)((v + 0x7fff + (v >> 16 & 1)) >> 16);
}
EM_LANES(cvtneps_pbh, __m512, ps, __m256i, h[0], y.uw[i] = em_bf16(x.ud[i]))
EM __m512i em_cvtne2ps_pbh(__m512 high, __m512 low) {
  return (em_512){.h = {em_cvtneps_pbh(low), em_cvtneps_pbh(high)}}.si;
}

#define _mm256_maskz_loadu_epi16 em_256_maskz_loadu_epi16
#undef _mm512_setr_epi32
#undef _mm512_setr_epi64
#undef _mm512_setr_ps
#define _mm512_abs_ps em_abs_ps
#define _mm512_add_epi32 em_add_epi32
#define _mm512_and_si512 em_and_si512
#define _mm512_broadcast_f32x8 em_broadcast_f32x8
#define _mm512_broadcast_i32x4 em_broadcast_i32x4
#define _mm512_castps512_ps256 em_castps512_ps256
#define _mm512_castps_si512 em_castps_si512
#define _mm512_castsi256_si512 em_castsi256_si512
#define _mm512_castsi512_ps em_castsi512_ps
#define _mm512_inserti64x4 em_inserti64x4
#define _mm512_cmp_ps_mask em_cmp_ps_mask
#define _mm512_cvtepi32_epi8 em_cvtepi32_epi8
#define _mm512_cvtepi32_epi16 em_cvtepi32_epi16
#define _mm512_cvtepi32_ps em_cvtepi32_ps
#define _mm512_cvtepi8_epi32 em_cvtepi8_epi32
#define _mm512_cvtepu16_epi32 em_cvtepu16_epi32
#define _mm512_cvtepu8_epi32 em_cvtepu8_epi32
#define _mm512_cvtne2ps_pbh em_cvtne2ps_pbh
#define _mm512_cvtneps_pbh em_cvtneps_pbh
#define _mm512_cvtph_ps em_cvtph_ps
#define _mm512_cvtps_epi32 em_cvtps_epi32
#define _mm512_cvtps_ph em_cvtps_ph
#define _mm512_dpbusd_epi32 em_dpbusd_epi32
#define _mm512_dpwssd_epi32 em_dpwssd_epi32
#define _mm512_extractf32x8_ps em_extractf32x8_ps
#define _mm512_fmadd_ps em_fmadd_ps
#define _mm512_loadu_ps em_loadu_ps
#define _mm512_loadu_si512 em_loadu_si512
#define _mm512_madd_epi16 em_madd_epi16
#define _mm512_maddubs_epi16 em_maddubs_epi16
#define _mm512_i32gather_epi32 em_i32gather_epi32
#define _mm512_mask_broadcast_i32x4 em_mask_broadcast_i32x4
#define _mm512_mask_blend_epi16 em_mask_blend_epi16
#define _mm512_mask_blend_ps em_mask_blend_ps
#define _mm512_maskz_loadu_ps em_maskz_loadu_ps
#define _mm512_max_epu16 em_max_epu16
#define _mm512_max_ps em_max_ps
#define _mm512_min_ps em_min_ps
#define _mm512_or_si512 em_or_si512
#define _mm512_packs_epi32 em_packs_epi32
#define _mm512_permute_ps em_permute_ps
#define _mm512_permutexvar_epi16 em_permutexvar_epi16
#define _mm512_permutexvar_epi64 em_permutexvar_epi64
#define _mm512_permutexvar_ps em_permutexvar_ps
#define _mm512_reduce_add_epi32 em_reduce_add_epi32
#define _mm512_reduce_add_ps em_reduce_add_ps
#define _mm512_reduce_max_ps em_reduce_max_ps
#define _mm512_roundscale_ps em_roundscale_ps
#define _mm512_scalef_ps em_scalef_ps
#define _mm512_set1_epi16 em_set1_epi16
#define _mm512_set1_epi32 em_set1_epi32
#define _mm512_set1_epi8 em_set1_epi8
#define _mm512_set1_ps em_set1_ps
#define _mm512_setr_epi32 em_setr_epi32
#define _mm512_setr_epi64 em_setr_epi64
#define _mm512_setr_ps em_setr_ps
#define _mm512_setzero_si512 em_setzero_si512
#define _mm512_shuffle_epi32 em_shuffle_epi32
#define _mm512_shuffle_epi8 em_shuffle_epi8
#define _mm512_shuffle_i32x4 em_shuffle_i32x4
#define _mm512_shuffle_ps em_shuffle_ps
#define _mm512_shufflehi_epi16 em_shufflehi_epi16
#define _mm512_shufflelo_epi16 em_shufflelo_epi16
#define _mm512_slli_epi16 em_slli_epi16
#define _mm512_slli_epi32 em_slli_epi32
#define _mm512_sqrt_ps em_sqrt_ps
#define _mm512_srai_epi32 em_srai_epi32
#define _mm512_srli_epi16 em_srli_epi16
#define _mm512_srli_epi32 em_srli_epi32
#define _mm512_store_si512 em_store_si512
#define _mm512_storeu_ps em_storeu_ps
#define _mm512_stream_ps em_storeu_ps
#define _mm512_storeu_si512 em_storeu_si512
#define _mm512_sub_epi16 em_sub_epi16
#define _mm512_sub_epi32 em_sub_epi32
#define _mm512_sub_ps em_sub_ps
#define _mm512_ternarylogic_epi32 em_ternarylogic_epi32
#define _mm512_unpackhi_epi16 em_unpackhi_epi16
#define _mm512_unpackhi_epi32 em_unpackhi_epi32
#define _mm512_unpackhi_epi64 em_unpackhi_epi64
#define _mm512_unpackhi_ps em_unpackhi_ps
#define _mm512_unpacklo_epi16 em_unpacklo_epi16
#define _mm512_unpacklo_epi32 em_unpacklo_epi32
#define _mm512_unpacklo_epi64 em_unpacklo_epi64
#define _mm512_unpacklo_ps em_unpacklo_ps
#define _mm512_xor_si512 em_xor_si512
#if defined(PG_EMULATE_VNNI)
#define __AVX512VNNI__ 1
#endif
#if defined(PG_EMULATE_AMX)
#define __AMX_BF16__ 1
#endif
