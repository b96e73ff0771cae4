// A product with many columns: rows are converted to f32 once, and laid out so that the lanes of a vector are rows.
// Each element of a column is multiplied with all lanes, so no sum runs across lanes, and short rows cost no more per
// element than long ones.
#include "formats/storage.h"
#include "simd/lanes.h"
#include "products/product.h"
#include "simd/rows.h"
#include "simd/units.h"

enum {
  KC = 512, // elements of a row at a time: a multiple of every block size
  NR = VF_N == 16  ? 12
       : VF_N == 8 ? 6
                   : 4, // columns at a time: with two vectors of rows, as many as fit the registers
  TILE_ROWS = 2 * VF_N,
  MB = PG_MANY_ROWS, // rows converted at a time: half a MiB at most, for the L2 cache
  LD = KC + 16       // stride of columns: off the powers of two, which share cache sets
};
_Static_assert(MB % TILE_ROWS == 0 && TILE_ROWS % 4 == 0, "tiles must fit");

#define UNROLL _Pragma("GCC unroll 16")

typedef float sums[NR][TILE_ROWS];

// Rows a[i][0..TILE_ROWS), i < k, times nr columns of b, LD apart.
PG_INLINE void tile(int nr, const float *a, const float *b, int64_t k, sums to) {
  vf acc[NR][2];
  UNROLL for (int j = 0; j < nr; j++) acc[j][0] = acc[j][1] = vf_zero();
  for (int64_t i = 0; i < k; i++, a += TILE_ROWS) {
    const vf a0 = vf_load(a), a1 = vf_load(a + VF_N);
    UNROLL for (int j = 0; j < nr; j++) {
      const vf x = vf_set1(b[j * LD + i]);
      acc[j][0] = vf_fma(a0, x, acc[j][0]);
      acc[j][1] = vf_fma(a1, x, acc[j][1]);
    }
  }
  UNROLL for (int j = 0; j < nr; j++) {
    vf_store(to[j], acc[j][0]);
    vf_store(to[j] + VF_N, acc[j][1]);
  }
}

// Not inlined: in a larger function the sums would not stay in registers.
static __attribute__((noinline)) void tile_all(const float *a, const float *b, int64_t k, sums to) {
  tile(NR, a, b, k, to);
}
static __attribute__((noinline)) void tile_half(const float *a, const float *b, int64_t k, sums to) {
  tile(NR / 2, a, b, k, to);
}

// y[j][0..rows) = or += the sums.
PG_INLINE void put_sums(sums from, float *const *y, int64_t cols, int64_t rows, int add) {
  for (int64_t j = 0; j < cols; j++) {
    if (rows == TILE_ROWS) {
      for (int i = 0; i < TILE_ROWS; i += VF_N) {
        const vf v = vf_load(from[j] + i);
        vf_store(y[j] + i, add ? vf_add(vf_load(y[j] + i), v) : v);
      }
    } else {
      for (int64_t i = 0; i < rows; i++) y[j][i] = add ? y[j][i] + from[j][i] : from[j][i];
    }
  }
}

// Write elements k0 .. k0 + kc of rows first .. first + n as tiles of [kc][TILE_ROWS]; missing rows of the last tile
// are zeros.
static void put_rows(const pg_product *p, int64_t first, int64_t n, int64_t k0, int64_t kc, float *to) {
  const pg_to_f32 to_f32 = PG_FN(to_f32)(p->a->type);
  const int64_t at = k0 / pg_block_size(p->a->type) * p->a->nb[0];
  for (int64_t r = 0; r < (n + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; r += 4) {
    float four[4][KC];
    for (int64_t i = 0; i < 4; i++) {
      if (r + i < n) {
        to_f32(p->a_rows + (first + r + i) * p->a->nb[1] + at, four[i], kc);
      } else {
        memset(four[i], 0, sizeof four[i]);
      }
    }
    pg_rows_to_lanes(to + r / TILE_ROWS * TILE_ROWS * kc + r % TILE_ROWS, TILE_ROWS, four[0], KC, kc);
  }
}

// Find n columns and the places of their results. Elements from k0 on are prefetched into the L2 cache, because the
// hardware would begin anew in each column.
PG_INLINE void find_columns(const pg_product *p, int64_t first, int64_t n, int64_t k0, const char **cols, float **y) {
  const int64_t nb = p->b->nb[0], bytes = PG_MIN(KC, p->a->ne[0] - k0) * nb;
  for (int64_t j = 0; j < n; j++) {
    cols[j] = pg_column(p, first + j, &y[j]);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(cols[j] + k0 * nb + i, 0, 2);
  }
}

int64_t PG_FN(product_many_work)(void) { return (MB * KC + NR * LD) * 4; }

void PG_FN(product_many)(const pg_product *p, pg_part part, float *work) {
  const int64_t k = p->a->ne[0];
  float *a = work, *b = work + MB * KC;
  for (int64_t r0 = part.rows.first; r0 < part.rows.last; r0 += MB) {
    const int64_t mb = PG_MIN(MB, part.rows.last - r0);
    for (int64_t k0 = 0; k0 < k; k0 += KC) {
      const int64_t kc = PG_MIN(KC, k - k0);
      put_rows(p, r0, mb, k0, kc, a);
      const char *next[NR];
      float *y[NR], *next_y[NR];
      for (int64_t c = part.cols.first; c < part.cols.last; c += NR) {
        const int64_t nr = PG_MIN(NR, part.cols.last - c);
        if (c == part.cols.first) find_columns(p, c, nr, k0, next, next_y);
        for (int64_t j = 0; j < nr; j++) {
          pg_get_f32(b + j * LD, p->b, next[j], k0, kc);
          y[j] = next_y[j] + r0;
        }
        find_columns(p, c + NR, PG_MIN(NR, part.cols.last - c - NR), k0, next, next_y);
        for (int64_t r = 0; r < mb; r += TILE_ROWS) {
          sums to;
          for (int64_t j = 0; j < nr; j++)
            for (int64_t i = 0; i < TILE_ROWS; i += 16) __builtin_prefetch(y[j] + i, 1);
          (nr > NR / 2 ? tile_all : tile_half)(a + r * kc, b, kc, to);
          put_sums(to, y, nr, PG_MIN(TILE_ROWS, mb - r), k0 > 0);
          for (int64_t j = 0; j < nr; j++) y[j] += TILE_ROWS;
        }
      }
    }
  }
}
