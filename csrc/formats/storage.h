// Convert rows of every storage type to f32 and back; get_rows, cpy, mul_mat and quantize build on it.
#pragma once
#include "kernel.h"
#include "simd/units.h"

// Convert n elements, a whole number of blocks, between a dense row of the type and dense f32. Rows need no alignment.
// weights: how much the error of each of the n elements counts (> 0); NULL: equally.
typedef void (*pg_to_f32)(const void *row, float *dst, int64_t n);
typedef void (*pg_from_f32)(const float *src, void *row, int64_t n);
typedef void (*pg_from_f32_weighted)(const float *src, const float *weights, void *row, int64_t n);

// The converters of a type; NULL when it has none. All instruction sets give the same bits.
pg_to_f32 PG_FN(to_f32)(int64_t type);
pg_from_f32 PG_FN(from_f32)(int64_t type);
pg_from_f32_weighted PG_FN(from_f32_weighted)(int64_t type);

// Encode n floats x as blocks of t, one of the types that ops write; its blocks begin with a scale in F16. A block with
// NaN or infinities becomes NaN as a whole.
static inline void pg_encode(pg_from_f32 encode, const pg_tensor *t, const float *x, char *row, int64_t n) {
  encode(x, row, n);
  if (pg_all_finite(x, n)) return;
  const int64_t block = pg_block_size(t->type), size = pg_unit_size(t);
  for (int64_t i = 0; i < n / block; i++)
    if (!pg_all_finite(x + i * block, block)) memcpy(row + i * size, &(uint16_t){0x7e00}, sizeof(uint16_t));
}
