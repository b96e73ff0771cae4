// Convert columns of b to fixed point, in the layout of fixed.c's tiles.
#include "products/gemm/columns.h"
#include "products/gemm/fixed_columns.h"
#include "products/gemm/fixed_pairs.h"
#include "products/gemm/halves.h"

// The largest of x[0..n) in size, and the sum of the squares of x * unit. n is a multiple of 32.
typedef struct extent {
  float max, squares;
} extent;

PG_INLINE extent extent_of(const float *x, float unit, int64_t n) {
  vf max[2] = {vf_zero(), vf_zero()}, sum[2] = {vf_zero(), vf_zero()};
  for (int64_t i = 0; i < n; i += 2 * VF_N)
    for (int j = 0; j < 2; j++) {
      const vf v = vf_mul(vf_load(x + i + j * VF_N), vf_set1(unit));
      max[j] = vf_max(max[j], vf_abs(v));
      sum[j] = vf_fma(v, v, sum[j]);
    }
  return (extent){vf_hmax(vf_max(max[0], max[1])), vf_sum(vf_add(sum[0], sum[1]))};
}

// The step of x[0..n), and by what its integers are multiples of x. With NaN or an infinity anywhere, the step is NaN.
// When all values are below 1e-30, they count as 0.
static float step_of(const float *x, int64_t n, float *inv) {
  extent e = extent_of(x, 1.0f, n);
  float unit = 1.0f;
  if (!(e.max > 1e-15f && e.max < 1e15f)) { // squares may overflow or vanish
    unit = e.max > 1e-30f ? 1.0f / e.max : 0.0f;
    e = extent_of(x, unit, n);
  }
  const float norm = sqrtf(e.squares);
  *inv = 0;
  if (!(norm > 0)) return norm; // 0 or NaN
  *inv = PG_MIN(R16_NORM / norm, R16_MAX / e.max) * unit;
  return 1.0f / *inv;
}

// Put the integers of x[0..n) to `to`, and return their step.
static float put(int16_t *to, const float *x, int64_t n) {
  float inv;
  const float step = step_of(x, n, &inv);
  put_ints(to, x, inv, n);
  return step;
}

void PG_FN(r16_put_columns)(const r16_columns *c, const r16_product *p, r16_share share) {
  if (r16_in_runs(p)) {
    PG_FN(r16_put_runs)(c, p, share);
    return;
  }
#if defined(PG_HALVES)
  if (!p->across) {
    PG_FN(r16_put_half_columns)(c, p, share);
    return;
  }
#endif
  const r16_quad g = r16_quad_of(c, p, share);
  for (int64_t s = share.first; s < share.last && g.n; s++) {
    const int64_t k0 = s * c->strip, n = r16_strip_elements(c, s);
    const r16_fixed to = r16_fixed_of(c, share.group, s);
    float *steps = to.steps + share.column;
    int16_t four[R16_QUAD][KC];
    for (int j = 0; j < R16_QUAD; j++) {
      steps[j] = 0;
      if (j < g.n) {
        float x[KC];
        r16_get(x, p, &g, j, k0, n);
        steps[j] = put(four[j], x, n);
      } else {
        memset(four[j], 0, sizeof four[j]);
      }
    }
    put_4_columns(to.ints + share.column * 2, four, to.width, n / 2);
  }
}
