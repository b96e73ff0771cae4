// pool_1d, pool_2d, and their gradients. The rows that a row of windows covers are reduced to one row; then each window
// along it is reduced.
#include "simd/rows.h"

typedef struct pool {
  int is_max, clipped; // clipped: the mean is that of the elements inside, not of k0 * k1
  int64_t k0, k1, s0, s1, p0, p1;
} pool;

int64_t PG_FN(pool_work)(const pg_task *t, int nth) {
  return pg_times(t->src[0].ne[0], 2 * (int64_t)sizeof(float) * nth);
}

static inline float larger(float a, float b) { return b > a || b != b ? b : a; } // NaN stays

static void add_row(const pool *p, float *sum, const float *x, int64_t n) {
  if (p->is_max) {
    for (int64_t i = 0; i < n; i++) sum[i] = larger(sum[i], x[i]);
  } else {
    for (int64_t i = 0; i < n; i++) sum[i] += x[i];
  }
}

static float reduce(const pool *p, const float *x, int64_t n) {
  if (p->is_max) {
    float m = x[0];
    for (int64_t i = 1; i < n; i++) m = larger(m, x[i]);
    return m;
  }
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += (double)x[i];
  return (float)(sum / (p->clipped ? (double)n : (double)p->k0 * (double)p->k1));
}

// The shape rule makes sure that every window has an element of `a`.
static int rows(const pg_task *t, int ith, int nth, const pool *p) {
  const pg_tensor *a = &t->src[0], *y = &t->dst;
  const int64_t n = a->ne[0];
  float *sum = (float *)t->work + 2 * n * ith, *x = sum + n;
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    const int64_t at = i.i1 * p->s1 - p->p1, first = PG_MAX(0, at), last = PG_MIN(a->ne[1], at + p->k1);
    pg_get_f32(sum, a, pg_row_at(a, first, i.i2, i.i3), 0, n);
    for (int64_t i1 = first + 1; i1 < last; i1++) {
      const char *row = pg_row_at(a, i1, i.i2, i.i3);
      if (!pg_is_f32_row(a)) pg_get_f32(x, a, row, 0, n);
      add_row(p, sum, pg_is_f32_row(a) ? (const float *)row : x, n);
    }
    float *py = (float *)pg_row_at(y, i.i1, i.i2, i.i3);
    for (int64_t j = 0; j < y->ne[0]; j++) {
      const int64_t from = j * p->s0 - p->p0, begin = PG_MAX(0, from);
      py[j] = reduce(p, sum + begin, PG_MIN(n, from + p->k0) - begin);
    }
  }
  return PG_OK;
}

// param: op (0 max, 1 mean), k0, s0, p0
static pool pool_1d(const double *q) {
  return (pool){q[0] == 0, 1, (int64_t)q[1], 1, (int64_t)q[2], 1, (int64_t)q[3], 0};
}

// param: op, k0, k1, s0, s1, p0, p1
static pool pool_2d(const double *q) {
  return (pool){q[0] == 0, 0, (int64_t)q[1], (int64_t)q[2], (int64_t)q[3], (int64_t)q[4], (int64_t)q[5], (int64_t)q[6]};
}

int PG_FN(pool_1d_f32)(const pg_task *t, int ith, int nth) {
  const pool p = pool_1d(t->param);
  return rows(t, ith, nth, &p);
}

int PG_FN(pool_2d_f32)(const pg_task *t, int ith, int nth) {
  const pool p = pool_2d(t->param);
  return rows(t, ith, nth, &p);
}

typedef struct span {
  int64_t first, last;
} span;

// The elements of n that a window at `place` sees.
static span seen(int64_t place, int64_t s, int64_t p, int64_t k, int64_t n) {
  return (span){PG_MAX(0, place * s - p), PG_MIN(n, place * s - p + k)};
}

// The gradient `g` of a window: to its first largest element (or NaN), or to all of them.
static void add_window(const pool *p, const pg_tensor *y, const pg_tensor *x, pg_idx i, span w, span h, float g) {
  if (!p->is_max) {
    const int64_t n = p->clipped ? (w.last - w.first) * (h.last - h.first) : p->k0 * p->k1;
    g = (float)((double)g / (double)n);
    for (int64_t i1 = h.first; i1 < h.last; i1++) {
      float *to = (float *)pg_row_at(y, i1, i.i2, i.i3);
      for (int64_t i0 = w.first; i0 < w.last; i0++) to[i0] += g;
    }
    return;
  }
  int64_t at0 = -1, at1 = 0;
  float best = 0;
  for (int64_t i1 = h.first; i1 < h.last; i1++)
    for (int64_t i0 = w.first; i0 < w.last; i0++) {
      float v;
      pg_get_f32(&v, x, pg_row_at(x, i1, i.i2, i.i3), i0, 1);
      if (at0 >= 0 && !(v > best) && (v == v || best != best)) continue;
      best = v, at0 = i0, at1 = i1;
    }
  ((float *)pg_row_at(y, at1, i.i2, i.i3))[at0] += g;
}

// Sources: the gradient of the result, and what was pooled. A thread has whole planes; rows, of signals.
static int back(const pg_task *t, int ith, int nth, const pool *p) {
  const pg_tensor *g = &t->src[0], *x = &t->src[1], *y = &t->dst;
  const int64_t height = p->clipped ? 1 : y->ne[1], units = pg_n_rows(y) / height;
  const pg_range r = pg_share(units, ith, nth);
  memset(y->data + r.first * height * y->nb[1], 0, (size_t)((r.last - r.first) * height * y->nb[1]));
  for (int64_t u = r.first; u < r.last; u++) {
    pg_idx i = pg_unravel(y, u * height);
    const int64_t first = i.i1, places = p->clipped ? 1 : g->ne[1];
    for (int64_t j = 0; j < places; j++) {
      const span h = p->clipped ? (span){first, first + 1} : seen(j, p->s1, p->p1, p->k1, y->ne[1]);
      const char *row = pg_row_at(g, first + j, i.i2, i.i3);
      for (int64_t k = 0; k < g->ne[0]; k++)
        add_window(p, y, x, i, seen(k, p->s0, p->p0, p->k0, y->ne[0]), h, *(const float *)(row + k * g->nb[0]));
    }
  }
  return PG_OK;
}

int PG_FN(pool_1d_back_f32)(const pg_task *t, int ith, int nth) {
  const pool p = pool_1d(t->param);
  return back(t, ith, nth, &p);
}

int PG_FN(pool_2d_back_f32)(const pg_task *t, int ith, int nth) {
  const pool p = pool_2d(t->param);
  return back(t, ith, nth, &p);
}
