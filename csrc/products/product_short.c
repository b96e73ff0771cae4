// Products with short rows (the second half of a low-rank adapter). A row is so short that summing over it across the
// lanes of a vector, or keeping tiles of results in between, would cost more than the product. So rows are laid out
// with lanes of a vector being rows, as for many columns, and results go straight to where they belong.
#include "formats/storage.h"
#include "simd/lanes.h"
#include "products/f32_order.h"
#include "products/product.h"
#include "simd/rows.h"
#include "simd/units.h"

enum {
  LANES = 2 * VF_N, // rows of a tile
  NR = VF_N == 16  ? 12
       : VF_N == 8 ? 6
                   : 4, // columns of a tile: with two vectors of rows, as many as fit the registers
  TALL = 4,
  MB = PG_MANY_ROWS
};
_Static_assert(MB % LANES == 0 && LANES % 4 == 0, "tiles must fit");

#define UNROLL _Pragma("GCC unroll 16")

// y[j][0..LANES) = rows a[i][0..LANES), i < k, times b[j].
PG_INLINE void tile(int nr, float *const *y, const float *a, const float *const *b, int64_t k) {
  vf acc[NR][2];
  UNROLL for (int j = 0; j < nr; j++) acc[j][0] = acc[j][1] = vf_zero();
  for (int64_t i = 0; i < k; i++, a += LANES) {
    const vf a0 = vf_load(a), a1 = vf_load(a + VF_N);
    UNROLL for (int j = 0; j < nr; j++) {
      const vf x = vf_set1(b[j][i]);
      acc[j][0] = vf_fma(a0, x, acc[j][0]);
      acc[j][1] = vf_fma(a1, x, acc[j][1]);
    }
  }
  UNROLL for (int j = 0; j < nr; j++) {
    vf_store(y[j], acc[j][0]);
    vf_store(y[j] + VF_N, acc[j][1]);
  }
}

// The same for one column and TALL tiles of rows, which hide fma's latency.
static __attribute__((noinline)) void tall(float *y, const float *a, const float *b, int64_t k) {
  vf acc[TALL][2];
  UNROLL for (int t = 0; t < TALL; t++) acc[t][0] = acc[t][1] = vf_zero();
  for (int64_t i = 0; i < k; i++, a += LANES) {
    const vf x = vf_set1(b[i]);
    UNROLL for (int t = 0; t < TALL; t++) {
      acc[t][0] = vf_fma(vf_load(a + t * LANES * k), x, acc[t][0]);
      acc[t][1] = vf_fma(vf_load(a + t * LANES * k + VF_N), x, acc[t][1]);
    }
  }
  UNROLL for (int t = 0; t < TALL; t++, y += LANES) {
    vf_store(y, acc[t][0]);
    vf_store(y + VF_N, acc[t][1]);
  }
}

// Not inlined: in a larger function the sums would not stay in registers.
static __attribute__((noinline)) void tile_all(float *const *y, const float *a, const float *const *b, int64_t k) {
  tile(NR, y, a, b, k);
}
static __attribute__((noinline)) void tile_one(float *const *y, const float *a, const float *const *b, int64_t k) {
  tile(1, y, a, b, k);
}

// The results of a tile that has fewer rows.
static void tile_rest(float *y, const float *a, const float *b, int64_t rows, int64_t k) {
  float sums[LANES];
  tile_one((float *[]){sums}, a, (const float *[]){b}, k);
  for (int64_t i = 0; i < rows; i++) y[i] = sums[i];
}

// VF_N rows of k elements, ld apart, as half of a tile.
static void put_rows(float *to, const float *rows, int64_t ld, int64_t k) {
  const int64_t whole = k / VF_N * VF_N;
  pg_turn(to, LANES, VF_N * LANES, (const char *)rows, ld * 4, whole);
  for (int r = 0; r < VF_N && whole < k; r += 4)
    pg_rows_to_lanes(to + whole * LANES + r, LANES, rows + r * ld + whole, ld, k - whole);
}

void PG_FN(product_short)(const pg_product *p, pg_part part, float *work) {
  const pg_to_f32 to_f32 = PG_FN(to_f32)(p->a->type);
  const int64_t k = p->a->ne[0], nba = p->a->nb[1];
  const int in_place = pg_is_f32_row(p->b);
  for (int64_t r0 = part.rows.first; r0 < part.rows.last; r0 += MB) {
    const int64_t n = PG_MIN(MB, part.rows.last - r0);
    for (int64_t r = 0; r < n; r += VF_N) { // rows that are missing: the last one again
      const char *first = p->a_rows + (r0 + r) * nba;
      float *to = work + r / LANES * LANES * k + r % LANES, rows[VF_N][PG_SHORT];
      if (p->a->type == PG_F32 && r + VF_N <= n && nba % 4 == 0) {
        put_rows(to, (const float *)first, nba / 4, k);
        continue;
      }
      for (int64_t i = 0; i < VF_N; i++) to_f32(first + PG_MIN(i, n - 1 - r) * nba, rows[i], k);
      put_rows(to, rows[0], PG_SHORT, k);
    }
    for (int64_t c = part.cols.first, nr; c < part.cols.last; c += nr) {
      nr = part.cols.last - c >= NR ? NR : 1;
      const float *b[NR];
      float *y[NR], own[NR][PG_SHORT];
      for (int64_t j = 0; j < nr; j++) {
        const char *column = pg_column(p, c + j, &y[j]);
        y[j] += r0;
        b[j] = in_place ? (const float *)column : own[j];
        if (!in_place) pg_get_f32(own[j], p->b, column, 0, k);
      }
      int64_t r = 0;
      for (; nr == 1 && r + TALL * LANES <= n; r += TALL * LANES, y[0] += TALL * LANES)
        tall(y[0], work + r * k, b[0], k);
      for (; r + LANES <= n; r += LANES) {
        (nr == NR ? tile_all : tile_one)(y, work + r * k, b, k);
        for (int64_t j = 0; j < nr; j++) y[j] += LANES;
      }
      for (int64_t j = 0; r < n && j < nr; j++) tile_rest(y[j], work + r * k, b[j], n - r, k);
    }
  }
}
