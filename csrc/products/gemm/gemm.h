// A matrix times many columns: tiles of rows, converted to panels of numbers that multiply fast, times groups of
// columns converted alike. What the numbers are is the choice of the instruction set.
#pragma once
#include "products/r16/repacked.h"

#if defined(__AMX_BF16__)
#include "products/gemm/bf16.h"
#else
#include "products/gemm/fixed.h"
#endif

// Columns in groups of up to NT, as equal as r16_split makes them, each cut into strips of `strip` elements: the last
// strip may be smaller.
typedef struct r16_columns {
  int64_t k, n, strip;
  int64_t n_groups, n_strips;
  char *data; // laid out by r16_put_columns
} r16_columns;

PG_INLINE r16_columns r16_columns_in(char *work, const r16_product *p) {
  const int64_t strip = r16_strip(p);
  return (r16_columns){.k = p->k,
                       .n = p->n_cols,
                       .strip = strip,
                       .n_groups = (p->n_cols + NT - 1) / NT,
                       .n_strips = (p->k + strip - 1) / strip,
                       .data = work};
}

// First column of a group, columns of a group, and elements of a strip.
PG_INLINE int64_t r16_first_column(const r16_columns *c, int64_t group) { return r16_split(c->n, c->n_groups, group); }
PG_INLINE int64_t r16_group_columns(const r16_columns *c, int64_t group) {
  return r16_first_column(c, group + 1) - r16_first_column(c, group);
}
PG_INLINE int64_t r16_strip_elements(const r16_columns *c, int64_t strip) {
  return PG_MIN(c->strip, c->k - strip * c->strip);
}

enum { R16_TILES = 256 / TILE_ROWS }; // tiles of rows at a time, at most: columns are read from memory once for all

// A tile of the product as far as it has come: [column][row].
typedef float r16_totals[NT][TILE_ROWS];

// What a thread converts at a time: some columns of a group times strips first .. last.
typedef struct r16_share {
  int64_t group, column, first, last;
} r16_share;

// Columns of a share, shares of a group, and columns that these have room for.
enum { R16_QUAD = 4, R16_QUADS = (NT + R16_QUAD - 1) / R16_QUAD, R16_WIDTH = R16_QUADS * R16_QUAD };

// What gemm.c needs of the numbers:
// - bytes of columns (their data) of a product;
int64_t PG_FN(r16_columns_bytes)(const r16_product *p);
// - convert R16_QUAD columns, of which some or all may be beyond the group;
void PG_FN(r16_put_columns)(const r16_columns *c, const r16_product *p, r16_share share);
// - convert a strip of rows TILE_ROWS * tile ..; rows beyond the matrix are zero;
void PG_FN(r16_put_panel)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip);
// - multiply them: column j of the group, whole, becomes to[j * ld ..], with what came `before` (NULL: nothing; its
//   place may be `to`) added. The first product of a panel fetches what the next ones are made of.
void PG_FN(r16_multiply)(float *to, int64_t ld, const r16_totals before, r16_panel *w, const r16_columns *c,
                         const r16_product *p, int64_t group, int64_t strip);
