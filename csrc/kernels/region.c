// set, acc: write src[1] into a region of src[0], or add it there. dst is dense and may be src[0]: no restrict.
// param: byte strides 1, 2, 3 of the region, and where it starts. The shape rule makes sure that no element occurs
// twice in it.
#include "simd/units.h"

// Copy src[0] to dst. All threads must be done with it before the region is written.
static void copy_first(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst;
  if (y->data == t->src[0].data) return;
  const pg_range r = pg_share(pg_n_rows(y) * y->ne[0] * pg_unit_size(y), ith, nth);
  memcpy(y->data + r.first, t->src[0].data + r.first, r.last - r.first);
  pg_sync(t, nth);
}

static char *region_row(const pg_task *t, pg_idx i) {
  const double *p = t->param;
  return t->dst.data + (int64_t)p[3] + i.i1 * (int64_t)p[0] + i.i2 * (int64_t)p[1] + i.i3 * (int64_t)p[2];
}

int PG_FN(set_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *b = &t->src[1];
  const int64_t unit = pg_unit_size(b);
  copy_first(t, ith, nth);
  const pg_range r = pg_share(pg_n_rows(b), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(b, ir);
    pg_move_units(region_row(t, i), unit, pg_row_at(b, i.i1, i.i2, i.i3), b->nb[0], b->ne[0], unit);
  }
  return PG_OK;
}

int PG_FN(acc_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *b = &t->src[1];
  copy_first(t, ith, nth);
  const pg_range r = pg_share(pg_n_rows(b), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(b, ir);
    float *y = (float *)region_row(t, i);
    const char *pb = pg_row_at(b, i.i1, i.i2, i.i3);
    for (int64_t k = 0; k < b->ne[0]; k++) y[k] += *(const float *)(pb + k * b->nb[0]);
  }
  return PG_OK;
}
