// Read columns of a product as f32, normed if the product has a norm.
#pragma once
#include "products/gemm/gemm.h"
#include "simd/rms.h"
#include "simd/rows.h"

// Columns that are converted together: the start of each, and the factor of its norm.
typedef struct r16_quad {
  int64_t n; // how many there are
  const char *column[R16_QUAD];
  double scale[R16_QUAD];
} r16_quad;

static inline r16_quad r16_quad_of(const r16_columns *c, const r16_product *p, r16_share s) {
  r16_quad g = {.n = PG_MAX(0, PG_MIN(R16_QUAD, r16_group_columns(c, s.group) - s.column))};
  for (int64_t j = 0; j < g.n; j++) {
    int64_t b_col;
    r16_result(p, r16_first_column(c, s.group) + s.column + j, &b_col);
    g.column[j] = r16_column(p->b, b_col);
    g.scale[j] = p->norm ? pg_rms_scale((const float *)g.column[j], p->b->ne[0], p->eps) : 0;
  }
  return g;
}

// x[0..n) = elements k.. of the row of `t` that starts at `row`; those that the row lacks are zeros.
PG_INLINE void r16_get_row(float *x, const pg_tensor *t, const char *row, int64_t k, int64_t n) {
  const int64_t there = PG_MIN(n, t->ne[0] - k);
  pg_get_f32(x, t, row, k, there);
  for (int64_t i = there; i < n; i++) x[i] = 0;
}

// x[0..n) = elements k.. of column j of them, in the same way.
static inline void r16_get(float *x, const r16_product *p, const r16_quad *g, int64_t j, int64_t k, int64_t n) {
  r16_get_row(x, p->b, g->column[j], k, n);
  if (p->norm) pg_scale_mul(x, x, g->scale[j], p->norm + k, PG_MIN(n, p->b->ne[0] - k));
}
