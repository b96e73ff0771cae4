// Sums of shifted rows, the core of convolutions without columns. Rows of the image are laid out so that each tap of
// the kernel reads them densely, from its own offset, with zeros beyond the image.
#pragma once
#include "simd/rows.h"

enum { STRIP = 64, OUTS = 4 }; // elements of a row of the result at a time (whole vectors), and output channels

// How many elements the sums read from an offset on, for n results.
static inline int64_t pg_padded(int64_t n) { return (n + 4 * VF_N - 1) / (4 * VF_N) * (4 * VF_N); }

// x[0..n) = elements first, first + step ... of a row of `size` of t's elements, zeros outside of it. NULL: all zeros.
static inline void pg_fill(float *x, int64_t n, const pg_tensor *t, const char *row, int64_t size, int64_t first,
                           int64_t step) {
  pg_tensor every = *t;
  every.nb[0] *= step;
  every.ne[0] = 2; // more than one, so that nb[0] is used
  const int64_t before = PG_MIN(n, first < 0 ? (-first + step - 1) / step : 0);
  const int64_t after = row && first < size ? PG_MAX(before, PG_MIN(n, (size - first + step - 1) / step)) : before;
  memset(x, 0, before * sizeof *x);
  if (after > before) pg_get_f32(x + before, &every, row + first * t->nb[0], before, after - before);
  memset(x + after, 0, (n - after) * sizeof *x);
}

// y[o][0 .. vecs * VF_N) = the sum over i of weight[i][o] * x[at[i] ..], for `outs` rows y of STRIP.
PG_INLINE void pg_sum_tile(float *y, const float *weight, const float *x, const int32_t *at, int64_t n, int outs,
                           int vecs) {
  vf sum[OUTS * 2];
  for (int o = 0; o < outs * vecs; o++) sum[o] = vf_zero();
  for (int64_t i = 0; i < n; i++) {
    const float *p = x + at[i];
    for (int o = 0; o < outs; o++) {
      const vf f = vf_set1(weight[i * outs + o]);
      for (int v = 0; v < vecs; v++) sum[o * vecs + v] = vf_fma(vf_load(p + v * VF_N), f, sum[o * vecs + v]);
    }
  }
  for (int o = 0; o < outs; o++)
    for (int v = 0; v < vecs; v++) vf_store(y + o * STRIP + v * VF_N, sum[o * vecs + v]);
}

// The same for n elements, rounded up to whole vectors. outs: OUTS, or 1.
static inline void pg_sum_shifted(float *y, const float *weight, const float *x, const int32_t *at, int64_t n_taps,
                                  int64_t n, int outs) {
  int64_t j = 0;
  if (outs == 1) {
    for (; n - j > 2 * VF_N; j += 4 * VF_N) pg_sum_tile(y + j, weight, x + j, at, n_taps, 1, 4);
    for (; j < n; j += VF_N) pg_sum_tile(y + j, weight, x + j, at, n_taps, 1, 1);
  } else {
    for (; n - j > VF_N; j += 2 * VF_N) pg_sum_tile(y + j, weight, x + j, at, n_taps, OUTS, 2);
    for (; j < n; j += VF_N) pg_sum_tile(y + j, weight, x + j, at, n_taps, OUTS, 1);
  }
}
