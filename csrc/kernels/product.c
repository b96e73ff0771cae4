// Three ways through a product. Few columns: weights are used as they are stored, each byte read once from memory. Few,
// but of weights without a tile of their own: a block of rows is converted to f32 first. Many columns: product_many.c.
#include "product.h"

#include "blocks.h"
#include "rows.h"
#include "tile.h"
#include "units.h"

enum {
  FEW = 12,          // columns up to which rows are not laid out anew
  KC = 512,          // elements of a row at a time: a multiple of every block size
  LD = KC + 16,      // stride of converted rows and columns: off the powers of two, which share cache sets
  MB = 2 * PG_MR,    // rows converted at a time: they stay in the L1 cache with a column
  UNIT = 128,        // rows of a part, where columns are many: they are converted once per that many rows
  PART_OPS = 1 << 15 // multiplications that are worth a part of their own
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

static void direct(const pg_product *p, pg_part part, const pg_tile *tiles) {
  const int64_t nba = p->a->nb[1], n = part.cols.last - part.cols.first;
  const float *b[FEW];
  float *y[FEW];
  for (int64_t j = 0; j < n; j++) b[j] = (const float *)pg_column(p, part.cols.first + j, &y[j]);
  int64_t r = part.rows.first;
  const pg_tile tall = n == 1 ? PG_FN(tall_tile)(p->a->type) : NULL;
  for (; tall && r + PG_TALL <= part.rows.last; r += PG_TALL) {
    const char *rows[PG_TALL];
    for (int i = 0; i < PG_TALL; i++) rows[i] = p->a_rows + (r + i) * nba;
    tall((float *[]){y[0] + r}, rows, b, p->a->ne[0], 0);
  }
  for (; r < part.rows.last; r += PG_MR)
    for (int64_t j = 0; j < n; j += PG_NR)
      tile(tiles, y + j, r, p->a_rows + r * nba, nba, part.rows.last - r, b + j, PG_MIN(PG_NR, n - j), p->a->ne[0], 0);
}

static void converted(const pg_product *p, pg_part part, float *work) {
  const pg_tensor *a = p->a;
  const pg_tile *tiles = PG_FN(tiles)(PG_F32);
  const pg_to_f32 to_f32 = PG_FN(to_f32)(a->type);
  const int64_t k = a->ne[0], per = pg_block_size(a->type), n = part.cols.last - part.cols.first;
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

// The one place that chooses how a weight type is multiplied.
void PG_FN(product)(const pg_product *p, pg_part part, float *work) {
  const pg_tile *tiles = PG_FN(tiles)(p->a->type);
  if (p->n_cols > FEW) {
    PG_FN(product_many)(p, part, work);
  } else if (tiles && pg_is_f32_row(p->b)) {
    direct(p, part, tiles);
  } else {
    converted(p, part, work);
  }
}

int64_t PG_FN(product_work)(void) { return PG_MAX((MB + FEW) * LD * 4, PG_FN(product_many_work)()); }

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

pg_cut PG_FN(product_cut)(const pg_product *p, int64_t wanted) {
  const int64_t m = p->a->ne[1], n = p->n_cols, k = p->a->ne[0];
  wanted = PG_MAX(1, PG_MIN(wanted, m * n * k / PART_OPS));
  const int64_t unit = n <= FEW ? PG_MR : UNIT;
  const int64_t rows = PG_MIN(ceil_div(ceil_div(m, wanted), unit) * unit, m), n_rows = ceil_div(m, rows);
  const int64_t cols = n_rows >= wanted ? n : PG_MIN(ceil_div(ceil_div(n, wanted / n_rows), FEW) * FEW, n);
  return (pg_cut){rows, cols, n_rows, ceil_div(n, cols)};
}
