// Columns as integers of 16 bits, in blocks of 32 elements; a run of them has one step (sums.h). Their products with
// codes are exact, and they take little bandwidth.
#pragma once
#include "products/r16/repacked.h"
#include "products/r16/sums.h"

// x = d * (256 * hi + lo) = d * q. q has the elements 0, 2, 1, 3 of each quartet. With VNNI, blocks of codes meet
// bytes, and words q; otherwise both are there.
struct r16_x {
#if defined(__AVX512VNNI__)
  union {
    struct {
      int8_t hi[32], lo[32];
    };
    int16_t q[32];
  };
#else
  int8_t hi[32], lo[32];
  int16_t q[32];
#endif
  float d;         // the step of the run
  int32_t less[3]; // minus the sums of the integers: of the first 16, the second, and all
  float sums[3];   // those sums
};
