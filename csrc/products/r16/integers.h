// Columns as integers of 16 bits, in blocks of 32 elements with a scale each. Their products with codes are exact, and
// they take little bandwidth.
#pragma once
#include "products/r16/repacked.h"

enum { R16_X_MAX = 127 * 256 };

struct r16_x {
  int8_t hi[32], lo[32]; // x = d * (256 * hi + lo)
#if !defined(__AVX512VNNI__)
  int16_t q[32]; // x = d * q; the elements 0, 2, 1, 3 of each quartet
#endif
  float d;
  int32_t less[3]; // minus the sums of the integers: of the first 16, the second, and all
  float dsum[3];   // d times those sums
};
