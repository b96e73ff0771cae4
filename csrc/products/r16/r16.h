// R16: weights repacked so that the lanes of a vector are 16 rows of the matrix, and one stream of bytes feeds them.
//
// Rows are taken in groups of 16 (the last group is filled up with zero rows). A group is a sequence of blocks along k;
// groups follow each other. A block is
//
//   head    the numbers of a whole block: 16 x f16 d, or 16 x f16 d and 16 x f16 m; empty in R16_E8M0, R16_E4M3
//   units   1, 2 or 8 (blocks of 32, 64 or 256): each stands for 16 rows x 32 k and is
//             codes    lines of 64 bytes, one 4-byte lane per row (row r: bytes 4r .. 4r+3)
//             scales   0, 16 or 32 bytes, see r16_scales; byte r (and 16 + r) belongs to row r
//
// A quartet p = 0 .. 7 of a unit is k = 4p .. 4p+3; its element i lies in byte i of a lane. Lines of codes are
//
//   bytes    8 lines: line p is quartet p
//   nibbles  4 lines: line j holds quartet 2j in its low nibbles, quartet 2j+1 in its high ones
//   crumbs   2 lines: line j holds quartets 4j .. 4j+3 in rising bit pairs
//   bits     1 line: bit p of each byte belongs to quartet p
//
// Codes are unsigned. 5-bit codes are nibbles, then bits for bit 4; 6-bit codes nibbles, then crumbs for bits 4 and 5;
// 3-bit codes crumbs, then bits for bit 2. A format with a table of values looks its codes up in it, giving
// bytes. The bytes need no alignment, and have none: a block is rarely a whole number of cache lines.
//
// Points of a grid cannot be looked up for 16 rows at once, so a code stands for one element with its sign. That is why
// the IQ types grow (docs/products.md).
#pragma once
#include "kernel.h"

enum {
  R16_ROWS = 16,
  R16_UNIT = 32,
  R16_LINE = 64,
  R16_QUARTETS = 8,
  R16_UNIT_MAX = R16_QUARTETS * R16_LINE + 32 + 64 // bytes of a unit, its head included
};

enum r16_codes { R16_BYTES, R16_NIBBLES, R16_NIBBLES_BITS, R16_NIBBLES_CRUMBS, R16_CRUMBS, R16_CRUMBS_BITS };

// How a weight w follows from its code q, with v = q - offset (of the format), without the format's factor.
enum r16_scales {
  R16_D,       // head d;        w = d * v
  R16_D_M,     // head d, m;     w = d * v + m
  R16_E8M0,    // unit: i8 e;    w = 2^e * v (E8M0 less 128: the values of the table are doubled)
  R16_D_S32,   // head d;        unit: i8 s per 32;            w = d * s * v
  R16_E4M3,    // unit: s per 16, twice: UE4M3 / 128 as f16 without its low 7 bits;      w = s * v
  R16_D_S16,   // head d;        unit: i8 s per 16, twice;     w = d * s * v
  R16_DM_SM32, // head d, m;     unit: u8 s, u8 t per 32;      w = d * s * v - m * t
  R16_DM_SM16  // head d, m;     unit: u8 s | t << 4 per 16;   w = d * s * v - m * t
};

enum r16_table { R16_PLAIN, R16_IQ1, R16_IQ2, R16_IQ3_XXS, R16_IQ3_S, R16_IQ4, R16_FP4 }; // vec.h: 128 + values

typedef struct r16_format {
  int type;   // GGUF's
  int codes;  // enum r16_codes
  int table;  // enum r16_table
  int offset; // v = q - offset
  int units;  // per block
  int scales; // enum r16_scales
  float factor;
} r16_format;

// One line per type. It decides everything that depends on the type, except the functions of pack.c and take.h.
#define R16_FORMATS(X)                                                                                                 \
  X(Q4_0, R16_NIBBLES, R16_PLAIN, 8, 1, R16_D, 1)                                                                      \
  X(Q4_1, R16_NIBBLES, R16_PLAIN, 0, 1, R16_D_M, 1)                                                                    \
  X(Q5_0, R16_NIBBLES_BITS, R16_PLAIN, 16, 1, R16_D, 1)                                                                \
  X(Q5_1, R16_NIBBLES_BITS, R16_PLAIN, 0, 1, R16_D_M, 1)                                                               \
  X(Q8_0, R16_BYTES, R16_PLAIN, 128, 1, R16_D, 1)                                                                      \
  X(Q2_K, R16_CRUMBS, R16_PLAIN, 0, 8, R16_DM_SM16, 1)                                                                 \
  X(Q3_K, R16_CRUMBS_BITS, R16_PLAIN, 4, 8, R16_D_S16, 1)                                                              \
  X(Q4_K, R16_NIBBLES, R16_PLAIN, 0, 8, R16_DM_SM32, 1)                                                                \
  X(Q5_K, R16_NIBBLES_BITS, R16_PLAIN, 0, 8, R16_DM_SM32, 1)                                                           \
  X(Q6_K, R16_NIBBLES_CRUMBS, R16_PLAIN, 32, 8, R16_D_S16, 1)                                                          \
  X(IQ1_S, R16_CRUMBS_BITS, R16_IQ1, 128, 8, R16_D_S32, 0.125f)                                                        \
  X(IQ1_M, R16_CRUMBS_BITS, R16_IQ1, 128, 8, R16_D_S16, 0.125f)                                                        \
  X(IQ2_XXS, R16_CRUMBS_BITS, R16_IQ2, 128, 8, R16_D_S32, 0.125f)                                                      \
  X(IQ2_XS, R16_CRUMBS_BITS, R16_IQ2, 128, 8, R16_D_S16, 0.125f)                                                       \
  X(IQ2_S, R16_CRUMBS_BITS, R16_IQ2, 128, 8, R16_D_S16, 0.125f)                                                        \
  X(IQ3_XXS, R16_NIBBLES, R16_IQ3_XXS, 128, 8, R16_D_S32, 0.25f)                                                       \
  X(IQ3_S, R16_NIBBLES, R16_IQ3_S, 128, 8, R16_D_S32, 1)                                                               \
  X(IQ4_NL, R16_NIBBLES, R16_IQ4, 128, 1, R16_D, 1)                                                                    \
  X(IQ4_XS, R16_NIBBLES, R16_IQ4, 128, 8, R16_D_S32, 1)                                                                \
  X(TQ1_0, R16_CRUMBS, R16_PLAIN, 1, 8, R16_D, 1)                                                                      \
  X(TQ2_0, R16_CRUMBS, R16_PLAIN, 1, 8, R16_D, 1)                                                                      \
  X(MXFP4, R16_NIBBLES, R16_FP4, 128, 1, R16_E8M0, 1)                                                                  \
  X(NVFP4, R16_NIBBLES, R16_FP4, 128, 2, R16_E4M3, 128)

#define X(name, codes, table, offset, units, scales, factor)                                                           \
  static const r16_format r16_##name __attribute__((unused)) = {PG_##name, codes, table, offset, units, scales, factor};
R16_FORMATS(X)
#undef X

PG_INLINE const r16_format *r16_find(int64_t type) {
  switch (type) {
#define X(name, ...)                                                                                                   \
  case PG_##name:                                                                                                      \
    return &r16_##name;
    R16_FORMATS(X)
#undef X
  default:
    return NULL;
  }
}

PG_INLINE int r16_lines(r16_format f) {
  switch (f.codes) {
  case R16_BYTES:
    return 8;
  case R16_NIBBLES:
    return 4;
  case R16_NIBBLES_BITS:
    return 5;
  case R16_NIBBLES_CRUMBS:
    return 6;
  case R16_CRUMBS:
    return 2;
  default:
    return 3;
  }
}

PG_INLINE int r16_head_bytes(r16_format f) {
  if (f.scales == R16_E8M0 || f.scales == R16_E4M3) return 0;
  return f.scales == R16_D_M || f.scales == R16_DM_SM32 || f.scales == R16_DM_SM16 ? 64 : 32;
}

// Scales per unit and row.
PG_INLINE int r16_halves(r16_format f) {
  return f.scales == R16_E4M3 || f.scales == R16_D_S16 || f.scales == R16_DM_SM16 ? 2 : 1;
}

PG_INLINE int r16_unit_bytes(r16_format f) {
  const int scales = f.scales <= R16_D_M ? 0 : f.scales <= R16_D_S32 ? 16 : 32;
  return r16_lines(f) * R16_LINE + scales;
}

PG_INLINE int r16_block_bytes(r16_format f) { return r16_head_bytes(f) + f.units * r16_unit_bytes(f); }

// Bytes of a group of 16 rows, and of a matrix [k, m].
PG_INLINE int64_t r16_group_bytes(r16_format f, int64_t k) { return k / (R16_UNIT * f.units) * r16_block_bytes(f); }
PG_INLINE int64_t r16_matrix_bytes(r16_format f, int64_t k, int64_t m) {
  return (m + R16_ROWS - 1) / R16_ROWS * r16_group_bytes(f, k);
}
