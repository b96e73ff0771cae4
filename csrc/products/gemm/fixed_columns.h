// The layout of columns in fixed point.
#pragma once
#include "products/gemm/gemm.h"

enum { R16_RUN_SUMS = R16_HALVES + R16_HALVES / 2 }; // of a run of a column

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

// The same of a product of blocks. `sums`, as in r16_x, are those of each half of a unit, then those of whole units.
typedef struct r16_run {
  int width;
  int16_t *ints;
  float *steps;
  float *sums[2]; // [half or unit][R16_WIDTH]
} r16_run;

static inline r16_run r16_run_of(const r16_columns *c, int64_t group, int64_t strip) {
  const r16_fixed x = r16_fixed_of(c, group, strip);
  float *all = (float *)((int16_t *)c->data + c->n_groups * R16_WIDTH * c->k) + c->n_strips * c->n_groups * R16_WIDTH;
  float *sums = all + (strip * c->n_groups + group) * R16_RUN_SUMS * R16_WIDTH;
  return (r16_run){x.width, x.ints, x.steps, {sums, sums + R16_HALVES * R16_WIDTH}};
}

// Functions of fixed_blocks.c, for r16_put_columns and r16_multiply.
void PG_FN(r16_put_runs)(const r16_columns *c, const r16_product *p, r16_share share);
void PG_FN(r16_multiply_runs)(float *to, int64_t ld, const r16_totals before, const r16_panel *w, const r16_columns *c,
                              const r16_product *p, int64_t group, int64_t strip);
