// A matrix times many columns. Tiles of rows are converted to panels of numbers that can be multiplied fast, and groups
// of columns to the same kind of numbers. The instruction set and the form of the weights decide which: fixed.h or
// tiles.h, and for the fast form int8.h or bf16.h; on Arm, where it multiplies bytes, int8.h for all blocks.
#pragma once
#include "products/r16/repacked.h"

#if defined(R16_INT8)
#include "products/gemm/int8.h"
#elif defined(R16_BF16)
#include "products/gemm/bf16.h"
#elif defined(PG_AMX)
#include "products/gemm/tiles.h"
#else
#include "products/gemm/fixed.h"
#define R16_ACROSS_ROWS
#endif

// The name of a function for these numbers.
#if defined(R16_INT8)
#define R16_NUMBERS_FN R16_INT8_FN
#elif defined(R16_BF16)
#define R16_NUMBERS_FN R16_BF16_FN
#else
#define R16_NUMBERS_FN PG_FN
#endif

// Called by a thread before it multiplies with the rows of a product, and when it is done.
#if defined(R16_BF16)
#define R16_BEGIN(p) TILES_BEGIN()
#define R16_END() TILES_END()
#elif defined(PG_AMX)
void PG_FN(r16_begin)(const r16_product *p);
#define R16_BEGIN(p) PG_FN(r16_begin)(p)
#define R16_END() TILES_END()
#else
#define R16_BEGIN(p)
#define R16_END()
#endif

// Columns in groups of up to NT (r16_split). Each group is cut into strips of `strip` elements; the last strip may be
// shorter.
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

// The first column of a group; the number of its columns; and the number of elements of a strip.
PG_INLINE int64_t r16_first_column(const r16_columns *c, int64_t group) { return r16_split(c->n, c->n_groups, group); }
PG_INLINE int64_t r16_group_columns(const r16_columns *c, int64_t group) {
  return r16_first_column(c, group + 1) - r16_first_column(c, group);
}
PG_INLINE int64_t r16_strip_elements(const r16_columns *c, int64_t strip) {
  return PG_MIN(c->strip, c->k - strip * c->strip);
}

enum { R16_TILES = 256 / TILE_ROWS }; // most tiles of rows at a time: columns are read from memory once for all of them

// Room for the elements of R16_ACROSS stored rows that a product across them converts at a time: a row of whole blocks
// of any type, and a stride that is no power of two.
enum { R16_ACROSS = 256, R16_ROW = R16_TILES * TILE_ROWS + 16, R16_OWN = R16_ACROSS * R16_ROW };

// The sums of a tile of the product so far: [column][row].
typedef float r16_totals[NT][TILE_ROWS];

// The part of the columns that a thread converts at a time: some columns of a group, strips first .. last.
typedef struct r16_share {
  int64_t group, column, first, last;
} r16_share;

// Columns of a share; shares of a group; and columns that the shares of a group have room for.
enum { R16_QUAD = 4, R16_QUADS = (NT + R16_QUAD - 1) / R16_QUAD, R16_WIDTH = R16_QUADS * R16_QUAD };

// Functions that fixed*.c, int8*.c, tiles*.c and bf16*.c define for gemm.c:
// - the bytes that the columns of a product need (their data);
int64_t R16_NUMBERS_FN(r16_columns_bytes)(const r16_product *p);
// - convert R16_QUAD columns; some or all of them may lie beyond the group;
void R16_NUMBERS_FN(r16_put_columns)(const r16_columns *c, const r16_product *p, r16_share share);
// - convert a strip of rows TILE_ROWS * tile ..; rows beyond the matrix are zero;
void R16_NUMBERS_FN(r16_put_panel)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip);
// - the same for several tiles of rows that run across the stored ones, in panels from `panels` on. Tiles begin at a
//   multiple of R16_TILES. `own` has room for R16_OWN floats (fixed numbers only);
void R16_NUMBERS_FN(r16_put_across)(r16_panel *panels, const r16_product *p, pg_range tiles, int64_t strip, float *own);
// - multiply them: the whole column j of the group goes to to[j * ld ..], with the sums `before` added (NULL: none; it
//   may be the same memory as `to`). The first product of a panel prefetches the memory of the next panels.
void R16_NUMBERS_FN(r16_multiply)(float *to, int64_t ld, const r16_totals before, r16_panel *w, const r16_columns *c,
                                  const r16_product *p, int64_t group, int64_t strip);
