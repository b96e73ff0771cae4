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
