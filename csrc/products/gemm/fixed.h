// The numbers of gemm.h in fixed point: both operands become 16-bit integers, and are multiplied exactly. That is
// faster than f32, and much more precise than 8-bit activations.
//
// Weights in blocks are exact, and sums are those of few columns: products/r16/sums.h. In all other products (of
// floats, and across rows) weights are rounded as columns are: in every strip of KC elements or fewer, each row and
// each column has one step (f32), by which its integers are multiplied. halves.c chooses the steps of floats.
//
// Across rows the norms of a row and of a column in a strip stay below R16_NORM. So no sum of their products exceeds
// R16_NORM^2 < 2^31 in size, by the Cauchy-Schwarz inequality, whatever the values are.
//
// Pairs: the elements of quartet p of a unit (products/r16/r16.h) make pair 2p, elements 0 and 2, and pair 2p + 1,
// elements 1 and 3.
#pragma once
#include "products/gemm/fetch.h"
#include "products/r16/repacked.h"

enum {
  KC = 256, // elements of a strip: a tile's operands stay in a 32 KiB L1 cache
  PAIRS = KC / 2,
  R16_NORM = 46000,         // leaves room for rounding: 46000 + sqrt(KC) is below sqrt(2^31)
  R16_MAX = 32766,          // of one integer, before rounding
  NT = VF_N == 16 ? 14 : 4, // columns of a tile: with its registers of rows, as many sums as fit the registers
  TILE_ROWS = VF_N == 16 ? 32 : 16,
  TILE_VECTORS = TILE_ROWS / VF_N,
  R16_PANELS = 1, // panels at a time: a panel is multiplied with all columns while it is in the L1 cache
  R16_WHOLE = 1,  // columns that a product of a tile writes at least
  TILE_GROUPS = TILE_ROWS / R16_ROWS,
  R16_HALVES = KC / (R16_UNIT / 2) // of the units of a strip
};

// The first column of a group. Groups are equal, because a tile of few columns would wait for its own sums.
PG_INLINE int64_t r16_split(int64_t n, int64_t n_groups, int64_t group) { return n * group / n_groups; }

// Elements of a strip for the rows of `p`: fewer for floats, which need more precision.
PG_INLINE int64_t r16_strip(const r16_product *p) { return r16_of_floats(p) ? KC / 2 : KC; }

// A strip of TILE_ROWS rows. Of rows in blocks (r16_in_runs): their codes, times integer scales; and in the order of
// sums.h the scale of each sum and each shift.
typedef struct r16_panel {
  _Alignas(64) int16_t ints[PAIRS][TILE_ROWS][2];
  float steps[TILE_ROWS];
  float scales[R16_HALVES][TILE_ROWS], shifts[R16_HALVES][TILE_ROWS];
  int64_t n_sums, pairs, n_shifts, shift_elements; // sums; pairs, and shifts, of a sum; elements of a shift
  r16_fetch next; // memory that the next panels are made from: waiting for it would leave the arithmetic idle
} r16_panel;

// Whether a product sums as sums.h says: that of weights in blocks. All else has steps for rows, too.
PG_INLINE int r16_in_runs(const r16_product *p) { return !r16_of_floats(p) && !p->across; }
