// Gradients of elementwise functions: y = g f'(x). dst may be a source: no restrict.
#include "simd/rows.h"
#include "simd/vmath.h"

// y[i] = g[i] f'(x[i]) for dense f32.
typedef void (*vec_fn)(float *y, const float *g, const float *x, int64_t n);

// A derivative, 0 when it is too small for its factors to be F32: an infinite g gives NaN there.
PG_INLINE vf counted(vf slope) { return vf_if_lt(vf_abs(slope), vf_set1(0x1p-100f), vf_zero(), slope); }

// Beyond 1000 a derivative is that there, also at infinity.
#define VEC(name)                                                                                                      \
  PG_INLINE vf f_##name(vf g, vf x) { return g * counted(name##_slope(vf_within(x, 1000.0f))); }                       \
  static void vec_##name(float *y, const float *g, const float *x, int64_t n) {                                        \
    int64_t i = 0;                                                                                                     \
    for (; i + VF_N <= n; i += VF_N) vf_store(y + i, f_##name(vf_load(g + i), vf_load(x + i)));                        \
    if (i < n) {                                                                                                       \
      float tail[VF_N];                                                                                                \
      vf_store(tail, f_##name(vf_load_n(g + i, (int)(n - i)), vf_load_n(x + i, (int)(n - i))));                        \
      memcpy(y + i, tail, (n - i) * sizeof(float));                                                                    \
    }                                                                                                                  \
  }

// s = sigmoid(z); returns its derivative, s (1 - s), without cancellation.
PG_INLINE vf sigmoid_slope(vf z, vf *s) {
  const vf one = vf_set1(1.0f), e = vf_exp(-vf_abs(z)), d = one / (one + e);
  *s = vf_if_lt(z, vf_zero(), e, one) * d;
  return e * d * d;
}

PG_INLINE vf silu_slope(vf x) {
  vf s;
  const vf t = sigmoid_slope(x, &s);
  return vf_fma(x, t, s);
}

PG_INLINE vf gelu_quick_slope(vf x) {
  vf s;
  const vf z = x * vf_set1(1.702f), t = sigmoid_slope(z, &s);
  return vf_fma(z, t, s);
}

// gelu is x sigmoid(x (a + b x^2)): see vf_gelu.
PG_INLINE vf gelu_slope(vf x) {
  vf s;
  const vf a = vf_set1(1.59576912161f), bx2 = x * x * vf_set1(0.0713548162726f), t = sigmoid_slope(x * (a + bx2), &s);
  return vf_fma(x * vf_fma(bx2, vf_set1(3.0f), a), t, s);
}

PG_INLINE vf gelu_erf_slope(vf x) {
  return vf_fma(x * vf_set1(0.39894228040143f), vf_exp(x * x * vf_set1(-0.5f)), vf_phi(x));
}

VEC(silu)
VEC(gelu)
VEC(gelu_quick)
VEC(gelu_erf)

enum { UNIT = 2048, STRIP = 256 }; // elements that threads share out; elements at a time where rows are not dense f32

static int rows(const pg_task *t, int ith, int nth, vec_fn f) {
  const pg_tensor *y = &t->dst, *a = &t->src[0], *b = &t->src[1];
  const int f32 = pg_is_f32_row(y) && pg_is_f32_row(a) && pg_is_f32_row(b);
  const int64_t n = y->ne[0], units = (n + UNIT - 1) / UNIT; // per row
  const pg_range r = pg_share(units * pg_n_rows(y), ith, nth);
  for (int64_t unit = r.first; unit < r.last; unit++) {
    const pg_idx i = pg_unravel(y, unit / units);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    const char *pa = pg_row_at(a, i.i1, i.i2, i.i3), *pb = pg_row_at(b, i.i1, i.i2, i.i3);
    const int64_t k0 = unit % units * UNIT, k1 = PG_MIN(k0 + UNIT, n);
    if (f32) {
      f((float *)py + k0, (const float *)pa + k0, (const float *)pb + k0, k1 - k0);
      continue;
    }
    for (int64_t k = k0; k < k1; k += STRIP) {
      float g[STRIP], x[STRIP];
      const int64_t m = PG_MIN(STRIP, k1 - k);
      pg_get_f32(g, a, pa, k, m);
      pg_get_f32(x, b, pb, k, m);
      f(g, g, x, m);
      pg_put_f32(y, py, k, g, m);
    }
  }
  return PG_OK;
}

#define OP(name)                                                                                                       \
  int PG_FN(name##_back_any)(const pg_task *t, int ith, int nth) { return rows(t, ith, nth, vec_##name); }
OP(silu)
OP(gelu)
OP(gelu_quick)
OP(gelu_erf)
