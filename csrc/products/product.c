// Products of weights as they are stored, with the precision of f32. There are four ways:
// - short rows: product_short.c;
// - few columns: weights are used as they are stored, and each byte is read once from memory;
// - few columns, for types without a tile, or when each tile would decode the weights again: a block of rows is
//   converted to f32 first;
// - many columns: product_many.c.
#include "products/product.h"

#include "formats/storage.h"
#include "products/borders.h"
#include "products/f32_order.h"
#include "products/panel.h"
#include "products/tile.h"
#include "simd/rows.h"
#include "simd/units.h"

enum {
  FEW = 5 * VF_N,                    // most columns for which rows are not rearranged (docs/products.md),
  FEW_HALVES = VF_N == 8 ? 64 : FEW, // those for rows of F16 and BF16,
  FEW_BLOCKS = 8,                    // and those for which block types with a tile are multiplied as they are stored
  NEAR = 1 << 19,                    // bytes of columns that stay in the L2 cache while all rows meet them
  LONG = 2048,                       // in_turn: elements that stay in the L1 cache with a row,
  LONG_ZEN5 = 8192,                  // ... on a Zen 5, whose L1 cache has 48 KB ...
  LARGE = 1 << 19,                   // ... and bytes of a matrix whose model does not stay in the L2 cache
  KC = PG_CUT,                       // elements of a row at a time
  LD = KC + 16,      // stride of converted rows and columns: off the powers of two, which share cache sets
  MB = 2 * PG_MR,    // rows converted at a time: they stay in the L1 cache with a column
  COLS = 12,         // columns of a part are a multiple of this, as it is of those of a tile
  PART_OPS = 1 << 15 // least number of multiplications of a part
};
_Static_assert(MB % PG_MR == 0, "tiles must fit");

// Up to PG_MR rows with up to PG_NR columns. y points to the columns' first result; the results start at `row`.
static void tile(const pg_tile *tiles, float *const *y, int64_t row, const char *a, int64_t nba, int64_t rows,
                 const float *const *b, int64_t nr, int64_t k, int add) {
  float *to[PG_NR];
  float spare[PG_NR][PG_MR];
  const char *ra[PG_MR];
  for (int i = 0; i < PG_MR; i++) ra[i] = a + PG_MIN(i, rows - 1) * nba; // missing rows: the last one again
  if (rows >= PG_MR) {
    for (int64_t j = 0; j < nr; j++) to[j] = y[j] + row;
    tiles[nr - 1](to, ra, b, k, add);
    return;
  }
  for (int64_t j = 0; j < nr; j++) to[j] = spare[j];
  tiles[nr - 1](to, ra, b, k, 0);
  for (int64_t j = 0; j < nr; j++)
    for (int64_t i = 0; i < rows; i++) y[j][row + i] = add ? y[j][row + i] + spare[j][i] : spare[j][i];
}

// How many elements of the columns are multiplied with all rows before the next elements: as many whole cuts as stay in
// the cache.
static int64_t elements_near(const pg_product *p) {
  const int64_t k = p->k, fit = NEAR / 4 / p->n_cols / KC * KC;
  return k * p->n_cols * 4 <= NEAR ? k : PG_MAX(fit, KC);
}

// The tile that multiplies one column with rows one after the other, or NULL when rows side by side are faster, as they
// are on CPUs without AVX-512. Rows in turn are one stream of memory. Intel's prefetchers stop at the end of every
// page, and those of Zen 5 are late, so these tiles prefetch memory themselves. AMD's CPUs read best with AVX2; but a
// row and the column must fit the L1 cache together, the model must be larger than the L2 cache, and a Zen 5 reads F32
// best side by side (docs/products.md).
static pg_tile in_turn(const pg_product *p) {
#if VF_N == 16
  const pg_tensor *a = p->a;
  if (p->n_cols > 1) return NULL;
  if (!pg_cpu_is_amd) return PG_FN(tile_in_turn)(a->type);
  if (a->ne[0] > (pg_cpu_is_zen5 ? LONG_ZEN5 : LONG) || a->ne[1] * a->nb[1] <= LARGE) return NULL;
  if (pg_cpu_is_zen5 && a->type == PG_F32) return NULL;
  return PG_CAT(tile_in_turn, __, avx2)(a->type);
#endif
  return NULL;
}

static void direct(const pg_product *p, pg_part part, const pg_tile *tiles) {
  const int64_t nba = p->a->nb[1], n = part.cols.last - part.cols.first, k = p->k, near = elements_near(p);
  const float *b[FEW_HALVES];
  float *y[FEW_HALVES];
  for (int64_t j = 0; j < n; j++) b[j] = (const float *)pg_column(p, part.cols.first + j, &y[j]);
  const pg_tile turn = in_turn(p), tall = n == 1 && !turn ? PG_FN(tall_tile)(p->a->type) : NULL;
  if (turn) tiles = &turn;
  for (int64_t k0 = 0; k0 < k; k0 += near) {
    const char *a = p->a_rows + k0 / pg_block_size(p->a->type) * p->a->nb[0];
    const int64_t kc = PG_MIN(near, k - k0);
    int64_t r = part.rows.first;
    for (; tall && r + PG_TALL <= part.rows.last; r += PG_TALL) {
      const char *rows[PG_TALL];
      for (int i = 0; i < PG_TALL; i++) rows[i] = a + (r + i) * nba;
      tall((float *[]){y[0] + r}, rows, b, kc, k0 > 0);
    }
    for (; r < part.rows.last; r += PG_MR)
      for (int64_t j = 0; j < n; j += PG_NR)
        tile(tiles, y + j, r, a + r * nba, nba, part.rows.last - r, b + j, PG_MIN(PG_NR, n - j), kc, k0 > 0);
    for (int64_t j = 0; j < n; j++) b[j] += kc;
  }
}

static void converted(const pg_product *p, pg_part part, float *work) {
  const pg_tensor *a = p->a;
  const pg_tile *tiles = PG_FN(tiles)(PG_F32);
  const pg_to_f32 to_f32 = PG_FN(to_f32)(a->type);
  const int64_t k = p->k, per = pg_block_size(a->type), n = part.cols.last - part.cols.first;
  const int64_t bytes = KC / per * a->nb[0]; // of a row at a time
  const int in_place = pg_is_f32_row(p->b);
  float *wa = work, *wb = work + MB * LD;
  const float *b[FEW];
  const char *cols[FEW];
  float *y[FEW];
  for (int64_t j = 0; j < n; j++) {
    cols[j] = pg_column(p, part.cols.first + j, &y[j]);
    b[j] = wb + j * LD;
  }
  for (int64_t r0 = part.rows.first; r0 < part.rows.last; r0 += MB) {
    const int64_t mb = PG_MIN(MB, part.rows.last - r0);
    for (int64_t k0 = 0; k0 < k; k0 += KC) {
      const int64_t kc = PG_MIN(KC, k - k0);
      const int64_t at = k0 / per * a->nb[0], ahead = k0 + KC < k ? bytes : MB * a->nb[1] - at;
      for (int64_t r = 0; r < mb; r++) {
        const char *row = p->a_rows + (r0 + r) * a->nb[1] + at;
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + ahead + i);
        to_f32(row, wa + r * LD, kc);
      }
      for (int64_t j = 0; j < n; j++) {
        if (in_place) {
          b[j] = (const float *)cols[j] + k0;
        } else {
          pg_get_f32(wb + j * LD, p->b, cols[j], k0, kc);
        }
      }
      for (int64_t r = 0; r < mb; r += PG_MR)
        for (int64_t j = 0; j < n; j += PG_NR)
          tile(tiles, y + j, r0 + r, (const char *)(wa + r * LD), LD * 4, mb - r, b + j, PG_MIN(PG_NR, n - j), kc,
               k0 > 0);
    }
  }
}

// The way of a product, by the type of its weights and its columns.
static enum { DIRECT, CONVERTED, MANY, SHORT } way_of(const pg_product *p) {
  if (p->across) return MANY;
  if (p->k <= PG_SHORT && pg_block_size(p->a->type) == 1) return SHORT;
  const int64_t few = pg_block_size(p->a->type) > 1 ? FEW_BLOCKS : p->a->type == PG_F32 ? FEW : FEW_HALVES;
  if (p->n_cols <= few && PG_FN(tiles)(p->a->type) && pg_is_f32_row(p->b)) return DIRECT;
  return p->n_cols <= FEW ? CONVERTED : MANY;
}

void PG_FN(product)(const pg_product *p, pg_part part, float *work) {
  switch (way_of(p)) {
  case DIRECT:
    direct(p, part, PG_FN(tiles)(p->a->type));
    break;
  case CONVERTED:
    converted(p, part, work);
    break;
  case MANY:
    PG_FN(product_many)(p, part, work);
    break;
  case SHORT:
    PG_FN(product_short)(p, part, work);
  }
}

int64_t PG_FN(product_work)(void) { return PG_MAX((MB + FEW) * LD * 4, PG_FN(product_many_work)()); }

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

pg_cut PG_FN(product_cut)(const pg_product *p, int64_t wanted) {
  const int64_t m = p->m, n = p->n_cols;
  wanted = PG_MAX(1, PG_MIN(wanted, pg_times(pg_times(m, n), p->k) / PART_OPS));
  const int many = way_of(p) == MANY;
  const int64_t unit = p->across && pg_block_size(p->a->type) > 1 ? PG_MOST_BLOCK : many ? PG_PANEL : PG_MR;
  // Equal parts, but no more of them than are worth converting columns for.
  const int64_t most = many ? ceil_div(m, PG_MANY_ROWS) : m, per = ceil_div(m, PG_MIN(wanted, most));
  const int64_t rows = PG_MIN(ceil_div(per, unit) * unit, m), n_rows = ceil_div(m, rows);
  const int64_t cols = n_rows >= wanted ? n : PG_MIN(ceil_div(ceil_div(n, wanted / n_rows), COLS) * COLS, n);
  return (pg_cut){rows, cols, n_rows, ceil_div(n, cols)};
}
