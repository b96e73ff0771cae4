// repeat, concat, arange, timestep_embedding, diag: fill a new dense tensor from smaller ones, or from parameters.
#include "simd/units.h"

// repeat src[0] whole times along every dimension
int PG_FN(repeat_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0];
  const int64_t unit = pg_unit_size(y), n = y->ne[0], m = a->ne[0];
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    const char *pa = pg_row_at(a, i.i1 % a->ne[1], i.i2 % a->ne[2], i.i3 % a->ne[3]);
    if (m == 1) {
      pg_move_units(py, unit, pa, 0, n, unit);
    } else {
      for (int64_t k = 0; k < n; k += m) pg_move_units(py + k * unit, unit, pa, a->nb[0], m, unit);
    }
  }
  return PG_OK;
}

// src[0], then src[1], along dimension param[0]. A block moves as one element.
int PG_FN(concat_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0], *b = &t->src[1];
  const int64_t unit = pg_unit_size(y), block = pg_block_size(y->type), na = a->ne[0] / block, nb = b->ne[0] / block;
  const int dim = (int)t->param[0];
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    if (dim == 0) {
      pg_move_units(py, unit, pg_row_at(a, i.i1, i.i2, i.i3), a->nb[0], na, unit);
      pg_move_units(py + na * unit, unit, pg_row_at(b, i.i1, i.i2, i.i3), b->nb[0], nb, unit);
      continue;
    }
    int64_t at[4] = {0, i.i1, i.i2, i.i3};
    const pg_tensor *s = at[dim] < a->ne[dim] ? a : b;
    if (s == b) at[dim] -= a->ne[dim];
    pg_move_units(py, unit, pg_row_at(s, at[1], at[2], at[3]), s->nb[0], na, unit);
  }
  return PG_OK;
}

// The row src[0] on the diagonal of a matrix of zeros
int PG_FN(diag_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0];
  const int64_t unit = pg_unit_size(y);
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    memset(py, 0, y->ne[0] * unit);
    memcpy(py + i.i1 * unit, pg_row_at(a, 0, i.i2, i.i3) + i.i1 * a->nb[0], unit);
  }
  return PG_OK;
}

// param: start, stop (only the shape rule needs it), step
int PG_FN(arange_f32)(const pg_task *t, int ith, int nth) {
  float *y = (float *)t->dst.data;
  const pg_range r = pg_share(t->dst.ne[0], ith, nth);
  for (int64_t i = r.first; i < r.last; i++) y[i] = (float)(t->param[0] + t->param[2] * (double)i);
  return PG_OK;
}

// Each number of src[0] as cosines and sines of its products with falling frequencies; param: dim, max_period
int PG_FN(timestep_embedding_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0];
  const int64_t half = y->ne[0] / 2;
  const pg_range r = pg_share(half, ith, nth);
  for (int64_t j = r.first; j < r.last; j++) {
    const double frequency = exp(-log(t->param[1]) * (double)j / (double)half);
    for (int64_t i = 0; i < y->ne[1]; i++) {
      const double angle = (double)*(const float *)(a->data + i * a->nb[0]) * frequency;
      float *row = (float *)pg_row_at(y, i, 0, 0);
      row[j] = (float)cos(angle);
      row[half + j] = (float)sin(angle);
    }
  }
  if (ith == 0 && y->ne[0] % 2)
    for (int64_t i = 0; i < y->ne[1]; i++) *((float *)pg_row_at(y, i, 0, 0) + 2 * half) = 0;
  return PG_OK;
}
