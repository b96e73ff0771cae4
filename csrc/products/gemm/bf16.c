// The product of a panel with a group of columns in bf16. Tile registers: 0 and 1 columns, 2 and 3 weights, 4 to 7
// sums.
#define R16_BF16
#include "products/gemm/bf16_columns.h"

enum {
  LINE = 64, // bytes from one line to the next
  AWAKE = 8  // units between stores of tiles, because one that comes long after the last is slow (docs/products.md)
};

// The operands: columns of the product as rows of tile registers 0 and 1, rows of weights in 2 and 3. `both`: there are
// more columns than one register holds.
#define LOAD_COLUMNS(p)                                                                                                \
  do {                                                                                                                 \
    TILE_LOAD(0, p, LINE);                                                                                             \
    if (both) TILE_LOAD(1, (p) + R16_TILE, LINE);                                                                      \
  } while (0)
#define LOAD_WEIGHTS(p)                                                                                                \
  TILE_LOAD(2, p, LINE);                                                                                               \
  TILE_LOAD(3, (p) + R16_TILE, LINE)
#define ADD_TERM()                                                                                                     \
  TILE_DOT(4, 0, 2);                                                                                                   \
  TILE_DOT(5, 0, 3);                                                                                                   \
  if (both) {                                                                                                          \
    TILE_DOT(6, 1, 2);                                                                                                 \
    TILE_DOT(7, 1, 3);                                                                                                 \
  }

// Add the products of n elements: of all pairs of parts, except those that are as small as the rounding of the parts.
PG_INLINE void add(const uint16_t *w, int w_parts, const uint16_t *x, int x_parts, int64_t n, int both) {
  uint16_t nobody[R16_TILE];
  for (int64_t at = 0, unit = 1; at < n * NT; at += 2 * R16_TILE, unit++) {
    _Pragma("GCC unroll 2") for (int i = 0; i < w_parts; i++) {
      LOAD_WEIGHTS(w + i * n * TILE_ROWS + at);
      _Pragma("GCC unroll 3") for (int t = 0; t < x_parts - i; t++) {
        const int j = i ? t : x_parts - 1 - t; // the last of the first is the first of the second
        if (!i || t) LOAD_COLUMNS(x + j * n * NT + at);
        ADD_TERM();
      }
    }
    if (unit % AWAKE == 0) TILE_STORE(3, nobody, LINE);
  }
}

PG_INLINE void add_parts(int w_parts, int x_parts, const uint16_t *w, const uint16_t *x, int64_t n, int both) {
  if (both) {
    add(w, w_parts, x, x_parts, n, 1);
  } else {
    add(w, w_parts, x, x_parts, n, 0);
  }
}

// The sums of a tile's columns in tile registers 4 to 7. `ld`: floats from one column to the next.
PG_INLINE void load(const float *from, int64_t ld) {
  const float *high = from + R16_HALF * ld;
  TILE_LOAD(4, from, ld * 4);
  TILE_LOAD(5, from + R16_HALF, ld * 4);
  TILE_LOAD(6, high, ld * 4);
  TILE_LOAD(7, high + R16_HALF, ld * 4);
}

PG_INLINE void store(float *to, int64_t ld, int both) {
  float *high = to + R16_HALF * ld;
  TILE_STORE(4, to, ld * 4);
  TILE_STORE(5, to + R16_HALF, ld * 4);
  if (!both) return;
  TILE_STORE(6, high, ld * 4);
  TILE_STORE(7, high + R16_HALF, ld * 4);
}

void R16_BF16_FN(r16_multiply)(float *to, int64_t ld, const r16_totals before, r16_panel *w, const r16_columns *c,
                               const r16_product *p, int64_t group, int64_t strip) {
  const int64_t n = r16_strip_elements(c, strip);
  const int both = r16_group_columns(c, group) > R16_HALF;
  if (before) {
    load(before[0], TILE_ROWS);
  } else {
    TILE_ZERO(4);
    TILE_ZERO(5);
    TILE_ZERO(6);
    TILE_ZERO(7);
  }
  const uint16_t *x = r16_columns_of(c, p, group, strip, 0);
  switch (r16_weight_parts(p) * 4 + r16_column_parts(p)) {
  case 4 + 1:
    add_parts(1, 1, w->values, x, n, both);
    break;
  case 4 + 2:
    add_parts(1, 2, w->values, x, n, both);
    break;
  default:
    add_parts(2, 2, w->values, x, n, both);
  }
  store(to, ld, both);
}
