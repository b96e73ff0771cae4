// The product of a panel with a group of columns in bf16. Tile registers: 0 and 1 columns, 2 and 3 weights, 4 to 7
// sums.
#include "r16/bf16_columns.h"

enum { LINE = 64, TOTALS_LINE = TILE_ROWS * 4 }; // bytes from one line to the next

// Add the product of n / 32 units; `both`: of more columns than one register holds.
PG_INLINE void add(const uint16_t *w, const uint16_t *x, int64_t n, int both) {
  for (int64_t i = 0; i < n; i += R16_UNIT, x += 2 * R16_TILE, w += 2 * R16_TILE) {
    TILE_LOAD(0, x, LINE);
    TILE_LOAD(2, w, LINE);
    TILE_DOT(4, 0, 2);
    TILE_LOAD(3, w + R16_TILE, LINE);
    TILE_DOT(5, 0, 3);
    if (both) {
      TILE_LOAD(1, x + R16_TILE, LINE);
      TILE_DOT(6, 1, 2);
      TILE_DOT(7, 1, 3);
    }
  }
}

void PG_FN(r16_multiply)(r16_totals to, const r16_panel *w, const r16_columns *c, const r16_product *p, int64_t group,
                         int64_t strip) {
  const int64_t n = r16_strip_elements(c, strip);
  const int both = r16_group_columns(c, group) > R16_HALF;
  float *low = to[0], *high = to[R16_HALF];
  if (strip) {
    TILE_LOAD(4, low, TOTALS_LINE);
    TILE_LOAD(5, low + R16_HALF, TOTALS_LINE);
    TILE_LOAD(6, high, TOTALS_LINE);
    TILE_LOAD(7, high + R16_HALF, TOTALS_LINE);
  } else {
    TILE_ZERO(4);
    TILE_ZERO(5);
    TILE_ZERO(6);
    TILE_ZERO(7);
  }
  for (int i = 0; i < r16_weight_parts(p); i++)
    for (int j = 0; j < r16_column_parts(p) && i + j < 2; j++) {
      const uint16_t *part = w->values + i * n * TILE_ROWS, *x = r16_columns_of(c, p, group, strip, j);
      if (both) {
        add(part, x, n, 1);
      } else {
        add(part, x, n, 0);
      }
    }
  TILE_STORE(4, low, TOTALS_LINE);
  TILE_STORE(5, low + R16_HALF, TOTALS_LINE);
  TILE_STORE(6, high, TOTALS_LINE);
  TILE_STORE(7, high + R16_HALF, TOTALS_LINE);
}
