// The product itself: panels of rows (converted once for all the columns of a chunk) times groups of columns. gemm.h
// says how.
#include "r16/gemm.h"
#include "r16/vec.h"

enum {
  PANELS = 128 / TILE_ROWS,     // tiles of rows at a time: they stay in the L2 cache, and columns are read once for all
  GROUPS = (512 + NT - 1) / NT, // groups of columns at a time, at most: their sums stay in the L2 cache
  CHUNKS = 8                    // per thread: what evens out threads that are interrupted
};

#define UNROLL _Pragma("GCC unroll 16")

#if VF_N == 16
PG_INLINE vi zero(void) { return _mm512_setzero_si512(); }
PG_INLINE vi pair(const int16_t *p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return _mm512_set1_epi32(v);
}
PG_INLINE vi dot_pairs(vi sum, vi a, vi b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
PG_INLINE void vi_store(void *p, vi a) { _mm512_storeu_si512(p, a); }
PG_INLINE vf vf_load_i32(const void *p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }
#else
PG_INLINE vi zero(void) { return _mm256_setzero_si256(); }
PG_INLINE vi pair(const int16_t *p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return _mm256_set1_epi32(v);
}
PG_INLINE vi dot_pairs(vi sum, vi a, vi b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
PG_INLINE void vi_store(void *p, vi a) { _mm256_storeu_si256((__m256i *)p, a); }
PG_INLINE vf vf_load_i32(const void *p) { return _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)p)); }
#endif

typedef int32_t sums[NT][TILE_ROWS];

// A panel times nt columns, over a strip.
PG_INLINE void tile(int nt, const r16_panel *w, const int16_t *x, int64_t pairs, sums to) {
  vi sum[NT][2];
  UNROLL for (int j = 0; j < nt; j++) sum[j][0] = sum[j][1] = zero();
  for (int64_t i = 0; i < pairs; i++, x += 2 * nt) {
    const vi w0 = vi_load(w->ints[i][0]), w1 = vi_load(w->ints[i][VF_N]);
    UNROLL for (int j = 0; j < nt; j++) {
      const vi b = pair(x + 2 * j);
      sum[j][0] = dot_pairs(sum[j][0], w0, b);
      sum[j][1] = dot_pairs(sum[j][1], w1, b);
    }
  }
  UNROLL for (int j = 0; j < nt; j++) {
    vi_store(to[j], sum[j][0]);
    vi_store(to[j] + VF_N, sum[j][1]);
  }
}

// Functions of their own: inlined into a larger one the sums would not stay in registers.
#define TILE(nt)                                                                                                       \
  static __attribute__((noinline)) void tile_##nt(const r16_panel *w, const int16_t *x, int64_t pairs, sums to) {      \
    tile(nt, w, x, pairs, to);                                                                                         \
  }
TILE(4)
#if VF_N == 16
TILE(8)
TILE(12)
#endif

static void tile_of_width(int width, const r16_panel *w, const int16_t *x, int64_t pairs, sums to) {
  switch (width) {
#if VF_N == 16
  case 12:
    tile_12(w, x, pairs, to);
    break;
  case 8:
    tile_8(w, x, pairs, to);
    break;
#endif
  default:
    tile_4(w, x, pairs, to);
  }
}

// What a tile's sums add up to strip by strip; they only reach y at the end, whose rows share cache sets as a rule.
typedef float totals[NT][TILE_ROWS];

// y and other: where tile 0 of the columns goes.
PG_INLINE void put_sums(sums from, totals total, const r16_panel *w, const float *x_steps, const r16_product *p,
                        float *const *y, const float *const *other, int64_t cols, int64_t tile, int first, int last) {
  const int64_t at = tile * TILE_ROWS, rows = PG_MIN(TILE_ROWS, p->m - at);
  const int direct = last && rows == TILE_ROWS && p->store == R16_STORE;
  for (int64_t j = 0; j < cols; j++) {
    float *to = direct ? y[j] + at : total[j];
    for (int i = 0; i < TILE_ROWS; i += VF_N) {
      const vf step = vf_mul(vf_load(w->steps + i), vf_set1(x_steps[j])), v = vf_load_i32(from[j] + i);
      vf_store(to + i, first ? vf_mul(v, step) : vf_fma(v, step, vf_load(total[j] + i)));
    }
    if (last && p->store != R16_STORE) {
      r16_put(p->store, y[j] + at, total[j], other[j] + at, rows);
    } else if (last && rows < TILE_ROWS) {
      memcpy(y[j] + at, total[j], rows * sizeof *to);
    }
  }
}

// One chunk: tiles of rows first .. last times groups of columns. `work`: totals of each group and tile.
static void chunk(const r16_product *p, const r16_columns *c, pg_range tiles, pg_range groups, totals *work) {
  r16_panel panels[PANELS];
  float *y[GROUPS * NT];
  const float *other[GROUPS * NT];
  const int64_t j0 = groups.first * NT;
  for (int64_t j = j0; j < PG_MIN(groups.last * NT, p->n_cols); j++) {
    int64_t b_col;
    y[j - j0] = r16_result(p, j, &b_col);
    other[j - j0] = p->store == R16_STORE ? NULL : r16_other(p, j);
  }
  for (int64_t s = 0; s < c->n_strips; s++) {
    const int64_t k0 = s * c->strip, pairs = PG_MIN(c->strip, p->k - k0) / 2;
    const int last = s + 1 == c->n_strips;
    totals *total = work;
    for (int64_t r = tiles.first; r < tiles.last; r++)
      (p->row_bytes ? PG_FN(r16_put_panel_of_floats) : PG_FN(r16_put_panel))(&panels[r - tiles.first], p, r, s);
    for (int64_t g = groups.first; g < groups.last; g++) {
      const int width = r16_group_width(c, g);
      const int64_t at = g * NT - j0, cols = PG_MIN(width, p->n_cols - g * NT);
      const int16_t *x = c->ints + g * NT * c->k + k0 * width;
      for (int64_t r = tiles.first; r < tiles.last; r++, total++) {
        const r16_panel *w = &panels[r - tiles.first];
        sums to;
        for (int64_t j = at; j < at + cols && last; j++) {
          __builtin_prefetch(y[j] + r * TILE_ROWS, 1);
          __builtin_prefetch(y[j] + r * TILE_ROWS + TILE_ROWS - 1, 1);
        }
        tile_of_width(width, w, x, pairs, to);
        put_sums(to, *total, w, c->steps + (g * c->n_strips + s) * NT, p, y + at, other + at, cols, r, s == 0, last);
      }
    }
  }
}

// Scratch: the columns, then totals of each thread.
PG_INLINE int64_t columns_bytes(const r16_product *p) {
  return (r16_column_bytes_of(p->k, p->n_cols, r16_strip(p)).all + 63) / 64 * 64;
}

int64_t PG_FN(r16_gemm_work)(const r16_product *p, int nth) {
  return columns_bytes(p) + nth * PG_MIN(GROUPS, (p->n_cols + NT - 1) / NT) * PANELS * (int64_t)sizeof(totals);
}

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void PG_FN(r16_gemm_columns)(const r16_product *p, r16_queue *q, char *work) {
  const r16_columns c = r16_columns_in(work, p);
  for (int64_t i = r16_take(q, c.n_groups, -1); i >= 0; i = r16_take(q, c.n_groups, i))
    PG_FN(r16_put_columns)(&c, p, i);
  pg_sync(q->t, q->nth);
}

void PG_FN(r16_gemm)(const r16_product *p, int n_p, r16_queue *q, char *work, int ith) {
  const r16_columns c = r16_columns_in(work, p);
  const int64_t n_groups = c.n_groups, n_tiles = ceil_div(p->m, TILE_ROWS);
  // As many columns in a chunk as may be, so that panels are converted less often, unless there are too few rows to
  // share.
  totals *total = (totals *)(work + columns_bytes(p)) + ith * PG_MIN(GROUPS, n_groups) * PANELS;
  const int64_t n_panels = ceil_div(n_tiles, PANELS), wanted = q->nth == 1 ? 1 : CHUNKS * q->nth;
  const int64_t parts = PG_MAX(ceil_div(wanted, n_panels), ceil_div(n_groups, GROUPS));
  const int64_t per = ceil_div(n_groups, PG_MIN(n_groups, parts)), n_parts = ceil_div(n_groups, per);
  for (int64_t i = r16_take(q, n_panels * n_parts, -1); i >= 0; i = r16_take(q, n_panels * n_parts, i)) {
    const int64_t t = i / n_parts * PANELS, g = i % n_parts * per;
    const pg_range tiles = {t, PG_MIN(t + PANELS, n_tiles)}, groups = {g, PG_MIN(g + per, n_groups)};
    for (int j = 0; j < n_p; j++) chunk(p + j, &c, tiles, groups, total);
  }
}
