// Gated linear units: y = act(g) * u. Gate and value are two tensors, or the two halves of each row of one
// (param 0: the second half is the gate). dst may be a source of the two-tensor form: no restrict.
#include "simd/rows.h"
#include "simd/vmath.h"

// y[i] = f(g[i], u[i]); p: the op's parameters after the first.
typedef void (*vec_fn)(float *y, const float *g, const float *u, int64_t n, const float *p);

#define VEC(name, expr)                                                                                                \
  PG_INLINE vf f_##name(vf g, vf u, const float *p) { return expr; }                                                   \
  static void vec_##name(float *y, const float *g, const float *u, int64_t n, const float *p) {                        \
    int64_t i = 0;                                                                                                     \
    for (; i + VF_N <= n; i += VF_N) vf_store(y + i, f_##name(vf_load(g + i), vf_load(u + i), p));                     \
    if (i < n) {                                                                                                       \
      float tail[VF_N];                                                                                                \
      const vf t = f_##name(vf_load_n(g + i, (int)(n - i)), vf_load_n(u + i, (int)(n - i)), p);                        \
      vf_store(tail, t);                                                                                               \
      memcpy(y + i, tail, (n - i) * sizeof(float));                                                                    \
    }                                                                                                                  \
  }

VEC(reglu, vf_max(vf_zero(), g) * u)
VEC(geglu, vf_gelu(g) * u)
VEC(geglu_erf, g *vf_phi(g) * u)
VEC(geglu_quick, g *vf_sigmoid(g *vf_set1(1.702f)) * u)
VEC(swiglu, vf_silu(g) * u)
// p: alpha, limit
VEC(swiglu_oai, vf_swiglu_oai(g, u, p[0], p[1]))
VEC(swiglu_clamp, vf_silu(vf_below(g, p[0])) * vf_within(u, p[0]))

enum { UNIT = 2048, STRIP = 256 }; // elements that threads share out; elements at a time where rows are not dense f32

static int rows(const pg_task *t, int ith, int nth, vec_fn f) {
  const pg_tensor *y = &t->dst, *a = &t->src[PG_GLU_GATE];
  const pg_tensor *b = t->src[PG_GLU_UP].data ? &t->src[PG_GLU_UP] : a;
  const float p[2] = {(float)t->param[1], (float)t->param[2]};
  const int64_t n = y->ne[0], units = (n + UNIT - 1) / UNIT; // per row
  const int halves = b == a, swapped = halves && t->param[0] != 0;
  const int64_t first_g = swapped ? n : 0, first_u = halves && !swapped ? n : 0;
  const int f32 = pg_is_f32_row(y) && pg_is_f32_row(a) && pg_is_f32_row(b);
  const pg_range r = pg_share(units * pg_n_rows(y), ith, nth);
  for (int64_t unit = r.first; unit < r.last; unit++) {
    const pg_idx i = pg_unravel(y, unit / units);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    const char *pa = pg_row_at(a, i.i1, i.i2, i.i3), *pb = pg_row_at(b, i.i1, i.i2, i.i3);
    const int64_t k0 = unit % units * UNIT, k1 = PG_MIN(k0 + UNIT, n);
    if (f32) {
      f((float *)py + k0, (const float *)pa + first_g + k0, (const float *)pb + first_u + k0, k1 - k0, p);
      continue;
    }
    for (int64_t k = k0; k < k1; k += STRIP) {
      float g[STRIP], u[STRIP];
      const int64_t m = PG_MIN(STRIP, k1 - k);
      pg_get_f32(g, a, pa, first_g + k, m);
      pg_get_f32(u, b, pb, first_u + k, m);
      f(g, g, u, m, p);
      pg_put_f32(y, py, k, g, m);
    }
  }
  return PG_OK;
}

#define OP(name)                                                                                                       \
  int PG_FN(name##_any)(const pg_task *t, int ith, int nth) { return rows(t, ith, nth, vec_##name); }
OP(reglu)
OP(geglu)
OP(geglu_erf)
OP(geglu_quick)
OP(swiglu)
OP(swiglu_oai)
OP(swiglu_clamp)
