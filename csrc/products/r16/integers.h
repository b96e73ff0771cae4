// Columns as integers of 16 bits, in blocks of 32 elements; a run of them has one step (sums.h). Their products with
// codes are exact, and they take little bandwidth.
#pragma once
#include "products/r16/repacked.h"
#include "products/r16/sums.h"

// Whether codes are multiplied with words, and not with two planes of bytes: on Arm without dot products of bytes.
#if VF_N == 4 && !defined(__ARM_FEATURE_DOTPROD)
#define R16_WORDS 1
#else
#define R16_WORDS 0
#endif

#if VF_N == 4
// q[0..16) = x * inv as integers; the result is their sum.
PG_INLINE int32_t r16_integers_of(int16x8_t q[2], const float *x, vf inv) {
  int32x4_t sum = vdupq_n_s32(0);
  int16x4_t four[4];
  for (int i = 0; i < 4; i++) {
    const int32x4_t wide = vcvtnq_s32_f32(vf_mul(vf_load(x + 4 * i), inv));
    sum += wide;
    four[i] = vmovn_s32(wide);
  }
  for (int i = 0; i < 2; i++) q[i] = vcombine_s16(four[2 * i], four[2 * i + 1]);
  return vaddvq_s32(sum);
}

// Their planes: q = 256 * hi + lo.
PG_INLINE int8x8_t r16_hi(int16x8_t q) { return vmovn_s16((q + 128) >> 8); }
PG_INLINE int8x8_t r16_lo(int16x8_t q) { return vmovn_s16(q); }
#endif

struct r16_x {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  int8_t both[4][2][8]; // hi and lo of eight elements side by side: x = d * (256 * hi + lo)
#elif R16_WORDS
  int16_t q[32]; // x = d * q
#else
  int8_t hi[32], lo[32]; // x = d * (256 * hi + lo)
#endif
#if VF_N == 8
  int16_t q[32]; // x = d * q; the elements 0, 2, 1, 3 of each quartet
#endif
  float d;         // the step of the run
  int32_t less[3]; // minus the sums of the integers: of the first 16, the second, and all
  float sums[3];   // those sums
};
