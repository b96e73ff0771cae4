// A repacked matrix times many columns, in fixed point: both operands become 16-bit integers with one step (f32) per
// row and per column for every strip of KC elements or fewer, and are multiplied exactly. That is as fast as bf16 where
// there is an instruction for it, almost twice as fast as f32 elsewhere, and 13 bits more precise than 8-bit
// activations.
//
// The steps are such that the norms of a row and of a column in a strip stay below R16_NORM. So no sum of their
// products exceeds R16_NORM^2 < 2^31 in size, by the Cauchy-Schwarz inequality, whatever the values are.
//
// Pairs: the elements of quartet p of a unit (r16.h) make pair 2p, elements 0 and 2, and pair 2p + 1, elements 1 and 3.
#pragma once
#include "r16/product.h"

enum {
  KC = 256, // elements of a strip: a tile's operands stay in a 32 KiB L1 cache
  PAIRS = KC / 2,
  R16_NORM = 46000,         // leaves room for rounding: 46000 + sqrt(KC) is below sqrt(2^31)
  R16_MAX = 32766,          // of one integer, before rounding
  NT = VF_N == 16 ? 12 : 4, // columns of a tile: with two registers of rows, as many accumulators as pay
  TILE_ROWS = 2 * VF_N,
  TILE_GROUPS = TILE_ROWS / R16_ROWS
};

// Elements of a strip for the rows of `p`. Floats are owed more precision than block types: NMSE 1.5e-8 in all.
PG_INLINE int64_t r16_strip(const r16_product *p) { return p->row_bytes ? KC / 2 : KC; }

// Columns in fixed point, NT at a time. The last group is filled up to a multiple of 4 columns with zeros.
typedef struct r16_columns {
  int64_t k, n, strip;
  int64_t n_groups, n_strips;
  float *steps;  // [group][strip][NT]
  int16_t *ints; // [group][pair][column of the group][2], a group every k * NT
} r16_columns;

PG_INLINE int r16_group_width(const r16_columns *c, int64_t group) {
  return (int)PG_MIN(NT, (c->n - group * NT + 3) / 4 * 4);
}

// Scratch memory for n columns of k elements: integers, steps.
typedef struct r16_column_bytes {
  int64_t ints, all;
} r16_column_bytes;

PG_INLINE r16_column_bytes r16_column_bytes_of(int64_t k, int64_t n, int64_t strip) {
  const int64_t padded = (n + NT - 1) / NT * NT, ints = padded * k * 2, steps = padded * ((k + strip - 1) / strip) * 4;
  return (r16_column_bytes){ints, ints + steps};
}

PG_INLINE r16_columns r16_columns_in(char *work, const r16_product *p) {
  const int64_t k = p->k, n = p->n_cols, strip = r16_strip(p);
  const r16_column_bytes b = r16_column_bytes_of(k, n, strip);
  return (r16_columns){.k = k,
                       .n = n,
                       .strip = strip,
                       .n_groups = (n + NT - 1) / NT,
                       .n_strips = (k + strip - 1) / strip,
                       .steps = (float *)(work + b.ints),
                       .ints = (int16_t *)work};
}

// Fill a group of columns.
void PG_FN(r16_put_columns)(const r16_columns *c, const r16_product *p, int64_t group);

// A strip of TILE_ROWS rows in fixed point.
typedef struct r16_panel {
  _Alignas(64) int16_t ints[PAIRS][TILE_ROWS][2];
  float steps[TILE_ROWS];
} r16_panel;

// Rows TILE_ROWS * tile .. of a repacked matrix, or of one that is stored as F16 or BF16. What lies beyond it is zero.
void PG_FN(r16_put_panel)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip);
void PG_FN(r16_put_panel_of_floats)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip);
