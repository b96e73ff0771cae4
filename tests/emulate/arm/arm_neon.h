// NEON, with dot products (dotprod) and products of matrices (i8mm) of bytes, in gcc's vectors: the intrinsics that
// csrc uses, so that x86 CPUs can test what is written in them (tests/emulate.sh). It takes the place of the compiler's
// header.
#pragma once
#include <immintrin.h> // F16C, and how floats are rounded
#include <stdint.h>
#include <string.h>

#define EM static inline __attribute__((always_inline, unused))
#define EM_TYPES(name, type, lanes)                                                                                    \
  typedef type name##x##lanes##_t __attribute__((vector_size(sizeof(type) * (lanes))));
EM_TYPES(int8, int8_t, 8)
EM_TYPES(int8, int8_t, 16)
EM_TYPES(uint8, uint8_t, 8)
EM_TYPES(uint8, uint8_t, 16)
EM_TYPES(int16, int16_t, 4)
EM_TYPES(int16, int16_t, 8)
EM_TYPES(uint16, uint16_t, 4)
EM_TYPES(uint16, uint16_t, 8)
EM_TYPES(int32, int32_t, 2)
EM_TYPES(int32, int32_t, 4)
EM_TYPES(uint32, uint32_t, 2)
EM_TYPES(uint32, uint32_t, 4)
EM_TYPES(int64, int64_t, 1)
EM_TYPES(int64, int64_t, 2)
EM_TYPES(float16, uint16_t, 4) // their bits
EM_TYPES(float16, uint16_t, 8)
EM_TYPES(float32, float, 4)
typedef struct int16x8x2_t {
  int16x8_t val[2];
} int16x8x2_t;

// -- memory

#define EM_LOAD(name, element, vector)                                                                                 \
  EM vector vld1##name(const element *p) {                                                                             \
    vector v;                                                                                                          \
    memcpy(&v, p, sizeof v);                                                                                           \
    return v;                                                                                                          \
  }
#define EM_STORE(name, element, vector)                                                                                \
  EM void vst1##name(element *p, vector v) { memcpy(p, &v, sizeof v); }
EM_LOAD(_u8, uint8_t, uint8x8_t)
EM_LOAD(_s64, int64_t, int64x1_t)
EM_LOAD(q_s8, int8_t, int8x16_t)
EM_LOAD(q_u8, uint8_t, uint8x16_t)
EM_LOAD(q_s16, int16_t, int16x8_t)
EM_STORE(_s8, int8_t, int8x8_t)
EM_STORE(_u8, uint8_t, uint8x8_t)
EM_STORE(_s16, int16_t, int16x4_t)
EM_STORE(q_u8, uint8_t, uint8x16_t)
EM_STORE(q_s16, int16_t, int16x8_t)

EM int64x2_t vld1q_dup_s64(const int64_t *p) {
  int64_t x;
  memcpy(&x, p, sizeof x);
  return (int64x2_t){x, x};
}
EM int16x8x2_t vld2q_s16(const int16_t *p) {
  const int16x8_t a = vld1q_s16(p), b = vld1q_s16(p + 8);
  return (int16x8x2_t){{__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14),
                        __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)}};
}

// -- lanes

EM uint8x8_t vcreate_u8(uint64_t x) { return (uint8x8_t)x; }
EM int64x1_t vcreate_s64(uint64_t x) { return (int64x1_t)x; }
EM int32x2_t vdup_n_s32(int32_t x) { return (int32x2_t){x, x}; }
EM int32x4_t vdupq_n_s32(int32_t x) { return (int32x4_t){x, x, x, x}; }
EM uint8x16_t vdupq_n_u8(uint8_t x) { return (uint8x16_t){0} + x; }
EM uint32_t vget_lane_u32(uint32x2_t v, int i) { return v[i]; }
EM int64x2_t vcombine_s64(int64x1_t a, int64x1_t b) { return (int64x2_t){a[0], b[0]}; }
EM int16x8_t vcombine_s16(int16x4_t a, int16x4_t b) { return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7); }
EM uint16x8_t vcombine_u16(uint16x4_t a, uint16x4_t b) { return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7); }
EM uint8x8_t vget_low_u8(uint8x16_t v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7); }
EM int16x4_t vget_low_s16(int16x8_t v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }
EM uint16x4_t vget_low_u16(uint16x8_t v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }
EM uint8x8_t em_high_u8(uint8x16_t v) { return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); }
EM int16x4_t em_high_s16(int16x8_t v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7); }
EM uint16x4_t em_high_u16(uint16x8_t v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7); }
#define vextq_s16(a, b, n) ((int16x8_t)_mm_alignr_epi8((__m128i)(b), (__m128i)(a), 2 * (n)))
EM uint8x16_t vqtbl1q_u8(uint8x16_t table, uint8x16_t at) { // 0 where `at` is 16 and more
  return (uint8x16_t)_mm_shuffle_epi8((__m128i)table, _mm_adds_epu8((__m128i)at, _mm_set1_epi8(0x70)));
}
EM int32x4_t vzip1q_s32(int32x4_t a, int32x4_t b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
EM int32x4_t vzip2q_s32(int32x4_t a, int32x4_t b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
EM uint32x4_t vzip1q_u32(uint32x4_t a, uint32x4_t b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
EM uint32x4_t vzip2q_u32(uint32x4_t a, uint32x4_t b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
EM float32x4_t vzip1q_f32(float32x4_t a, float32x4_t b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
EM float32x4_t vuzp1q_f32(float32x4_t a, float32x4_t b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6); }
EM float32x4_t vuzp2q_f32(float32x4_t a, float32x4_t b) { return __builtin_shufflevector(a, b, 1, 3, 5, 7); }

// -- integers

EM int16x8_t vmovl_s8(int8x8_t v) { return __builtin_convertvector(v, int16x8_t); }
EM uint16x8_t vmovl_u8(uint8x8_t v) { return __builtin_convertvector(v, uint16x8_t); }
EM int32x4_t vmovl_s16(int16x4_t v) { return __builtin_convertvector(v, int32x4_t); }
EM uint32x4_t vmovl_u16(uint16x4_t v) { return __builtin_convertvector(v, uint32x4_t); }
EM uint32x4_t vshll_n_u16(uint16x4_t v, int n) { return __builtin_convertvector(v, uint32x4_t) << n; }
EM uint32x4_t vshll_high_n_u16(uint16x8_t v, int n) { return vshll_n_u16(em_high_u16(v), n); }
EM int8x8_t vmovn_s16(int16x8_t v) { return __builtin_convertvector(v, int8x8_t); }
EM uint8x8_t vmovn_u16(uint16x8_t v) { return __builtin_convertvector(v, uint8x8_t); }
EM int16x4_t vmovn_s32(int32x4_t v) { return __builtin_convertvector(v, int16x4_t); }
EM uint16x4_t vmovn_u32(uint32x4_t v) { return __builtin_convertvector(v, uint16x4_t); }
EM uint16x8_t vsubl_u8(uint8x8_t a, uint8x8_t b) { return vmovl_u8(a) - vmovl_u8(b); }
EM uint16x8_t vsubl_high_u8(uint8x16_t a, uint8x16_t b) { return vsubl_u8(em_high_u8(a), em_high_u8(b)); }
EM int32x4_t vshlq_s32(int32x4_t a, int32x4_t n) { return a << n; } // csrc shifts to the left only
EM int32x4_t vpaddq_s32(int32x4_t a, int32x4_t b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
}
EM int32_t vaddvq_s32(int32x4_t v) { return v[0] + v[1] + v[2] + v[3]; }
EM int32_t vaddlvq_s16(int16x8_t v) { return vaddvq_s32(vmovl_s16(vget_low_s16(v)) + vmovl_s16(em_high_s16(v))); }
EM int32x4_t vmlal_s16(int32x4_t sum, int16x4_t a, int16x4_t b) { return sum + vmovl_s16(a) * vmovl_s16(b); }
EM int32x4_t vmlal_high_s16(int32x4_t sum, int16x8_t a, int16x8_t b) {
  return vmlal_s16(sum, em_high_s16(a), em_high_s16(b));
}
EM int32x4_t vmlal_lane_s16(int32x4_t sum, int16x4_t a, int16x4_t b, int i) { return sum + vmovl_s16(a) * b[i]; }
EM int32x4_t vmlal_high_lane_s16(int32x4_t sum, int16x8_t a, int16x4_t b, int i) {
  return vmlal_lane_s16(sum, em_high_s16(a), b, i);
}
EM int32x4_t em_dots(int8x16_t a, int8x16_t b) { // of four quartets
  const __m256i two = _mm256_madd_epi16(_mm256_cvtepi8_epi16((__m128i)a), _mm256_cvtepi8_epi16((__m128i)b));
  return vpaddq_s32((int32x4_t)_mm256_castsi256_si128(two), (int32x4_t)_mm256_extracti128_si256(two, 1));
}
EM int32x4_t vdotq_laneq_s32(int32x4_t sum, int8x16_t a, int8x16_t b, int lane) {
  return sum + em_dots(a, (int8x16_t)vdupq_n_s32(((int32x4_t)b)[lane]));
}
EM int32x4_t vmmlaq_s32(int32x4_t sum, int8x16_t a, int8x16_t b) { // a: rows 0 and 1 of eight bytes; b: columns 0 and 1
  const int64x2_t c = (int64x2_t)b;
  const int32x4_t same = em_dots(a, b), other = em_dots(a, (int8x16_t)__builtin_shufflevector(c, c, 1, 0));
  return sum + __builtin_shufflevector(vpaddq_s32(same, other), same, 0, 2, 3, 1);
}

// -- floats

EM float32x4_t vfmaq_f32(float32x4_t sum, float32x4_t a, float32x4_t b) { return _mm_fmadd_ps(a, b, sum); }
EM float32x4_t vsqrtq_f32(float32x4_t v) { return _mm_sqrt_ps(v); }
EM float32x4_t vrndnq_f32(float32x4_t v) { return _mm_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
EM float32x4_t vrndmq_f32(float32x4_t v) { return _mm_round_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
EM float32x4_t vrndpq_f32(float32x4_t v) { return _mm_round_ps(v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC); }
EM float32x4_t vrndq_f32(float32x4_t v) { return _mm_round_ps(v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
EM float32x4_t vcvtq_f32_s32(int32x4_t v) { return __builtin_convertvector(v, float32x4_t); }
EM float32x4_t vcvtq_f32_u32(uint32x4_t v) { return __builtin_convertvector(v, float32x4_t); }
EM int32x4_t vcvtnq_s32_f32(float32x4_t v) { // x86 gives INT32_MIN for what does not fit, and for NaN
  const int32x4_t n = (int32x4_t)_mm_cvtps_epi32(v);
  return (n ^ (v >= 0x1p31f)) & (v == v);
}
EM float32x4_t vcvt_f32_f16(float16x4_t v) { return _mm_cvtph_ps(_mm_set_epi64x(0, (int64_t)v)); }
EM float32x4_t vcvt_high_f32_f16(float16x8_t v) { return vcvt_f32_f16(em_high_u16(v)); }
EM float16x4_t vcvt_f16_f32(float32x4_t v) {
  return (float16x4_t)_mm_cvtsi128_si64(_mm_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
EM float16x4_t vreinterpret_f16_u8(uint8x8_t v) { return (float16x4_t)v; }
EM uint8x8_t vreinterpret_u8_f16(float16x4_t v) { return (uint8x8_t)v; }
#undef EM
#undef EM_TYPES
#undef EM_LOAD
#undef EM_STORE
