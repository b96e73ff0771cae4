// A small SIMD vocabulary, the same names on every instruction set. vf: VF_N floats in one register.
// Loads and stores are unaligned. Every helper is inlined into its caller, which has the caller's target flags.
#pragma once
#include <stdint.h>
#include <string.h>

#define PG_INLINE static inline __attribute__((always_inline))

#if defined(PG_ISA_avx512)
#include <immintrin.h>
#define VF_N 16
typedef __m512 vf;
typedef int32_t vbits __attribute__((vector_size(64))); // the lanes as integers: (vbits)x
PG_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
PG_INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
PG_INLINE void vf_stream(float *p, vf a) { _mm512_stream_ps(p, a); } // stores past the caches; p is aligned
PG_INLINE void vf_stream_end(void) { _mm_sfence(); } // call it before other threads read what was streamed
PG_INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
PG_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); } // a * b + c
PG_INLINE vf vf_fma1(vf a, vf b, vf c) { return vf_fma(a, b, c); } // the product unrounded everywhere (generic: slow)
PG_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
PG_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
PG_INLINE float vf_sum(vf a) { return _mm512_reduce_add_ps(a); }
PG_INLINE float vf_hmax(vf a) { return _mm512_reduce_max_ps(a); }
PG_INLINE vf vf_load_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
PG_INLINE void vf_store_f16(void *p, vf a) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PG_INLINE vf vf_load_bf16(const void *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
PG_INLINE vf vf_load_i8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
PG_INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PG_INLINE vf vf_floor(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
PG_INLINE vf vf_ceil(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC); }
PG_INLINE vf vf_trunc(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
// a * 2^n, n integral and within the exponent's range
PG_INLINE vf vf_scale2(vf a, vf n) { return _mm512_scalef_ps(a, n); }
PG_INLINE vf vf_scale2_normal(vf a, vf n) { return _mm512_scalef_ps(a, n); } // 2^n itself must be a normal number
PG_INLINE vf vf_sqrt(vf a) { return _mm512_sqrt_ps(a); }
PG_INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
PG_INLINE vf vf_swap_pairs(vf a) { return _mm512_permute_ps(a, 0xb1); } // lanes 1 0 3 2 ...
// mask of lanes where a < b is not needed: selection by comparison is all that kernels use
PG_INLINE vf vf_if_lt(vf a, vf b, vf x, vf y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
PG_INLINE int vf_any_lt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) != 0; }
// The lower or upper half of each of VF_N bytes, 0..15; a table look-up sees only the low four bits.
PG_INLINE vf vf_load_u4(const uint8_t *p, int upper) {
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm512_permutexvar_ps(upper ? _mm512_srli_epi32(x, 4) : x,
                               _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
// The same less 8.
PG_INLINE vf vf_load_i4(const uint8_t *p, int upper) {
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm512_permutexvar_ps(upper ? _mm512_srli_epi32(x, 4) : x,
                               _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
}
// (p[i] >> shift) & mask
PG_INLINE vf vf_load_bits(const uint8_t *p, int shift, int mask) {
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(x, (unsigned)shift), _mm512_set1_epi32(mask)));
}
PG_INLINE vf vf_set1_f16(const void *p) {
  uint16_t h;
  memcpy(&h, p, sizeof h);
  return _mm512_cvtph_ps(_mm256_set1_epi16((short)h));
}
// The first n < VF_N elements, zeros after them; nothing beyond is read.
PG_INLINE vf vf_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
PG_INLINE vf vf_load_f16_n(const void *p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
}
PG_INLINE vf vf_load_bf16_n(const void *p, int n) {
  const __m256i h = _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
// Each quarter: the sums of the same quarter of a, b, c, d.
PG_INLINE vf vf_quarters4(vf a, vf b, vf c, vf d) {
  const __m512 ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b),
               cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
  return _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee);
}
// s[0..4) = the sums of a, b, c, d; vf_lane says in which order
PG_INLINE void vf_sum4(float *s, vf a, vf b, vf c, vf d) {
  const __m512 q = vf_quarters4(a, b, c, d);
  const __m256 h = _mm512_castps512_ps256(q) + _mm512_extractf32x8_ps(q, 1);
  _mm_storeu_ps(s, _mm256_castps256_ps128(h) + _mm256_extractf128_ps(h, 1));
}
// The same; each sum is that of its four quarters, one after the other, and so is each quarter of its four lanes.
PG_INLINE void vf_sum4_in_turn(float *s, vf a, vf b, vf c, vf d) {
  const __m512 ab = _mm512_unpacklo_ps(a, b), cd = _mm512_unpacklo_ps(c, d);
  const __m512 ef = _mm512_unpackhi_ps(a, b), gh = _mm512_unpackhi_ps(c, d);
  const __m512 q =
      ((_mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee)) + _mm512_shuffle_ps(ef, gh, 0x44)) +
      _mm512_shuffle_ps(ef, gh, 0xee);
  const __m256 low = _mm512_castps512_ps256(q), high = _mm512_extractf32x8_ps(q, 1);
  _mm_storeu_ps(s, ((_mm256_castps256_ps128(low) + _mm256_extractf128_ps(low, 1)) + _mm256_castps256_ps128(high)) +
                       _mm256_extractf128_ps(high, 1));
}
// Transpose VF_N registers.
PG_INLINE void vf_turn(vf *x) {
  __m512i a[16], b[16];
  _Pragma("GCC unroll 8") for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(_mm512_castps_si512(x[i]), _mm512_castps_si512(x[i + 1]));
    a[i + 1] = _mm512_unpackhi_epi32(_mm512_castps_si512(x[i]), _mm512_castps_si512(x[i + 1]));
  }
  _Pragma("GCC unroll 4") for (int i = 0; i < 16; i += 4) _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) {
    b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
    b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
  }
  // b[4i + j] now has the lanes j, 4 + j, 8 + j, 12 + j of the registers 4i .. 4i + 3.
  _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
    const __m512i low02 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88);
    const __m512i low13 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
    const __m512i high02 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i high13 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    x[j] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(low02, high02, 0x88));
    x[4 + j] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(low13, high13, 0x88));
    x[8 + j] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(low02, high02, 0xdd));
    x[12 + j] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(low13, high13, 0xdd));
  }
}

#elif defined(PG_ISA_avx2)
#include <immintrin.h>
#define VF_N 8
typedef __m256 vf;
typedef int32_t vbits __attribute__((vector_size(32)));
PG_INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
PG_INLINE void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
PG_INLINE void vf_stream(float *p, vf a) { _mm256_stream_ps(p, a); }
PG_INLINE void vf_stream_end(void) { _mm_sfence(); }
PG_INLINE vf vf_set1(float x) { return _mm256_set1_ps(x); }
PG_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
PG_INLINE vf vf_fma1(vf a, vf b, vf c) { return vf_fma(a, b, c); }
PG_INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
PG_INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
PG_INLINE float vf_sum(vf a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
PG_INLINE float vf_hmax(vf a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
PG_INLINE vf vf_load_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
PG_INLINE void vf_store_f16(void *p, vf a) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PG_INLINE vf vf_load_bf16(const void *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
PG_INLINE vf vf_load_i8(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
PG_INLINE vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PG_INLINE vf vf_floor(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
PG_INLINE vf vf_ceil(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC); }
PG_INLINE vf vf_trunc(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
PG_INLINE vf vf_scale2(vf a, vf n) { // in two halves, so that 2^n itself cannot overflow
  const __m256i e = _mm256_cvtps_epi32(n), h = _mm256_srai_epi32(e, 1), bias = _mm256_set1_epi32(127);
  const __m256i p = _mm256_slli_epi32(_mm256_add_epi32(h, bias), 23);
  const __m256i q = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(e, h), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(a, _mm256_castsi256_ps(p)), _mm256_castsi256_ps(q));
}
PG_INLINE vf vf_scale2_normal(vf a, vf n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
}
PG_INLINE vf vf_sqrt(vf a) { return _mm256_sqrt_ps(a); }
PG_INLINE vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
PG_INLINE vf vf_swap_pairs(vf a) { return _mm256_permute_ps(a, 0xb1); }
PG_INLINE vf vf_if_lt(vf a, vf b, vf x, vf y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
PG_INLINE int vf_any_lt(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)) != 0; }
PG_INLINE vf vf_load_u4(const uint8_t *p, int upper) {
  const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  return _mm256_cvtepi32_ps(upper ? _mm256_srli_epi32(x, 4) : _mm256_and_si256(x, _mm256_set1_epi32(15)));
}
PG_INLINE vf vf_load_i4(const uint8_t *p, int upper) {
  const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  const __m256i q = upper ? _mm256_srli_epi32(x, 4) : _mm256_and_si256(x, _mm256_set1_epi32(15));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(q, _mm256_set1_epi32(8)));
}
PG_INLINE vf vf_load_bits(const uint8_t *p, int shift, int mask) {
  const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x, shift), _mm256_set1_epi32(mask)));
}
PG_INLINE vf vf_set1_f16(const void *p) {
  uint16_t h;
  memcpy(&h, p, sizeof h);
  return _mm256_cvtph_ps(_mm_set1_epi16((short)h));
}
PG_INLINE vf vf_load_n(const float *p, int n) {
  return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
}
PG_INLINE __m128i vf_load_u16_n(const void *p, int n) {
  uint64_t h[2] = {0, 0};
  for (int i = 0; i < n; i++) {
    uint16_t x;
    memcpy(&x, (const char *)p + 2 * i, sizeof x);
    h[i / 4] |= (uint64_t)x << i % 4 * 16;
  }
  return _mm_set_epi64x((int64_t)h[1], (int64_t)h[0]);
}
PG_INLINE vf vf_load_f16_n(const void *p, int n) { return _mm256_cvtph_ps(vf_load_u16_n(p, n)); }
PG_INLINE vf vf_load_bf16_n(const void *p, int n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(vf_load_u16_n(p, n)), 16));
}
PG_INLINE vf vf_quarters4(vf a, vf b, vf c, vf d) { // each half, here
  const __m256 ab = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b),
               cd = _mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d);
  return _mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xee);
}
PG_INLINE void vf_sum4(float *s, vf a, vf b, vf c, vf d) {
  const __m256 q = vf_quarters4(a, b, c, d);
  _mm_storeu_ps(s, _mm256_castps256_ps128(q) + _mm256_extractf128_ps(q, 1));
}
PG_INLINE void vf_sum4_in_turn(float *s, vf a, vf b, vf c, vf d) {
  const __m256 ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
  const __m256 ef = _mm256_unpackhi_ps(a, b), gh = _mm256_unpackhi_ps(c, d);
  const __m256 q =
      ((_mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xee)) + _mm256_shuffle_ps(ef, gh, 0x44)) +
      _mm256_shuffle_ps(ef, gh, 0xee);
  _mm_storeu_ps(s, _mm256_castps256_ps128(q) + _mm256_extractf128_ps(q, 1));
}
PG_INLINE void vf_turn(vf *x) {
  __m256 a[8], b[8];
  _Pragma("GCC unroll 4") for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  _Pragma("GCC unroll 2") for (int i = 0; i < 8; i += 4) _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) {
    b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
    b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
  }
  // b[4i + j] now has the lanes j and 4 + j of the registers 4i .. 4i + 3.
  _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
    x[j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
    x[4 + j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
  }
}

#else // four lanes: gcc's and clang's vector extension, and NEON where it has more
#include <math.h>
#define VF_N 4
#if defined(PG_ISA_neon)
#include <arm_neon.h>
typedef float32x4_t vf;
#else
typedef float vf __attribute__((vector_size(16)));
#endif
typedef int32_t vbits __attribute__((vector_size(16)));
static inline float pg_f16_to_f32(uint16_t h);
static inline uint16_t pg_f32_to_f16(float x);
#if defined(PG_ISA_neon)
PG_INLINE vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
PG_INLINE vf vf_fma1(vf a, vf b, vf c) { return vf_fma(a, b, c); }
PG_INLINE vf vf_load_f16(const void *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
PG_INLINE void vf_store_f16(void *p, vf a) { vst1_u8(p, vreinterpret_u8_f16(vcvt_f16_f32(a))); }
PG_INLINE vf vf_round(vf a) { return vrndnq_f32(a); }
PG_INLINE vf vf_floor(vf a) { return vrndmq_f32(a); }
PG_INLINE vf vf_ceil(vf a) { return vrndpq_f32(a); }
PG_INLINE vf vf_trunc(vf a) { return vrndq_f32(a); }
PG_INLINE vf vf_sqrt(vf a) { return vsqrtq_f32(a); }
PG_INLINE vf vf_load_bf16(const void *p) { return (vf)vshll_n_u16((uint16x4_t)vld1_u8(p), 16); }
PG_INLINE uint8x8_t vf_bytes(const void *p) { // four, and zeros
  uint32_t x;
  memcpy(&x, p, sizeof x);
  return vcreate_u8(x);
}
PG_INLINE vf vf_load_i8(const int8_t *p) {
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8((int8x8_t)vf_bytes(p)))));
}
PG_INLINE vf vf_load_bits(const uint8_t *p, int shift, int mask) {
  return vcvtq_f32_s32(((int32x4_t)vmovl_u16(vget_low_u16(vmovl_u8(vf_bytes(p)))) >> shift) & mask);
}
#else
PG_INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
PG_INLINE vf vf_fma1(vf a, vf b, vf c) {
  typedef double vd __attribute__((vector_size(32)));
#define D(x) __builtin_convertvector(x, vd)
  return __builtin_convertvector(D(a) * D(b) + D(c), vf);
#undef D
}
PG_INLINE vf vf_load_f16(const void *p) { // the exponent is rebased by an exact product, which also scales subnormals
  uint16_t h[4];
  memcpy(h, p, sizeof h);
  const vbits x = {h[0], h[1], h[2], h[3]}, mag = x & 0x7fff, special = (mag > 0x7bff) & 0x7f800000;
  return (vf)((vbits)((vf)(mag << 13) * 0x1p112f) | special | (x & 0x8000) << 16);
}
PG_INLINE void vf_store_f16(void *p, vf a) {
  const uint16_t h[4] = {pg_f32_to_f16(a[0]), pg_f32_to_f16(a[1]), pg_f32_to_f16(a[2]), pg_f32_to_f16(a[3])};
  memcpy(p, h, sizeof h);
}
PG_INLINE vf vf_round(vf a) { return (vf){rintf(a[0]), rintf(a[1]), rintf(a[2]), rintf(a[3])}; }
PG_INLINE vf vf_floor(vf a) { return (vf){floorf(a[0]), floorf(a[1]), floorf(a[2]), floorf(a[3])}; }
PG_INLINE vf vf_ceil(vf a) { return (vf){ceilf(a[0]), ceilf(a[1]), ceilf(a[2]), ceilf(a[3])}; }
PG_INLINE vf vf_trunc(vf a) { return (vf){truncf(a[0]), truncf(a[1]), truncf(a[2]), truncf(a[3])}; }
PG_INLINE vf vf_sqrt(vf a) { return (vf){sqrtf(a[0]), sqrtf(a[1]), sqrtf(a[2]), sqrtf(a[3])}; }
PG_INLINE vf vf_load_bf16(const void *p) {
  uint16_t h[4];
  memcpy(h, p, sizeof h);
  return (vf)((vbits){h[0], h[1], h[2], h[3]} << 16);
}
PG_INLINE vf vf_load_i8(const int8_t *p) { return (vf){p[0], p[1], p[2], p[3]}; }
PG_INLINE vf vf_load_bits(const uint8_t *p, int shift, int mask) {
  return __builtin_convertvector(((vbits){p[0], p[1], p[2], p[3]} >> shift) & mask, vf);
}
#endif
PG_INLINE vf vf_load(const float *p) {
  vf a;
  memcpy(&a, p, sizeof a);
  return a;
}
PG_INLINE void vf_store(float *p, vf a) { memcpy(p, &a, sizeof a); }
PG_INLINE void vf_stream(float *p, vf a) { vf_store(p, a); }
PG_INLINE void vf_stream_end(void) {}
PG_INLINE vf vf_set1(float x) { return (vf){x, x, x, x}; }
PG_INLINE vf vf_pick(vbits m, vf x, vf y);
PG_INLINE vf vf_max(vf a, vf b) { return vf_pick(a > b, a, b); }
PG_INLINE vf vf_min(vf a, vf b) { return vf_pick(a < b, a, b); }
PG_INLINE float vf_sum(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
PG_INLINE float vf_hmax(vf a) {
  const vf b = vf_max(a, (vf){a[2], a[3], a[0], a[1]});
  return b[0] > b[1] ? b[0] : b[1];
}
PG_INLINE vf vf_scale2(vf a, vf n) { // in two halves, so that 2^n itself cannot overflow
  const vbits e = __builtin_convertvector(n, vbits), h = e >> 1;
  return a * (vf)((h + 127) << 23) * (vf)((e - h + 127) << 23);
}
PG_INLINE vf vf_scale2_normal(vf a, vf n) { return a * (vf)((__builtin_convertvector(n, vbits) + 127) << 23); }
PG_INLINE vf vf_abs(vf a) { return (vf)((vbits)a & 0x7fffffff); }
PG_INLINE vf vf_swap_pairs(vf a) { return (vf){a[1], a[0], a[3], a[2]}; }
PG_INLINE vf vf_if_lt(vf a, vf b, vf x, vf y) { return vf_pick(a < b, x, y); }
PG_INLINE int vf_any_lt(vf a, vf b) {
  const vbits m = a < b;
  return (m[0] | m[1] | m[2] | m[3]) != 0;
}
PG_INLINE vf vf_load_u4(const uint8_t *p, int upper) { return vf_load_bits(p, upper ? 4 : 0, 15); }
PG_INLINE vf vf_load_i4(const uint8_t *p, int upper) { return vf_load_u4(p, upper) - vf_set1(8); }
PG_INLINE vf vf_set1_f16(const void *p) {
  uint16_t h;
  memcpy(&h, p, sizeof h);
  return vf_set1(pg_f16_to_f32(h));
}
PG_INLINE vf vf_load_n(const float *p, int n) {
  return (vf){n > 0 ? p[0] : 0, n > 1 ? p[1] : 0, n > 2 ? p[2] : 0, n > 3 ? p[3] : 0};
}
// No loops: gcc would make calls of them, around which sums leave their registers.
PG_INLINE uint16_t vf_u16_if(int there, const void *p, int i) {
  uint16_t h = 0;
  if (there) memcpy(&h, (const char *)p + 2 * i, sizeof h);
  return h;
}
PG_INLINE vf vf_load_f16_n(const void *p, int n) {
  const uint16_t h[4] = {vf_u16_if(n > 0, p, 0), vf_u16_if(n > 1, p, 1), vf_u16_if(n > 2, p, 2),
                         vf_u16_if(n > 3, p, 3)};
  return vf_load_f16(h);
}
PG_INLINE vf vf_load_bf16_n(const void *p, int n) {
  const uint16_t h[4] = {vf_u16_if(n > 0, p, 0), vf_u16_if(n > 1, p, 1), vf_u16_if(n > 2, p, 2),
                         vf_u16_if(n > 3, p, 3)};
  return vf_load_bf16(h);
}
PG_INLINE void vf_sum4(float *s, vf a, vf b, vf c, vf d) {
  s[0] = vf_sum(a);
  s[1] = vf_sum(b);
  s[2] = vf_sum(c);
  s[3] = vf_sum(d);
}
PG_INLINE void vf_sum4_in_turn(float *s, vf a, vf b, vf c, vf d) {
  s[0] = ((a[0] + a[1]) + a[2]) + a[3];
  s[1] = ((b[0] + b[1]) + b[2]) + b[3];
  s[2] = ((c[0] + c[1]) + c[2]) + c[3];
  s[3] = ((d[0] + d[1]) + d[2]) + d[3];
}
PG_INLINE void vf_turn(vf *x) {
  const vf a = x[0], b = x[1], c = x[2], d = x[3];
  for (int i = 0; i < 4; i++) x[i] = (vf){a[i], b[i], c[i], d[i]};
}
#endif

// vf_sum4 adds lanes as a balanced tree: lane vf_lane(0) to lane vf_lane(1), 2 to 3, then the first pair to the second,
// and so on.
PG_INLINE int vf_lane(int i) {
  static const uint8_t order[4] = {0, 2, 1, 3};
  return (VF_N == 16 ? order[i / 4] : i / 4) * 4 + order[i % 4];
}

// The same on every instruction set (gcc and clang give vector types their operators).
PG_INLINE vf vf_add(vf a, vf b) { return a + b; }
PG_INLINE vf vf_sub(vf a, vf b) { return a - b; }
PG_INLINE vf vf_mul(vf a, vf b) { return a * b; }
PG_INLINE vf vf_div(vf a, vf b) { return a / b; }
PG_INLINE vf vf_zero(void) { return vf_set1(0.0f); }
PG_INLINE vf vf_pick(vbits m, vf x, vf y) { return (vf)(((vbits)x & m) | ((vbits)y & ~m)); } // m: all ones, or none
PG_INLINE vf vf_with_sign(vf a, vf sign) { return vf_pick((vbits)vf_set1(-0.0f), sign, a); }
