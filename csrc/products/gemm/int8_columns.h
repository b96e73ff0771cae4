// The layout of columns in bytes.
#pragma once
#include "products/gemm/gemm.h"

// Planes of bytes of a column. Arm multiplies them exactly, too: then an integer is 256 * hi + lo, and has no factor.
PG_INLINE int r16_planes(const r16_product *p) { return VF_N == 4 && !p->fast ? 2 : 1; }

// The numbers of a strip of a group of columns.
typedef struct r16_numbers {
  float steps[R16_WIDTH];
  int32_t factors[R16_PARTS][R16_WIDTH];   // of each part of 16 elements, at avx2 twice, in words; or of each unit
  int32_t pairs[R16_RUN_UNITS][R16_WIDTH]; // those of both parts of each unit, in words (r16_in_words)
  float sums[2][R16_PARTS][R16_WIDTH];     // of integers: of each part, of each unit
} r16_numbers;

// How the sums of a product are computed (int8.c).
int R16_INT8_FN(r16_kind_of)(const r16_product *p);

// A strip of a group of columns, filled up with columns that nobody reads.
typedef struct r16_byte_columns {
  uint8_t (*bytes)[R16_WIDTH][R16_TOGETHER]; // [quartet or two, by plane][column]; on x86 128 more than they are
  r16_numbers *numbers;
} r16_byte_columns;

// All bytes come first, each strip's together (as in fixed_columns.h). Then come the numbers: [strip][group].
static inline r16_byte_columns r16_bytes_at(const r16_columns *c, const r16_product *p, int64_t group, int64_t strip) {
  const int64_t n = r16_strip_elements(c, strip), planes = r16_planes(p);
  const int64_t all = (c->n_groups * R16_WIDTH * c->k * planes + 63) / 64 * 64;
  return (r16_byte_columns){.bytes = (uint8_t(*)[R16_WIDTH][R16_TOGETHER])c->data +
                                     (strip * c->strip * c->n_groups + group * n) / R16_TOGETHER * planes,
                            .numbers = (r16_numbers *)(c->data + all) + strip * c->n_groups + group};
}
