// Elementwise functions of one tensor. dst may be the source: no restrict.
#include "simd/rows.h"
#include "simd/vmath.h"

// y[i] = f(x[i]) for dense f32; p: the op's parameters.
typedef void (*vec_fn)(float *y, const float *x, int64_t n, const float *p);

// The last elements use a padded register, so that an element's result does not depend on its place.
#define VEC(name, expr)                                                                                                \
  PG_INLINE vf f_##name(vf x, const float *p) { return expr; }                                                         \
  static void vec_##name(float *y, const float *x, int64_t n, const float *p) {                                        \
    int64_t i = 0;                                                                                                     \
    for (; i + VF_N <= n; i += VF_N) vf_store(y + i, f_##name(vf_load(x + i), p));                                     \
    if (i < n) {                                                                                                       \
      float tail[VF_N] = {0};                                                                                          \
      memcpy(tail, x + i, (n - i) * sizeof(float));                                                                    \
      vf_store(tail, f_##name(vf_load(tail), p));                                                                      \
      memcpy(y + i, tail, (n - i) * sizeof(float));                                                                    \
    }                                                                                                                  \
  }

// (x + 3) / 6 within 0..1. The bound is the first operand, so that NaN stays.
PG_INLINE vf hardsigmoid(vf x) { return vf_min(vf_set1(1.0f), vf_max(vf_zero(), (x + vf_set1(3.0f)) / vf_set1(6.0f))); }

// 0 for NaN
PG_INLINE vf sgn(vf x) {
  return vf_if_lt(vf_zero(), x, vf_set1(1.0f), vf_if_lt(x, vf_zero(), vf_set1(-1.0f), vf_zero()));
}

// p: alpha_p, alpha_n (both as the function multiplies with them), beta, eps. e^m - 1 - x = (e^m - 1 - m) + (m - x), of
// which the last is 0 where m is x, infinities included.
PG_INLINE vf xielu(vf x, const float *p) {
  const vf m = vf_min(vf_set1(p[3]), x), line = x * vf_set1(p[2]);
  const vf above = vf_fma(x * vf_set1(p[0]), x, line);
  const vf below = vf_fma(vf_expm1_rest(m) + vf_if_lt(m, x, m - x, vf_zero()), vf_set1(p[1]), line);
  return vf_if_lt(vf_zero(), x, above, below);
}

VEC(silu, vf_silu(x))
VEC(gelu, vf_gelu(x))
VEC(gelu_quick, x *vf_sigmoid(x *vf_set1(1.702f)))
VEC(gelu_erf, x *vf_phi(x))
VEC(relu, vf_max(vf_zero(), x))
VEC(leaky_relu, vf_if_lt(x, vf_zero(), x *vf_set1(p[0]), x))
VEC(elu, vf_if_lt(x, vf_zero(), vf_expm1(x), x))
VEC(tanh, vf_tanh(x))
VEC(sigmoid, vf_sigmoid(x))
VEC(hardswish, x *hardsigmoid(x))
VEC(hardsigmoid, hardsigmoid(x))
VEC(step, vf_if_lt(vf_zero(), x, vf_set1(1.0f), vf_zero()))
VEC(exp, vf_exp(x))
VEC(expm1, vf_expm1(x))
VEC(neg, -x)
VEC(abs, vf_abs(x))
VEC(sqr, x *x)
VEC(sqrt, vf_sqrt(x))
VEC(scale, vf_fma(x, vf_set1(p[0]), vf_set1(p[1])))
VEC(clamp, vf_min(vf_set1(p[1]), vf_max(vf_set1(p[0]), x)))
VEC(add1, x + vf_set1(p[0]))
VEC(log, vf_log(x))
VEC(sin, vf_sin(x))
VEC(cos, vf_cos(x))
VEC(softplus, vf_softplus(x))
VEC(floor, vf_floor(x))
VEC(ceil, vf_ceil(x))
VEC(round, vf_round_away(x))
VEC(trunc, vf_trunc(x))
VEC(sgn, sgn(x))
VEC(xielu, xielu(x, p))
VEC(fill, vf_set1(p[0]))

// A dense tensor as one long row.
static int is_dense(const pg_tensor *t) {
  int64_t expected = t->type == PG_F32 ? 4 : 2;
  for (int d = 0; d < 4; d++) {
    if (t->ne[d] != 1 && t->nb[d] != expected) return 0;
    expected *= t->ne[d];
  }
  return 1;
}

static pg_tensor flat(pg_tensor t) {
  t.nb[0] = t.type == PG_F32 ? 4 : 2;
  t.ne[0] *= t.ne[1] * t.ne[2] * t.ne[3];
  t.ne[1] = t.ne[2] = t.ne[3] = 1;
  return t;
}

enum { UNIT = 2048, STRIP = 256 }; // elements that threads share out; elements at a time where rows are not dense f32

static int rows(const pg_task *t, int ith, int nth, vec_fn f, const float *p) {
  const int whole = is_dense(&t->dst) && is_dense(&t->src[0]);
  const pg_tensor y = whole ? flat(t->dst) : t->dst, x = whole ? flat(t->src[0]) : t->src[0];
  const int f32 = pg_is_f32_row(&y) && pg_is_f32_row(&x);
  const int64_t n = y.ne[0], units = (n + UNIT - 1) / UNIT; // per row
  const pg_range r = pg_share(units * pg_n_rows(&y), ith, nth);
  for (int64_t u = r.first; u < r.last; u++) {
    const pg_idx i = pg_unravel(&y, u / units);
    char *py = pg_row_at(&y, i.i1, i.i2, i.i3);
    const char *px = pg_row_at(&x, i.i1, i.i2, i.i3);
    const int64_t k0 = u % units * UNIT, k1 = PG_MIN(k0 + UNIT, n);
    if (f32) {
      f((float *)py + k0, (const float *)px + k0, k1 - k0, p);
      continue;
    }
    for (int64_t k = k0; k < k1; k += STRIP) {
      float s[STRIP];
      const int64_t m = PG_MIN(STRIP, k1 - k);
      pg_get_f32(s, &x, px, k, m);
      f(s, s, m, p);
      pg_put_f32(&y, py, k, s, m);
    }
  }
  return PG_OK;
}

static double softplus(double x) { return PG_MAX(x, 0) + log1p(exp(-fabs(x))); }

#define OP(name)                                                                                                       \
  int PG_FN(name##_any)(const pg_task *t, int ith, int nth) {                                                          \
    const float p[2] = {(float)t->param[0], (float)t->param[1]};                                                       \
    return rows(t, ith, nth, vec_##name, p);                                                                           \
  }
OP(silu)
OP(gelu)
OP(gelu_quick)
OP(gelu_erf)
OP(relu)
OP(leaky_relu)
OP(elu)
OP(tanh)
OP(sigmoid)
OP(hardswish)
OP(hardsigmoid)
OP(step)
OP(exp)
OP(expm1)
OP(log)
OP(neg)
OP(abs)
OP(softplus)
OP(sqr)
OP(sqrt)
OP(sin)
OP(cos)
OP(floor)
OP(ceil)
OP(round)
OP(trunc)
OP(sgn)
OP(scale)
OP(clamp)
OP(fill)

int PG_FN(xielu_any)(const pg_task *t, int ith, int nth) {
  const double alpha_n = t->param[0], alpha_p = t->param[1], beta = t->param[2];
  const float p[4] = {(float)softplus(alpha_p), (float)(beta + softplus(alpha_n)), (float)beta, (float)t->param[3]};
  return rows(t, ith, nth, vec_xielu, p);
}

int PG_FN(add1_any)(const pg_task *t, int ith, int nth) {
  float b;
  pg_get_f32(&b, &t->src[1], t->src[1].data, 0, 1);
  return rows(t, ith, nth, vec_add1, &b);
}
