// Columns of a product as f32, normed where the product says so.
#pragma once
#include "products/gemm/gemm.h"
#include "simd/rms.h"
#include "simd/rows.h"

// A group of columns: where each starts, and what its norm multiplies it by.
typedef struct r16_group {
  int64_t n;
  const char *column[NT];
  double scale[NT];
} r16_group;

static inline r16_group r16_group_of(const r16_columns *c, const r16_product *p, int64_t group) {
  r16_group g = {.n = r16_group_columns(c, group)};
  for (int64_t j = 0; j < g.n; j++) {
    int64_t b_col;
    r16_result(p, r16_first_column(c, group) + j, &b_col);
    g.column[j] = r16_column(p->b, b_col);
    g.scale[j] = p->norm ? pg_rms_scale((const float *)g.column[j], c->k, p->eps) : 0;
  }
  return g;
}

// x[0..n) = elements k.. of column j of the group.
static inline void r16_get(float *x, const r16_product *p, const r16_group *g, int64_t j, int64_t k, int64_t n) {
  pg_get_f32(x, p->b, g->column[j], k, n);
  if (p->norm) pg_scale_mul(x, x, g->scale[j], p->norm + k, n);
}
