// win_part, win_unpart, get_rel_pos, add_rel_pos: windows of an image, and relative positions.
#include "simd/rows.h"
#include "simd/units.h"

// param: w. Window i3 of the result, row by row of windows, zeros beyond the image.
int PG_FN(win_part_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0];
  const int64_t w = y->ne[1], columns = (a->ne[1] + w - 1) / w, unit = pg_unit_size(y);
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    const int64_t i1 = i.i3 % columns * w + i.i1, i2 = i.i3 / columns * w + i.i2;
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    if (i1 < a->ne[1] && i2 < a->ne[2]) {
      pg_move_units(py, unit, pg_row_at(a, i1, i2, 0), a->nb[0], y->ne[0], unit);
    } else {
      memset(py, 0, y->ne[0] * unit);
    }
  }
  return PG_OK;
}

// param: w0, h0, w
int PG_FN(win_unpart_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0];
  const int64_t w = a->ne[1], columns = (y->ne[1] + w - 1) / w, unit = pg_unit_size(y);
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    const char *pa = pg_row_at(a, i.i1 % w, i.i2 % w, i.i2 / w * columns + i.i1 / w);
    pg_move_units(pg_row_at(y, i.i1, i.i2, 0), unit, pa, a->nb[0], y->ne[0], unit);
  }
  return PG_OK;
}

// Key i1, query i2: the row of their distance.
int PG_FN(get_rel_pos_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0];
  const int64_t unit = pg_unit_size(y);
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    const char *pa = pg_row_at(a, i.i2 - i.i1 + y->ne[1] - 1, 0, 0);
    pg_move_units(pg_row_at(y, i.i1, i.i2, 0), unit, pa, a->nb[0], y->ne[0], unit);
  }
  return PG_OK;
}

enum { STRIP = 256 };

// y[kh * n + kw] = a + ph[kh] + pw[kw], for each query and batch. dst may be the source.
int PG_FN(add_rel_pos_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0], *pw = &t->src[1], *ph = &t->src[2];
  const int64_t n = pw->ne[0];
  const pg_range r = pg_share(pg_n_rows(y) * n, ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const int64_t kh = ir % n, query = ir / n % y->ne[1], batch = ir / n / y->ne[1];
    const int64_t qw = query % pw->ne[1], qh = query / pw->ne[1];
    const float h = *(const float *)(pg_row_at(ph, qw, qh, batch) + kh * ph->nb[0]);
    for (int64_t k = 0; k < n; k += STRIP) {
      float x[STRIP], w[STRIP];
      const int64_t m = PG_MIN(STRIP, n - k);
      pg_get_f32(x, a, pg_row_at(a, query, batch, 0), kh * n + k, m);
      pg_get_f32(w, pw, pg_row_at(pw, qw, qh, batch), k, m);
      for (int64_t j = 0; j < m; j++) x[j] += h + w[j];
      pg_put_f32(y, pg_row_at(y, query, batch, 0), kh * n + k, x, m);
    }
  }
  return PG_OK;
}
