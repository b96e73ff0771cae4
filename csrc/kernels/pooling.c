// pool_1d, pool_2d: the rows that a row of windows covers are reduced to one row; then each window along it is reduced.
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
int PG_FN(pool_1d_f32)(const pg_task *t, int ith, int nth) {
  const double *q = t->param;
  const pool p = {q[0] == 0, 1, (int64_t)q[1], 1, (int64_t)q[2], 1, (int64_t)q[3], 0};
  return rows(t, ith, nth, &p);
}

// param: op, k0, k1, s0, s1, p0, p1
int PG_FN(pool_2d_f32)(const pg_task *t, int ith, int nth) {
  const double *q = t->param;
  const pool p = {q[0] == 0,    0, (int64_t)q[1], (int64_t)q[2], (int64_t)q[3], (int64_t)q[4], (int64_t)q[5],
                  (int64_t)q[6]};
  return rows(t, ith, nth, &p);
}
