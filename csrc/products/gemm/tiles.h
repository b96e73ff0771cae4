// The integers of fixed.h multiplied by tile registers (AMX), with the same results to the bit. Tiles multiply bytes,
// so an integer of 16 bits is two of them: its high byte, which is signed, and its low one, which is not. An integer
// times another is four products of bytes, whose sums meet with their weights of 1, 2^8 and 2^16, modulo 2^32; a whole
// sum fits 32 bits (products/r16/sums.h).
//
// A tile register holds 16 lines of 64 bytes. A line of columns is 64 elements of one column, a line of weights four
// elements (a quartet) of 16 rows.
#pragma once
#include "simd/amx.h"
#include "products/gemm/fetch.h"
#include "products/r16/repacked.h"
#include "products/r16/sums.h"

enum {
  KC = 256,      // elements of a strip: a run (sums.h)
  R16_SIDE = 16, // rows, or columns, of a tile register
  R16_LONG = 64, // elements of a line of columns
  R16_BYTES_TILE = R16_SIDE * R16_LONG,
  NT = 64,        // columns of a group
  TILE_ROWS = 64, // more than 32, because columns come from the L2 cache
  R16_PANELS = 1, // panels at a time: a panel is multiplied with all columns while it is in the L1 cache
  R16_WHOLE = 1,  // columns that a product of a tile writes at least
  TILE_GROUPS = TILE_ROWS / R16_ROWS,
  R16_HALVES = KC / (R16_UNIT / 2) // of the units of a strip
};

// The first column of a group: groups are whole tile registers, as equal as may be.
PG_INLINE int64_t r16_split(int64_t n, int64_t n_groups, int64_t group) {
  const int64_t sides = (n + R16_SIDE - 1) / R16_SIDE;
  return PG_MIN(n, sides * group / n_groups * R16_SIDE);
}

PG_INLINE int64_t r16_strip(const r16_product *p) { return KC; }

enum { R16_HIGH, R16_LOW, R16_PLANES }; // bytes of integers

// A strip of TILE_ROWS rows: codes, times integer scales. Those of formats without integer scales, and of Q2_K, fit a
// signed byte, and have no low ones. In the order of sums.h the scale of each sum and each shift.
typedef struct r16_panel {
  _Alignas(64) uint8_t bytes[TILE_GROUPS][KC / R16_LONG][R16_PLANES][R16_BYTES_TILE]; // [quartet][row][element]
  float scales[R16_HALVES][TILE_ROWS], shifts[R16_HALVES][TILE_ROWS];
  int64_t n_sums;
  r16_fetch next; // memory that the next panels are made from: waiting for it would leave the arithmetic idle
} r16_panel;

// How a format's sums are computed: planes of its integers; units, and shifts, of a sum.
typedef struct r16_kind {
  int planes, units, shifts;
} r16_kind;

PG_INLINE int r16_has_whole(r16_format f) { return f.units == 8 && f.scales > R16_D_M; } // integer scales
PG_INLINE r16_kind r16_kind_of(r16_format f) {
  const int bytes = !r16_has_whole(f) || (f.codes == R16_CRUMBS && f.table == R16_PLAIN);
  const int units = r16_sum_units(f), shift = r16_shift_elements(f);
  return (r16_kind){bytes ? 1 : 2, units, shift ? units * R16_UNIT / shift : 0};
}
