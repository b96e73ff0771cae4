// The layout of columns in bf16.
#pragma once
#include "products/gemm/gemm.h"

// A part of a strip of a group of columns: [unit][column][32].
static inline uint16_t *r16_columns_of(const r16_columns *c, const r16_product *p, int64_t group, int64_t strip,
                                       int part) {
  const int parts = r16_column_parts(p);
  const int64_t n = r16_strip_elements(c, strip), before = strip * c->strip * c->n_groups * parts;
  return (uint16_t *)c->data + (before + (group * parts + part) * n) * NT;
}
