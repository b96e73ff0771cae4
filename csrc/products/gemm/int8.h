// The numbers of gemm.h for weights in the fast form: codes as they are, times columns that products/r16/round.h has
// rounded to bytes and factors. That takes half as many multiplications as integers of 16 bits (fixed.h), and has the
// same sums: those of products/r16/sums.h, in their order. So a result has the bits that gemv.c and fixed_blocks.c give
// it.
#pragma once
#include "products/gemm/fetch.h"
#include "products/r16/round.h"

enum {
  KC = R16_RUN,             // elements of a strip
  NT = VF_N == 16 ? 14 : 4, // columns of a tile: with two registers of rows, as many sums as fit the registers
  TILE_VECTORS = 2,
  TILE_ROWS = TILE_VECTORS * VF_N,
  R16_PANELS = 1, // panels at a time: a panel is multiplied with all columns while it is in the L1 cache
  R16_WHOLE = 1,  // columns that a product of a tile writes at least
  TILE_GROUPS = TILE_ROWS / R16_ROWS
};

// The first column of a group. Groups are equal, because a tile of few columns would wait for its own sums.
PG_INLINE int64_t r16_split(int64_t n, int64_t n_groups, int64_t group) { return n * group / n_groups; }

PG_INLINE int64_t r16_strip(const r16_product *p) { return KC; }

// A strip of TILE_ROWS rows: codes; in the order of sums.h the scale of each sum, and each shift; and the integer
// scales of formats that have them.
typedef struct r16_panel {
  _Alignas(64) uint8_t codes[KC / 4][TILE_ROWS][4];
  float scales[R16_PARTS][TILE_ROWS], shifts[R16_PARTS][TILE_ROWS];
  int32_t whole[R16_PARTS][TILE_ROWS];
  int64_t n_units;
  r16_fetch next; // memory that the next panels are made from: waiting for it would leave the arithmetic idle
} r16_panel;

// Codes as a panel has them: v = code - 2^offset (0 where offset is -1), code at most `max`. Values of a table, to
// which 128 was added to make them codes, have less added here, so that sums of few products fit 16 bits.
typedef struct r16_bytes {
  int less; // code = r16_quartet's - less
  int offset, max;
} r16_bytes;

PG_INLINE r16_bytes r16_bytes_of(r16_format f) {
  switch (f.table) {
  case R16_IQ1:
    return (r16_bytes){128 - 16, 4, 25};
  case R16_IQ2:
    return (r16_bytes){128 - 64, 6, 107};
  case R16_IQ3_XXS:
    return (r16_bytes){128 - 64, 6, 126};
  case R16_IQ3_S:
    return (r16_bytes){128 - 16, 4, 31};
  case R16_FP4:
    return (r16_bytes){128 - 16, 4, 28};
  case R16_IQ4:
    return (r16_bytes){0, 7, 255};
  default:
    break;
  }
  static const uint8_t largest[] = {[R16_BYTES] = 255,         [R16_NIBBLES] = 15, [R16_NIBBLES_BITS] = 31,
                                    [R16_NIBBLES_CRUMBS] = 63, [R16_CRUMBS] = 3,   [R16_CRUMBS_BITS] = 7};
  return (r16_bytes){0, f.offset ? __builtin_ctz(f.offset) : -1, largest[f.codes]};
}

PG_INLINE void r16_begin(void) {} // called by a thread before, and after, it multiplies
PG_INLINE void r16_end(void) {}
