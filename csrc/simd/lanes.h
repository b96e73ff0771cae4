// Lay rows out so that the lanes of a vector are rows; then sums of products do not run across lanes.
#pragma once
#include "kernel.h"

// to[i * lanes + 0..4) = elements i of four rows, lda apart, for i < k.
PG_INLINE void pg_rows_to_lanes(float *to, int64_t lanes, const float *a, int64_t lda, int64_t k) {
  typedef float four __attribute__((vector_size(16), aligned(4)));
  int64_t i = 0;
  for (; i + 4 <= k; i += 4, to += 4 * lanes) {
    const four r0 = *(const four *)(a + i), r1 = *(const four *)(a + lda + i);
    const four r2 = *(const four *)(a + 2 * lda + i), r3 = *(const four *)(a + 3 * lda + i);
    const four p = __builtin_shufflevector(r0, r1, 0, 4, 1, 5), q = __builtin_shufflevector(r2, r3, 0, 4, 1, 5);
    const four s = __builtin_shufflevector(r0, r1, 2, 6, 3, 7), t = __builtin_shufflevector(r2, r3, 2, 6, 3, 7);
    *(four *)to = __builtin_shufflevector(p, q, 0, 1, 4, 5);
    *(four *)(to + lanes) = __builtin_shufflevector(p, q, 2, 3, 6, 7);
    *(four *)(to + 2 * lanes) = __builtin_shufflevector(s, t, 0, 1, 4, 5);
    *(four *)(to + 3 * lanes) = __builtin_shufflevector(s, t, 2, 3, 6, 7);
  }
  for (; i < k; i++, to += lanes)
    for (int64_t r = 0; r < 4; r++) to[r] = a[r * lda + i];
}
