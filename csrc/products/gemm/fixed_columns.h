// The layout of columns in fixed point.
#pragma once
#include "products/gemm/gemm.h"

// A strip of a group of columns, filled up with zero columns to `width`, a multiple of 4.
typedef struct r16_fixed {
  int width;
  int16_t *ints; // [pair][column][2]
  float *steps;  // [column]
} r16_fixed;

// All integers come first; all groups of a strip lie together, so that a chunk reads one piece of memory at a time.
// Then come the steps: [strip][group][R16_WIDTH].
static inline r16_fixed r16_fixed_of(const r16_columns *c, int64_t group, int64_t strip) {
  const int64_t width = (r16_group_columns(c, group) + 3) / 4 * 4, n = r16_strip_elements(c, strip);
  int16_t *ints = (int16_t *)c->data;
  float *steps = (float *)(ints + c->n_groups * R16_WIDTH * c->k);
  return (r16_fixed){.width = (int)width,
                     .ints = ints + (strip * c->strip * c->n_groups + group * n) * R16_WIDTH,
                     .steps = steps + (strip * c->n_groups + group) * R16_WIDTH};
}
