// pad, pad_reflect_1d, roll: move the elements of src[0] along the dimensions, and fill the places beside them.
#include "simd/units.h"

static int64_t wrap(int64_t i, int64_t n) { return (i % n + n) % n; }

// Element k of dst is element k - shift of the row, which repeats without end.
static void wrapped_row(char *py, const char *pa, const pg_tensor *a, int64_t n, int64_t shift, int64_t unit) {
  for (int64_t k = 0, c; k < n; k += c) {
    const int64_t from = wrap(k - shift, a->ne[0]);
    c = PG_MIN(n - k, a->ne[0] - from);
    pg_move_units(py + k * unit, unit, pa + from * a->nb[0], a->nb[0], c, unit);
  }
}

// param: zeros before and after, for each dimension; then 1 to repeat src[0] there instead of zeros
int PG_FN(pad_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0];
  const int64_t unit = pg_unit_size(y), n = y->ne[0], before = (int64_t)t->param[0];
  const int circular = t->param[8] != 0;
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    int64_t at[4] = {0, i.i1, i.i2, i.i3};
    int inside = 1;
    for (int d = 1; d < 4; d++) {
      at[d] -= (int64_t)t->param[2 * d];
      if (circular) at[d] = wrap(at[d], a->ne[d]);
      inside &= at[d] >= 0 && at[d] < a->ne[d];
    }
    const char *pa = pg_row_at(a, at[1], at[2], at[3]);
    if (circular) {
      wrapped_row(py, pa, a, n, before, unit);
    } else if (inside) {
      memset(py, 0, before * unit);
      pg_move_units(py + before * unit, unit, pa, a->nb[0], a->ne[0], unit);
      memset(py + (before + a->ne[0]) * unit, 0, (n - before - a->ne[0]) * unit);
    } else {
      memset(py, 0, n * unit);
    }
  }
  return PG_OK;
}

// param: the shift along each dimension
int PG_FN(roll_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0];
  const int64_t *ne = y->ne;
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    const char *pa = pg_row_at(a, wrap(i.i1 - (int64_t)t->param[1], ne[1]), wrap(i.i2 - (int64_t)t->param[2], ne[2]),
                               wrap(i.i3 - (int64_t)t->param[3], ne[3]));
    wrapped_row(pg_row_at(y, i.i1, i.i2, i.i3), pa, a, ne[0], (int64_t)t->param[0], pg_unit_size(y));
  }
  return PG_OK;
}

// param: elements before and after each row, its own in reverse, without the one at the end
int PG_FN(pad_reflect_1d_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0];
  const int64_t unit = pg_unit_size(y), n = a->ne[0], s = a->nb[0];
  const int64_t before = (int64_t)t->param[0], after = (int64_t)t->param[1];
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    const char *pa = pg_row_at(a, i.i1, i.i2, i.i3);
    pg_move_units(py, unit, pa + before * s, -s, before, unit);
    pg_move_units(py + before * unit, unit, pa, s, n, unit);
    pg_move_units(py + (before + n) * unit, unit, pa + (n - 2) * s, -s, after, unit);
  }
  return PG_OK;
}
