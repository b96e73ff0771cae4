// Round the columns of products in the fast form (pyggml/form.py), so that many of them can be multiplied as bytes
// (products/gemm/int8.h). All else is as without it: the same integers of 16 bits, in the order of sums.h.
#pragma once
#include "products/r16/sums.h"
#include "simd/lanes.h"

enum { R16_PART = R16_UNIT / 2, R16_PARTS = R16_RUN / R16_PART, R16_TRIED = 8 };

// Steps are larger than those of r16_step_of, because rounding may make integers larger, each by half its factor at
// most. A factor is at most top / 127.4 + R16_TRIED, where top is the largest integer of up to 32 that share the
// factor. So the norm of half a run, 128 integers, grows by a part of sqrt(32) / 2 / 127.4 = 0.023 and by sqrt(128) / 2
// * R16_TRIED = 46.
#define R16_ROOM 0.97f

// Whether both parts of a unit have the same factor: in formats whose dots a product multiplies with integer scales
// (sums.h), too.
PG_INLINE int r16_rounds_units(r16_format f) { return r16_sums_units(f); }

// How the parts of a run are rounded, each of 16 elements: to multiples of a factor.
typedef struct r16_rounding {
  float factors[R16_PARTS], ones[R16_PARTS]; // ones: 1 / factor
  float sums[R16_PARTS];                     // of the integers, before they are multiplied
} r16_rounding;

// Choose the rounding of a run x[0..n), whole units, in which each part becomes one factor times integers from -127 to
// 127; with `units` both parts of a unit have the same factor. It is that with the least error of the R16_TRIED
// smallest. x has room for R16_RUN elements, and is multiplied by `inv` of the result, which is that of r16_step_of
// with more room; when it is 0, nothing else is set.
PG_INLINE r16_step r16_round(float *x, int64_t n, int units, r16_rounding *r) {
  r16_step step = r16_step_of(x, n);
  if (step.inv == 0) return step;
  step = (r16_step){step.inv * R16_ROOM, step.d / R16_ROOM};
  const vf inv = vf_set1(step.inv), one = vf_set1(1.0f);
  for (int64_t i = 0; i < n; i += VF_N) vf_store(x + i, vf_mul(vf_load(x + i), inv));
  for (int64_t i = n; i < R16_RUN; i++) x[i] = 0;
  for (int64_t first = 0; first < n; first += R16_PART * VF_N) {
    _Alignas(64) float y[R16_PART][VF_N]; // lanes are parts
    pg_turn(y[0], VF_N, VF_N * VF_N, (const char *)(x + first), R16_PART * sizeof *x, R16_PART);
    vf top = vf_zero();
    _Pragma("GCC unroll 16") for (int i = 0; i < R16_PART; i++) top = vf_max(top, vf_abs(vf_load(y[i])));
    if (units) top = vf_max(top, vf_swap_pairs(top));
    vf factor = vf_max(one, vf_ceil(vf_mul(top, vf_set1(1 / 127.4f)))), best = factor, least = one;
    for (int t = 0; t < R16_TRIED; t++, factor = vf_add(factor, one)) {
      const vf of = vf_div(one, factor);
      vf lost[2] = {vf_zero(), vf_zero()};
      _Pragma("GCC unroll 16") for (int i = 0; i < R16_PART; i++) {
        const vf v = vf_mul(vf_load(y[i]), of), e = vf_sub(v, vf_round(v));
        lost[i % 2] = vf_fma(e, e, lost[i % 2]);
      }
      vf error = vf_mul(vf_mul(factor, factor), vf_add(lost[0], lost[1]));
      if (units) error = vf_add(error, vf_swap_pairs(error));
      best = t ? vf_if_lt(error, least, factor, best) : factor;
      least = t ? vf_min(error, least) : error;
    }
    const vf of = vf_div(one, best);
    vf sum = vf_zero();
    _Pragma("GCC unroll 16") for (int i = 0; i < R16_PART; i++) sum = vf_add(sum, vf_round(vf_mul(vf_load(y[i]), of)));
    const int64_t at = first / R16_PART;
    vf_store(r->factors + at, best);
    vf_store(r->ones + at, of);
    vf_store(r->sums + at, sum);
  }
  return step;
}

// Convert a run to what r16_round has chosen for it, in floats; the result is its step, for integers as they are then.
PG_INLINE r16_step r16_rounded(float *x, int64_t n, int units) {
  r16_rounding r;
  const r16_step step = r16_round(x, n, units, &r);
  if (step.inv == 0) return step;
  for (int64_t i = 0; i < n; i += VF_N) {
    const vf v = vf_mul(vf_load(x + i), vf_set1(r.ones[i / R16_PART]));
    vf_store(x + i, vf_mul(vf_round(v), vf_set1(r.factors[i / R16_PART])));
  }
  return (r16_step){1.0f, step.d};
}
