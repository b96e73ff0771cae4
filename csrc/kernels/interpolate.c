// upscale (interpolate) and its gradient. A row of the result is a weighted sum of some rows of the source; then each
// element is a weighted sum along that row. For every mode, a table per axis holds places and weights (as in
// pyggml/ops/interpolate.py).
#include "simd/rows.h"

enum { NEAREST = 0, BILINEAR = 1, BICUBIC = 2, MODE = 255, ALIGN_CORNERS = 256, ANTIALIAS = 512 };

// Element i of n_out is the sum over its n[i] taps j of source element at[j * n_out + i] times weight[j * n_out + i].
// Taps from n[i] to max have weight 0 and read the element after the last.
typedef struct table {
  int64_t n_in, n_out, max;
  int mode, align; // align: the middles of the outermost elements of both lie in the same place
  double half, step;
  int32_t *n, *at;
  float *weight;
} table;

static int64_t table_size(const table *a) {
  const int64_t most = PG_MAX(PG_MAX(a->n_in, a->n_out), a->max);
  return pg_in_32_bits(most, pg_times(a->n_out, (1 + 2 * a->max) * 4));
}

static table table_of(const pg_tensor *from, const pg_tensor *to, int mode, int axis) {
  table a = {.n_in = from->ne[axis], .n_out = to->ne[axis], .mode = mode};
  const int corners = (a.mode & ALIGN_CORNERS) != 0;
  a.align = corners && a.n_in > 1 && a.n_out > 1;
  a.half = corners ? 0.0 : 0.5;
  a.step = a.align ? (double)(a.n_in - 1) / (double)(a.n_out - 1) : (double)a.n_in / (double)a.n_out;
  a.max = (a.mode & MODE) == NEAREST ? 1 : (a.mode & MODE) == BICUBIC ? 4 : 2;
  if (a.mode & ANTIALIAS) a.max = (int64_t)(2 * PG_MAX(1.0, a.step)) + 2;
  return a;
}

// Place the table in scratch memory. Returns the memory after it.
static char *use(table *a, char *work) {
  a->n = (int32_t *)work;
  a->at = a->n + a->n_out;
  a->weight = (float *)(a->at + a->n_out * a->max);
  return (char *)(a->weight + a->n_out * a->max);
}

// Add a tap to element i. A place beyond the ends stands for the outermost element; taps of weight 0 are left out.
static void put_tap(table *a, int64_t i, int64_t at, double weight) {
  if (weight == 0) return;
  const int64_t j = a->n[i]++ * a->n_out + i;
  a->at[j] = (int32_t)PG_MIN(PG_MAX(at, 0), a->n_in - 1);
  a->weight[j] = (float)weight;
}

static void put_antialias(table *a, int64_t i) {
  const double x = ((double)i + a->half) * a->step, support = PG_MAX(1.0, a->step), inverse = 1 / support;
  const int64_t first = (int64_t)PG_MAX(floor(x - support + a->half), 0.0);
  const int64_t last = (int64_t)PG_MIN(floor(x + support + a->half), (double)a->n_in);
  double sum = 0;
  for (int64_t j = first; j < last; j++) sum += PG_MAX(1 - fabs(((double)j - x + a->half) * inverse), 0.0);
  for (int64_t j = first; j < last; j++)
    put_tap(a, i, j, PG_MAX(1 - fabs(((double)j - x + a->half) * inverse), 0.0) / sum);
}

static double near_cubic(double d) { return (1.25 * d - 2.25) * (d * d) + 1; }     // 0 <= d <= 1
static double far_cubic(double d) { return ((-0.75 * d + 3.75) * d - 6) * d + 3; } // 1 <= d <= 2

static void put_taps(table *a, int64_t i) {
  if ((a->mode & MODE) == NEAREST) {
    put_tap(a, i, a->align ? i * (a->n_in - 1) / (a->n_out - 1) : i * a->n_in / a->n_out, 1);
    return;
  }
  if (a->mode & ANTIALIAS) {
    put_antialias(a, i);
    return;
  }
  const double x = ((double)i + a->half) * a->step - a->half, first = floor(x);
  const int64_t at = (int64_t)first;
  if ((a->mode & MODE) == BILINEAR) {
    const double d = PG_MIN(PG_MAX(x - PG_MAX(first, 0.0), 0.0), 1.0);
    put_tap(a, i, at, 1 - d);
    put_tap(a, i, at + 1, d);
    return;
  }
  const double d = x - first;
  put_tap(a, i, at - 1, far_cubic(1 + d));
  put_tap(a, i, at, near_cubic(d));
  put_tap(a, i, at + 1, near_cubic(1 - d));
  put_tap(a, i, at + 2, far_cubic(2 - d));
}

static void put_table(table *a, int ith, int nth) {
  const pg_range r = pg_share(a->n_out, ith, nth);
  for (int64_t i = r.first; i < r.last; i++) {
    a->n[i] = 0;
    put_taps(a, i);
    for (int64_t j = a->n[i]; j < a->max; j++) {
      a->at[j * a->n_out + i] = (int32_t)a->n_in;
      a->weight[j * a->n_out + i] = 0;
    }
  }
}

int64_t PG_FN(upscale_work)(const pg_task *t, int nth) {
  const table w = table_of(&t->src[0], &t->dst, (int)t->param[4], 0);
  const table h = table_of(&t->src[0], &t->dst, (int)t->param[4], 1);
  return pg_plus(pg_plus(table_size(&w), table_size(&h)), pg_times(w.n_in + 1, 2 * (int64_t)sizeof(float) * nth));
}

// sum[0..n) = x * f when `first`, otherwise sum[0..n) += x * f.
static void add_scaled(float *sum, const float *x, float f, int64_t n, int first) {
  const vf v = vf_set1(f);
  int64_t i = 0;
  if (first) {
    for (; i + VF_N <= n; i += VF_N) vf_store(sum + i, vf_load(x + i) * v);
    for (; i < n; i++) sum[i] = x[i] * f;
  } else {
    for (; i + VF_N <= n; i += VF_N) vf_store(sum + i, vf_fma(vf_load(x + i), v, vf_load(sum + i)));
    for (; i < n; i++) sum[i] += x[i] * f;
  }
}

static void along_row(const table *w, float *restrict y, const float *restrict x) {
  const int32_t *restrict at = w->at;
  const float *restrict weight = w->weight;
  for (int64_t i = 0; i < w->n_out; i++) y[i] = x[at[i]] * weight[i];
  for (int64_t j = 1; j < w->max; j++) {
    at += w->n_out;
    weight += w->n_out;
    for (int64_t i = 0; i < w->n_out; i++) y[i] += x[at[i]] * weight[i];
  }
}

// param: ne0 .. ne3, mode
int PG_FN(upscale_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *a = &t->src[0], *y = &t->dst;
  table w = table_of(a, y, (int)t->param[4], 0), h = table_of(a, y, (int)t->param[4], 1);
  char *rest = use(&h, use(&w, t->work));
  put_table(&w, ith, nth);
  put_table(&h, ith, nth);
  pg_sync(t, nth);
  float *sum = (float *)rest + 2 * (w.n_in + 1) * ith, *x = sum + w.n_in + 1;
  sum[w.n_in] = 0; // read by taps without weight
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    const int64_t i2 = i.i2 * a->ne[2] / y->ne[2], i3 = i.i3 * a->ne[3] / y->ne[3];
    for (int64_t j = 0; j < h.n[i.i1]; j++) {
      const int64_t tap = j * h.n_out + i.i1;
      const char *row = pg_row_at(a, h.at[tap], i2, i3);
      if (!pg_is_f32_row(a)) pg_get_f32(x, a, row, 0, w.n_in);
      add_scaled(sum, pg_is_f32_row(a) ? (const float *)row : x, h.weight[tap], w.n_in, j == 0);
    }
    along_row(&w, (float *)pg_row_at(y, i.i1, i.i2, i.i3), sum);
  }
  return PG_OK;
}

// upscale_back. For each element of an axis of the result, from which to which element of the source it was a tap.
typedef struct reach {
  int32_t *first, *last;
} reach;

int64_t PG_FN(upscale_back_work)(const pg_task *t, int nth) {
  const table w = table_of(&t->dst, &t->src[0], (int)t->param[4], 0);
  const table h = table_of(&t->dst, &t->src[0], (int)t->param[4], 1);
  const int64_t rows = pg_times(w.n_out, 2 * (int64_t)sizeof(float) * nth);
  return pg_plus(pg_plus(table_size(&w), table_size(&h)), pg_plus(pg_times(h.n_in, 2 * sizeof(int32_t)), rows));
}

static void put_reach(const table *a, reach *r) {
  memset(r->first, 0, (size_t)a->n_in * sizeof *r->first);
  for (int64_t i = 0; i < a->n_in; i++) r->last[i] = -1;
  for (int64_t i = 0; i < a->n_out; i++)
    for (int64_t j = 0; j < a->n[i]; j++) {
      const int32_t at = a->at[j * a->n_out + i];
      if (r->last[at] < 0) r->first[at] = (int32_t)i;
      r->last[at] = (int32_t)i;
    }
}

// The gradient of a row: y[at] += x * weight for all taps.
static void along_row_back(const table *w, float *y, const float *x) {
  memset(y, 0, (size_t)w->n_in * sizeof *y);
  for (int64_t i = 0; i < w->n_out; i++)
    for (int64_t j = 0; j < w->n[i]; j++) y[w->at[j * w->n_out + i]] += x[i] * w->weight[j * w->n_out + i];
}

// sum += the rows of the source's matrix (i2, i3) whose taps are row `at` of the result. Returns how many.
static int64_t add_rows(const table *h, const reach *r, const pg_tensor *g, int64_t at, int64_t i2, int64_t i3,
                        float *sum, float *x, int64_t before) {
  const int dense = pg_is_f32_row(g);
  int64_t added = before;
  for (int64_t i = r->first[at]; i <= r->last[at]; i++)
    for (int64_t j = 0; j < h->n[i]; j++) {
      if (h->at[j * h->n_out + i] != at) continue;
      const char *row = pg_row_at(g, i, i2, i3);
      if (!dense) pg_get_f32(x, g, row, 0, g->ne[0]);
      add_scaled(sum, dense ? (const float *)row : x, h->weight[j * h->n_out + i], g->ne[0], added++ == 0);
    }
  return added;
}

// The first matrix of n_out whose nearest one of n_in is i, or comes after it.
static int64_t nearest_from(int64_t i, int64_t n_in, int64_t n_out) { return (i * n_out + n_in - 1) / n_in; }

// param: ne0 .. ne3, mode. A thread has rows of the result.
int PG_FN(upscale_back_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *g = &t->src[0], *y = &t->dst;
  table w = table_of(y, g, (int)t->param[4], 0), h = table_of(y, g, (int)t->param[4], 1);
  reach r = {.first = (int32_t *)use(&h, use(&w, t->work))};
  r.last = r.first + h.n_in;
  put_table(&w, ith, nth);
  put_table(&h, ith, nth);
  pg_sync(t, nth);
  if (ith == 0) put_reach(&h, &r);
  pg_sync(t, nth);
  float *sum = (float *)(r.last + h.n_in) + 2 * w.n_out * ith, *x = sum + w.n_out;
  const pg_range share = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = share.first; ir < share.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    int64_t added = 0;
    for (int64_t i3 = nearest_from(i.i3, y->ne[3], g->ne[3]); i3 < nearest_from(i.i3 + 1, y->ne[3], g->ne[3]); i3++)
      for (int64_t i2 = nearest_from(i.i2, y->ne[2], g->ne[2]); i2 < nearest_from(i.i2 + 1, y->ne[2], g->ne[2]); i2++)
        added = add_rows(&h, &r, g, i.i1, i2, i3, sum, x, added);
    if (added == 0) memset(sum, 0, (size_t)w.n_out * sizeof *sum);
    along_row_back(&w, (float *)pg_row_at(y, i.i1, i.i2, i.i3), sum);
  }
  return PG_OK;
}
