// Round columns for weights in the fast form (pyggml/form.py), so that products of many columns can multiply bytes
// (products/gemm/int8.h). All else is as without it: the same integers of 16 bits, in the order of sums.h.
#pragma once
#include "products/r16/sums.h"
#include "simd/lanes.h"

enum { R16_PART = R16_UNIT / 2, R16_PARTS = R16_RUN / R16_PART, R16_TRIED = 8 };

// Steps are larger than those of r16_step_of, because rounding makes integers larger: in norm at most by 2 / 127 and 6,
// and one of them at most by half a factor.
#define R16_ROOM 0.98f

// Round a run x[0..n), whole units, to its integers: x becomes them. Those of each 16 elements are one factor times
// integers from -127 to 127. The factor is that with the least error of the R16_TRIED smallest. x has room for R16_RUN
// elements. The result's `inv` is 1; it is 0 as in r16_step_of, and then x and factors mean nothing.
PG_INLINE r16_step r16_round(float *x, int64_t n, float *factors) {
  const r16_step all = r16_step_of(x, n);
  if (all.inv == 0) return all;
  const vf inv = vf_set1(all.inv * R16_ROOM);
  for (int64_t i = 0; i < n; i += VF_N) vf_store(x + i, vf_mul(vf_load(x + i), inv));
  for (int64_t i = n; i < R16_RUN; i++) x[i] = 0;
  for (int64_t first = 0; first < n; first += R16_PART * VF_N) {
    _Alignas(64) float y[R16_PART][VF_N]; // lanes are the parts of 16 elements
    pg_turn(y[0], VF_N, VF_N * VF_N, (const char *)(x + first), R16_PART * sizeof *x, R16_PART);
    vf top = vf_zero();
    for (int i = 0; i < R16_PART; i++) top = vf_max(top, vf_abs(vf_load(y[i])));
    vf factor = vf_max(vf_set1(1.0f), vf_ceil(vf_mul(top, vf_set1(1 / 127.4f)))), best = factor, least = top;
    for (int t = 0; t < R16_TRIED; t++, factor = vf_add(factor, vf_set1(1.0f))) {
      const vf one = vf_div(vf_set1(1.0f), factor), less = vf_sub(vf_zero(), factor);
      vf error = vf_zero();
      _Pragma("GCC unroll 16") for (int i = 0; i < R16_PART; i++) {
        const vf v = vf_load(y[i]), e = vf_fma(vf_round(vf_mul(v, one)), less, v);
        error = vf_fma(e, e, error);
      }
      best = t ? vf_if_lt(error, least, factor, best) : factor;
      least = t ? vf_min(error, least) : error;
    }
    vf_store(factors + first / R16_PART, best);
  }
  for (int64_t i = 0; i < n; i += VF_N) {
    const vf factor = vf_set1(factors[i / R16_PART]), one = vf_set1(1.0f / factors[i / R16_PART]);
    vf_store(x + i, vf_mul(vf_round(vf_mul(vf_load(x + i), one)), factor));
  }
  return (r16_step){1.0f, all.d / R16_ROOM};
}
