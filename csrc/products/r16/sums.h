// The order of all sums of a product of weights in blocks. Few columns (gemv.c, passing.c) and many (products/gemm in
// fixed point) keep to it, so a column's result has the same bits whatever is computed beside it:
//
//   sum    integers of x times codes less their offset, times the integer scale where the format has one: exact, in
//          any order. A sum is as long as one f32 scale holds, but no longer than r16_sum_elements
//   acc    over a run of R16_RUN elements, from 0: for each sum in turn, first acc += shift * (sum of x) for each
//          shift of its elements, then acc += sum * scale. Each is one fma
//   total  over the runs, from 0: total += acc * d, one fma, where d is the step of x in that run
//
// The steps of x keep every sum within 32 bits: see R16_X_NORM.
#pragma once
#include "products/r16/vec.h"

enum { R16_RUN = 256, R16_RUN_UNITS = R16_RUN / R16_UNIT };

// Whether units are summed as integers, after multiplication with their integer scales.
PG_INLINE int r16_sums_units(r16_format f) { return f.units == 8; }

// Elements of a sum; units of one (at least one); elements per shift, 0 when there are none.
PG_INLINE int r16_sum_elements(r16_format f) {
  if (!r16_sums_units(f)) return R16_UNIT / r16_halves(f);
  return f.codes == R16_NIBBLES_CRUMBS || f.table == R16_IQ4 ? R16_RUN / 2 : R16_RUN; // see R16_X_NORM
}
PG_INLINE int r16_sum_units(r16_format f) { return PG_MAX(1, r16_sum_elements(f) / R16_UNIT); }
PG_INLINE int r16_shift_elements(r16_format f) { return r16_head_bytes(f) < 64 ? 0 : R16_UNIT / r16_halves(f); }

// Of a block, for VF_N rows.
typedef struct r16_head {
  vf d, m; // d with the format's factor
} r16_head;

PG_INLINE r16_head r16_head_of(r16_format f, vf d, vf m) {
  return (r16_head){f.factor == 1 ? d : vf_mul(d, vf_set1(f.factor)), m};
}

// That of a repacked block, for the rows of a part.
PG_INLINE r16_head r16_head_at(r16_format f, const uint8_t *block, int part) {
  const int bytes = r16_head_bytes(f);
  return r16_head_of(f, bytes ? vf_load_f16(block + part * VF_N * 2) : vf_set1(1.0f),
                     bytes == 64 ? vf_load_f16(block + 32 + part * VF_N * 2) : vf_zero());
}

// Of a unit, by half (only the first counts when both halves share one).
typedef struct r16_unit_scales {
  vi whole[2]; // what dots are multiplied with before they are summed (r16_sums_units)
  vf scale[2]; // of a sum (all others)
  vf shift[2]; // where the format has any
} r16_unit_scales;

PG_INLINE r16_unit_scales r16_scales_of(r16_format f, r16_head head, const uint8_t *p) {
  const vf zero = vf_zero(), one = vf_set1(f.factor);
  r16_unit_scales r = {{vi_zero(), vi_zero()}, {head.d, zero}, {head.m, zero}};
  switch (f.scales) {
  case R16_E8M0:
    r.scale[0] = vf_scale2(vf_set1(1.0f), vf_load_i8((const int8_t *)p));
    break;
  case R16_D_S32:
    r.whole[0] = vi_load_i8(p);
    break;
  case R16_E4M3:
    r.scale[0] = vf_mul(vf_load_e4m3(p), one);
    r.scale[1] = vf_mul(vf_load_e4m3(p + 16), one);
    break;
  case R16_D_S16:
    r.whole[0] = vi_load_i8(p);
    r.whole[1] = vi_load_i8(p + 16);
    break;
  case R16_DM_SM32:
    r.whole[0] = vi_load_i8(p);
    r.shift[0] = vf_mul(vf_sub(zero, head.m), vf_load_i8((const int8_t *)p + 16));
    break;
  case R16_DM_SM16:
    _Pragma("GCC unroll 2") for (int h = 0; h < 2; h++) {
      r.whole[h] = vi_load_u4(p + 16 * h, 0);
      r.shift[h] = vf_mul(vf_sub(zero, head.m), vf_load_u4(p + 16 * h, 1));
    }
    break;
  default:
    break;
  }
  return r;
}

// The sums of some rows and a column so far.
typedef struct r16_sums {
  vi sum; // r16_sums_units only
  vf acc;
} r16_sums;

// Add one unit: `dots` by half, of codes less their offset; x_sums as in r16_x.
PG_INLINE void r16_add_unit(r16_format f, r16_sums *s, const r16_unit_scales *w, const vi *dots, const float *x_sums) {
  const int halves = r16_halves(f), whole = f.scales > R16_D_M; // halves: the first two of x_sums, otherwise the third
  _Pragma("GCC unroll 2") for (int h = 0; h < halves; h++) {
    if (r16_shift_elements(f)) s->acc = vf_fma(w->shift[h], vf_set1(x_sums[halves == 2 ? h : 2]), s->acc);
    if (!r16_sums_units(f))
      s->acc = vf_fma(vf_of_vi(dots[h]), w->scale[h], s->acc);
    else
      s->sum = vi_add(s->sum, whole ? vi_mul(dots[h], w->whole[h]) : dots[h]);
  }
}

// After the last unit of a sum.
PG_INLINE void r16_end_sum(r16_format f, r16_sums *s, r16_head head) {
  if (!r16_sums_units(f)) return;
  s->acc = vf_fma(vf_of_vi(s->sum), head.d, s->acc);
  s->sum = vi_zero();
}

// After the last unit of a run.
PG_INLINE vf r16_end_run(vf total, r16_sums s, float d) { return vf_fma(s.acc, vf_set1(d), total); }

// Steps of x: its integers are at most R16_X_MAX in size, and their norm at most R16_X_NORM over each half of a run.
// So no sum reaches 2^31, by the Cauchy-Schwarz inequality:
// - Q6_K and IQ4_XS (codes less offset, times scales, at most 32 * 128), half a run: 4096 * sqrt(128) * R16_X_NORM;
// - other formats with integer scales (at most 31 * 63), a run: 1953 * sqrt(256) * R16_X_NORM * sqrt(2);
// - formats without, one unit: 128 * 32 * R16_X_MAX.
// Rounding adds sqrt(128) / 2 to the norm; there is room for it.
#define R16_X_NORM 46300.0f
enum { R16_X_MAX = 127 * 256 };

typedef struct r16_step {
  float inv, d; // x * inv is rounded to integers, which stand for d each. NaN and infinities: inv is 0, d is NaN
} r16_step;

// The step of a run x[0..n), whole units. When it would not be a normal number, all values count as 0.
PG_INLINE r16_step r16_step_of(const float *x, int64_t n) {
  vf top[2] = {vf_zero(), vf_zero()};
  for (int64_t i = 0; i < n; i += R16_UNIT)
    _Pragma("GCC unroll 4") for (int j = 0; j < R16_UNIT / VF_N; j++) top[j % 2] =
        vf_max(top[j % 2], vf_abs(vf_load(x + i + j * VF_N)));
  const float max = vf_hmax(vf_max(top[0], top[1]));
  const float unit = max >= R16_X_MAX * 0x1p-126f ? 1.0f / max : 0.0f; // so that squares neither overflow nor vanish
  float squares = 0, sum = 0;
  for (int64_t i = 0; i < n; i += R16_RUN / 2) {
    vf s[2] = {vf_zero(), vf_zero()};
    for (int64_t e = i; e < PG_MIN(n, i + R16_RUN / 2); e += R16_UNIT)
      _Pragma("GCC unroll 4") for (int j = 0; j < R16_UNIT / VF_N; j++) {
        const vf v = vf_mul(vf_load(x + e + j * VF_N), vf_set1(unit));
        s[j % 2] = vf_fma(v, v, s[j % 2]);
      }
    const float of_sum = vf_sum(vf_add(s[0], s[1]));
    sum += of_sum; // has NaN wherever it comes from
    squares = PG_MAX(squares, of_sum);
  }
  if (sum != sum) return (r16_step){0, sum};
  if (squares == 0) return (r16_step){0, 0};
  const float most = PG_MIN((float)R16_X_MAX, R16_X_NORM / sqrtf(squares));
  return (r16_step){most * unit, max / most};
}
