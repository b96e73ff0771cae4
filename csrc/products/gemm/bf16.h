// The numbers of gemm.h for weights in the fast form as bf16, multiplied by tiles (AMX): NMSE 3e-6 for block types.
// Floats need more precision: an F16 weight, and the columns that meet floats, become two bf16 numbers, the second of
// which is the rest that rounding left. All their products count except those of two rests (NMSE 1e-11).
//
// A tile register holds 16 lines of 64 bytes. A line of columns is 32 elements of one column, a line of weights one
// pair of elements of 16 rows. Pairs are as in fixed.h: elements 0 and 2 of a quartet, then 1 and 3.
#pragma once
#include "simd/amx.h"
#include "simd/to_bf16.h"
#include "products/r16/repacked.h"

enum {
  KC = 2048, // elements of a strip at most
  NT = 32,   // columns of two tile registers: with two of rows they need four of sums, half of all registers
  TILE_ROWS = 32,
  R16_PANELS = 8, // panels at a time: they stay in the L2 cache
  R16_WHOLE = NT, // columns that a product of a tile writes at least
  R16_HALF = 16,  // rows, or columns, of a tile register
  R16_TILE = R16_HALF * R16_UNIT
};

// How many bf16 numbers stand for a weight; and for an element of a column.
PG_INLINE int r16_weight_parts(const r16_product *p) { return p->f.type == PG_F16 ? 2 : 1; }
PG_INLINE int r16_column_parts(const r16_product *p) { return r16_of_floats(p) ? 2 : 1; }

// First of n columns in a group: whole tile registers.
PG_INLINE int64_t r16_split(int64_t n, int64_t n_groups, int64_t group) { return PG_MIN(n, group * NT); }

PG_INLINE int64_t r16_strip(const r16_product *p) { return r16_of_floats(p) ? KC / 2 : KC; }

// A strip of TILE_ROWS rows: [part][unit][half][pair][row of the half][2].
typedef struct r16_panel {
  _Alignas(64) uint16_t values[KC * TILE_ROWS];
} r16_panel;

// 32 elements of a column, or of a row, in the order of pairs.
PG_INLINE __m512i r16_pairs(__m512i v) { return _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(v, 0xd8), 0xd8); }
PG_INLINE __m512i r16_bf16(const float *x) { return r16_pairs(bf16_of(vf_load(x), vf_load(x + 16))); }

// Replace x[0..n) by the rests that rounding leaves; n is a multiple of 16.
PG_INLINE void r16_rest(float *x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) vf_store(x + i, bf16_rest(vf_load(x + i)));
}
