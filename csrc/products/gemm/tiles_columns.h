// The layout of columns that tiles multiply.
#pragma once
#include "products/gemm/gemm.h"

// A strip of R16_SIDE columns. `halves` and `units` are the sums of r16_x: of each half of a unit, and of each unit.
typedef struct r16_tile_columns {
  _Alignas(64) uint8_t bytes[KC / R16_LONG][R16_PLANES][R16_SIDE][R16_LONG];
  float halves[R16_HALVES][R16_SIDE], units[R16_HALVES / 2][R16_SIDE];
  float steps[R16_SIDE];
} r16_tile_columns;

// All columns of a strip lie together, so that a chunk reads one piece of memory at a time.
static inline r16_tile_columns *r16_tiles_of(const r16_columns *c, int64_t group, int64_t strip) {
  const int64_t sides = (c->n + R16_SIDE - 1) / R16_SIDE;
  return (r16_tile_columns *)c->data + strip * sides + r16_first_column(c, group) / R16_SIDE;
}
