// soft_max (with mask, scale, ALiBi, sinks) and its gradient, diag_mask_inf, diag_mask_zero, tri. dst may be the
// source: no restrict.
#include "simd/rows.h"
#include "kernels/softmax.h"

enum { PIECE = 64 * VF_N, STRIP = 256 };
enum mask_kind { NO_MASK, MASK_F32, MASK_F16 };

typedef struct job { // one row: softmax(x * scale + m * slope)
  float *y;
  const float *x;
  const char *m;
  int64_t n;
  float scale;
  float slope, slope_rest; // slope_rest: what rounding the slope to f32 lost
  float sink;              // one more score, without a column; -inf: none
} job;

// Load n elements, at most a register; when there are fewer, the last one is repeated.
PG_INLINE vf load_x(const float *x, int64_t n) {
  float b[VF_N];
  if (n >= VF_N) return vf_load(x);
  for (int i = 0; i < VF_N; i++) b[i] = x[PG_MIN(i, n - 1)];
  return vf_load(b);
}

PG_INLINE vf load_m(const char *m, int64_t i, int64_t n, enum mask_kind kind) {
  if (kind == MASK_F32) return load_x((const float *)m + i, n);
  const uint16_t *h = (const uint16_t *)m + i;
  if (n >= VF_N) return vf_load_f16(h);
  uint16_t b[VF_N];
  for (int k = 0; k < VF_N; k++) b[k] = h[PG_MIN(k, n - 1)];
  return vf_load_f16(b);
}

// x * scale + m * slope - top. The error must be small compared with the result, not with its terms, so the low parts
// of the products are added.
PG_INLINE vf below_top(const job *j, int64_t i, int64_t n, vf top, enum mask_kind kind) {
  const vf x = load_x(j->x + i, n), scale = vf_set1(j->scale);
  if (kind == NO_MASK) return vf_fma1(x, scale, -top);
  const vf m = load_m(j->m, i, n, kind), slope = vf_set1(j->slope);
  const vf bias = m * slope, t = bias - top, back = t - bias;
  const vf bias_rest = vf_fma1(m, slope, -bias) + m * vf_set1(j->slope_rest);
  const vf t_rest = (bias - (t - back)) - (top + back);
  const vf rest = vf_if_lt(vf_set1(-3e38f), t, bias_rest + t_rest, vf_zero()); // -inf has none
  return vf_masked(vf_fma1(x, scale, t) + rest, m);
}

PG_INLINE void row(const job *j, enum mask_kind kind) {
  const int64_t n = j->n;
  vf tops = vf_set1(-INFINITY);
  for (int64_t i = 0; i < n; i += VF_N) {
    vf s = load_x(j->x + i, n - i) * vf_set1(j->scale);
    if (kind != NO_MASK) {
      const vf m = load_m(j->m, i, n - i, kind);
      s = vf_masked(vf_fma(m, vf_set1(j->slope), s), m);
    }
    tops = vf_max(s, tops);
  }
  const float peak = PG_MAX(vf_hmax(tops), j->sink);
  const vf top = vf_set1(peak);
  double sum = j->sink == -INFINITY ? 0 : exp((double)j->sink - peak);
  int64_t i = 0;
  while (i + VF_N <= n) {
    const int64_t end = PG_MIN(n - VF_N, i + PIECE - VF_N);
    vf part = vf_zero();
    for (; i <= end; i += VF_N) {
      const vf e = vf_exp_below(below_top(j, i, VF_N, top, kind));
      vf_store(j->y + i, e);
      part += e;
    }
    sum += vf_sum(part);
  }
  if (i < n) {
    float e[VF_N];
    vf_store(e, vf_exp_below(below_top(j, i, n - i, top, kind)));
    for (int k = 0; i < n; i++, k++) {
      j->y[i] = e[k];
      sum += e[k];
    }
  }
  const float factor = (float)(1 / sum);
  for (i = 0; i + VF_N <= n; i += VF_N) vf_store(j->y + i, vf_load(j->y + i) * vf_set1(factor));
  for (; i < n; i++) j->y[i] *= factor;
}

static void row_plain(const job *j) { row(j, NO_MASK); }
static void row_mask_f32(const job *j) { row(j, MASK_F32); }
static void row_mask_f16(const job *j) { row(j, MASK_F16); }

int PG_FN(soft_max_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *x = &t->src[0], *m = &t->src[1], *sinks = &t->src[2];
  job j = {.n = x->ne[0], .scale = (float)t->param[0], .slope = 1, .sink = -INFINITY};
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    j.y = (float *)pg_row_at(y, i.i1, i.i2, i.i3);
    j.x = (const float *)pg_row_at(x, i.i1, i.i2, i.i3);
    if (sinks->data) j.sink = *(const float *)(sinks->data + i.i2 * sinks->nb[0]);
    if (!m->data) {
      row_plain(&j);
      continue;
    }
    j.m = pg_row_at(m, i.i1, i.i2 % m->ne[2], i.i3 % m->ne[3]);
    if (i.i1 == 0 || ir == r.first) { // a new head
      const double slope = pg_alibi_slope(t->param[1], i.i2, y->ne[2]);
      j.slope = (float)slope;
      j.slope_rest = (float)(slope - j.slope);
    }
    (m->type == PG_F32 ? row_mask_f32 : row_mask_f16)(&j);
  }
  return PG_OK;
}

// src[0]: the gradient g of the result y, src[1]: y; param: scale. dst = scale y (g - sum of g y over the row).
int PG_FN(soft_max_ext_back_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *d = &t->dst;
  const int64_t n = d->ne[0];
  const vf scale = vf_set1((float)t->param[0]);
  const pg_range r = pg_share(pg_n_rows(d), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx at = pg_unravel(d, ir);
    float *pd = (float *)pg_row_at(d, at.i1, at.i2, at.i3);
    const float *g = (const float *)pg_row_at(&t->src[0], at.i1, at.i2, at.i3);
    const float *y = (const float *)pg_row_at(&t->src[1], at.i1, at.i2, at.i3);
    double sum = 0;
    int64_t i = 0;
    while (i + VF_N <= n) {
      const int64_t end = PG_MIN(n - VF_N, i + PIECE - VF_N);
      vf part = vf_zero();
      for (; i <= end; i += VF_N) part = vf_fma(vf_load(g + i), vf_load(y + i), part);
      sum += vf_sum(part);
    }
    for (; i < n; i++) sum += (double)g[i] * y[i];
    const vf dot = vf_set1((float)sum);
    for (i = 0; i + VF_N <= n; i += VF_N) vf_store(pd + i, scale * vf_load(y + i) * (vf_load(g + i) - dot));
    for (; i < n; i++) pd[i] = (float)t->param[0] * y[i] * (g[i] - (float)sum);
  }
  return PG_OK;
}

// dst = src[0] in columns `from` .. `to` of a row, `value` in the others.
static void keep_columns(const pg_task *t, pg_idx i, int64_t from, int64_t to, float value) {
  const pg_tensor *y = &t->dst, *x = &t->src[0];
  char *py = pg_row_at(y, i.i1, i.i2, i.i3);
  const char *px = pg_row_at(x, i.i1, i.i2, i.i3);
  float b[STRIP];
  for (int64_t k = from, w; py != px && k < to; k += w) {
    w = PG_MIN(STRIP, to - k);
    pg_get_f32(b, x, px, k, w);
    pg_put_f32(y, py, k, b, w);
  }
  for (int64_t k = 0; k < STRIP; k++) b[k] = value;
  for (int64_t k = 0; k < from; k += STRIP) pg_put_f32(y, py, k, b, PG_MIN(STRIP, from - k));
  for (int64_t k = to; k < y->ne[0]; k += STRIP) pg_put_f32(y, py, k, b, PG_MIN(STRIP, y->ne[0] - k));
}

// Column k of row i1 is visible where k <= param[0] + i1.
static int mask_future(const pg_task *t, int ith, int nth, float value) {
  const int64_t n = t->dst.ne[0];
  const pg_range r = pg_share(pg_n_rows(&t->dst), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(&t->dst, ir);
    const double visible = t->param[0] + (double)i.i1 + 1;
    keep_columns(t, i, 0, visible < (double)n ? (int64_t)visible : n, value);
  }
  return PG_OK;
}

int PG_FN(diag_mask_inf_f32)(const pg_task *t, int ith, int nth) { return mask_future(t, ith, nth, -INFINITY); }
int PG_FN(diag_mask_zero_f32)(const pg_task *t, int ith, int nth) { return mask_future(t, ith, nth, 0); }

// param: 0 the upper triangle with the diagonal, 1 without, 2 the lower one with, 3 without
int PG_FN(tri_any)(const pg_task *t, int ith, int nth) {
  const int type = (int)t->param[0], diagonal = type == 0 || type == 2;
  const pg_range r = pg_share(pg_n_rows(&t->dst), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(&t->dst, ir);
    if (type < 2)
      keep_columns(t, i, i.i1 + !diagonal, t->dst.ne[0], 0);
    else
      keep_columns(t, i, 0, i.i1 + diagonal, 0);
  }
  return PG_OK;
}
