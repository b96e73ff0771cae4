// The root mean square of a row, for rms_norm and for products that compute the norm themselves.
#pragma once
#include "kernel.h"

// Whether a mean of squares was summed in f32 without overflow, and without loss below its smallest numbers.
static inline int pg_fits_f32(double mean_square) { return mean_square > 1e-30 && mean_square < 1e38; }

enum { PIECE = 64 * VF_N }; // elements whose f32 sum is added to a double

// The sum of squares of n floats. `floor` is a number that will be added to their mean, or a bound below which smaller
// squares do not matter. Rows whose squares overflow or underflow f32 are summed in double; such rows are rare.
static inline double pg_sum_squares(const float *x, int64_t n, double floor) {
  double sum = 0;
  int64_t i = 0;
  while (i + VF_N <= n) {
    const int64_t end = PG_MIN(n - VF_N, i + PIECE - VF_N);
    vf s[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    for (; i + 3 * VF_N <= end; i += 4 * VF_N) {
      const vf a = vf_load(x + i), b = vf_load(x + i + VF_N), c = vf_load(x + i + 2 * VF_N),
               d = vf_load(x + i + 3 * VF_N);
      s[0] = vf_fma(a, a, s[0]);
      s[1] = vf_fma(b, b, s[1]);
      s[2] = vf_fma(c, c, s[2]);
      s[3] = vf_fma(d, d, s[3]);
    }
    for (; i <= end; i += VF_N) s[0] = vf_fma(vf_load(x + i), vf_load(x + i), s[0]);
    sum += vf_sum((s[0] + s[1]) + (s[2] + s[3]));
  }
  for (; i < n; i++) sum += (double)x[i] * x[i];
  if (pg_fits_f32(sum / (double)n + floor)) return sum;
  sum = 0;
  for (i = 0; i < n; i++) sum += (double)x[i] * x[i];
  return sum;
}

// The factor by which rms_norm multiplies a row.
static inline double pg_rms_scale(const float *x, int64_t n, double eps) {
  return 1 / sqrt(pg_sum_squares(x, n, eps) / (double)n + eps);
}

// y = x * scale * weight, rounded twice as rms_norm and mul do. y may be x.
static inline void pg_scale_mul(float *y, const float *x, double scale, const float *weight, int64_t n) {
  int64_t i = 0;
  if (pg_fits_f32(scale * scale)) {
    const float s = (float)scale;
    for (; i + VF_N <= n; i += VF_N) vf_store(y + i, vf_mul(vf_mul(vf_load(x + i), vf_set1(s)), vf_load(weight + i)));
    for (; i < n; i++) y[i] = x[i] * s * weight[i];
  }
  for (; i < n; i++) y[i] = (float)(x[i] * scale) * weight[i];
}
