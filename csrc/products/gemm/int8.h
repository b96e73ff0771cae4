// The numbers of gemm.h for weights in the fast form: codes as they are, times columns that products/r16/round.h has
// rounded to bytes and factors. That takes half as many multiplications as integers of 16 bits (fixed.h). On Arm with
// dot products of bytes they are those of exact products, too: there an integer of 16 bits is two bytes. The sums are
// those of products/r16/sums.h, in their order. So a result has the bits that gemv.c and fixed_blocks.c give it.
#pragma once
#include "products/gemm/fetch.h"
#include "products/r16/round.h"

enum {
  KC = R16_RUN, // elements of a strip
  NT = 4,       // columns of a tile: one quad, whose sums stay in registers
  TILE_ROWS = VF_N == 16 ? 32 : 16,
  TILE_VECTORS = TILE_ROWS / VF_N,
  R16_PANELS = 1, // panels at a time: a panel is multiplied with all columns while it is in the L1 cache
  R16_WHOLE = 1,  // columns that a product of a tile writes at least
  TILE_GROUPS = TILE_ROWS / R16_ROWS,
  R16_PART_QUARTETS = R16_PART / 4,
#if defined(__ARM_FEATURE_MATMUL_INT8)
  R16_TOGETHER = 8 // bytes of a row, and of a column, that lie together
#else
  R16_TOGETHER = 4
#endif
};

// The first column of a group. Groups are equal, because a tile of few columns would wait for its own sums.
PG_INLINE int64_t r16_split(int64_t n, int64_t n_groups, int64_t group) { return n * group / n_groups; }

PG_INLINE int64_t r16_strip(const r16_product *p) { return KC; }

// How many quartets are summed before they are multiplied with a scale or a factor: a power of two. Without VNNI sums
// are of 16 bits, and hold products of codes less their offset with bytes from -127 to 127: 2 for each quartet. 0 when
// those of one quartet, with bytes to which 128 was added, may not fit. With VNNI, and on Arm, sums are of 32 bits.
PG_INLINE int r16_summed_quartets(r16_format f) {
#if defined(__AVX512VNNI__) || VF_N == 4
  return R16_PART_QUARTETS;
#else
  switch (f.table) {
  case R16_IQ2:     // up to 43
  case R16_IQ3_XXS: // up to 62
    return 2;
  case R16_IQ4:
    return 0;
  case R16_PLAIN:
    if (f.codes == R16_BYTES) return 0;
    if (f.codes != R16_NIBBLES && f.codes != R16_CRUMBS) return R16_PART_QUARTETS;       // up to 32
    return r16_rounds_units(f) && r16_halves(f) == 1 ? R16_QUARTETS : R16_PART_QUARTETS; // up to 15
  default:                                                                               // up to 32
    return R16_PART_QUARTETS;
  }
#endif
}

// Whether the sums of both parts of a unit become words, side by side: with VNNI, for codes of at most 16 in size, of
// which 16 times bytes up to 127 fit. Then one product has the factors of both, and where units are summed, integer
// scales of six bits times factors up to 255 (R16_ROOM), which fit words, too.
PG_INLINE int r16_in_words(r16_format f) {
#if defined(__AVX512VNNI__)
  if (!r16_rounds_units(f) && r16_halves(f) == 2) return 0; // each part has an f32 scale
  if (f.table) return f.table == R16_FP4;                   // up to 12
  return f.codes == R16_NIBBLES || f.codes == R16_CRUMBS || f.codes == R16_CRUMBS_BITS ||
         (f.codes == R16_NIBBLES_BITS && f.offset == 16);
#else
  return 0;
#endif
}

// A strip of TILE_ROWS rows. All numbers are in the order of sums.h.
typedef struct r16_panel {
  _Alignas(64) int8_t codes[KC / R16_TOGETHER][TILE_ROWS][R16_TOGETHER]; // less their offset
#if VF_N != 4
  // -128 times the sum of codes of the quartets that are summed (r16_summed_quartets), at avx2 in words: x86 multiplies
  // columns as unsigned bytes, to which 128 was added, and its sums begin with these. (Arm multiplies signed bytes.)
  int32_t less[2 * R16_PARTS][TILE_ROWS];
#endif
  float scales[R16_PARTS][TILE_ROWS], shifts[R16_PARTS][TILE_ROWS]; // of each sum; of its elements
  int32_t whole[R16_PARTS][TILE_ROWS]; // of formats with factors for units: the integer scale of each dot (1 when the
                                       // format has none), at avx2 twice, in words; r16_in_words: those of both parts
                                       // of each unit, in words
  int kind;                            // how dots become sums (int8.c)
  int64_t n_sums, sum_units, n_shifts; // sums; units, and shifts, of a sum
  r16_fetch next; // memory that the next panels are made from: waiting for it would leave the arithmetic idle
} r16_panel;
