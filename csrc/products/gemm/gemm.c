// Multiply a matrix with many columns, as gemm.h describes: panels of rows, converted once for all columns of a chunk,
// times groups of columns.
#include "products/gemm/gemm.h"

enum {
  GROUPS = (512 + NT - 1) / NT, // groups of columns at a time, at most: their sums stay in the L2 cache
  CHUNKS = 8,                   // per thread, at least
  HALVES = 2                    // of a column: each is converted as a share of its own
};

// Memory of one thread.
typedef struct scratch {
  r16_panel panels[R16_PANELS];
  r16_totals totals[]; // of each group and tile of a chunk; not in y, whose columns often share cache sets
} scratch;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t columns_bytes(const r16_product *p) { return pg_plus(PG_FN(r16_columns_bytes)(p), 63) / 64 * 64; }

static int64_t scratch_bytes(const r16_product *p) {
  return (int64_t)sizeof(scratch) + PG_MIN(GROUPS, ceil_div(p->n_cols, NT)) * R16_TILES * (int64_t)sizeof(r16_totals);
}

int64_t PG_FN(r16_gemm_work)(const r16_product *p, int nth) {
  return pg_plus(columns_bytes(p), pg_times(nth, scratch_bytes(p)));
}

// The places of the results of a group of columns.
typedef struct results {
  int64_t n, ld; // columns; floats from one to the next, 0 when they are not evenly spaced
  float *y[NT];
  const float *other[NT];
} results;

static results results_of(const r16_product *p, int64_t first, int64_t n) {
  results s = {.n = n};
  for (int64_t j = 0; j < n; j++) {
    int64_t b_col;
    s.y[j] = r16_result(p, first + j, &b_col);
    s.other[j] = r16_other(p, first + j);
    const int64_t ld = (s.y[j] - s.y[0]) / PG_MAX(1, j);
    if (j == 1 || s.y[j] - s.y[0] != j * s.ld) s.ld = j == 1 ? ld : 0;
  }
  return s;
}

// Strip s of a tile of rows times a group of columns.
PG_INLINE void multiply(const r16_product *p, const r16_columns *c, int64_t tile, int64_t g, int64_t s,
                        const results *to, r16_panel *panel, r16_totals *total) {
  const int last = s + 1 == c->n_strips;
  const int64_t at = tile * TILE_ROWS, rows = PG_MIN(TILE_ROWS, p->m - at);
  const int direct = last && to->ld && to->n >= R16_WHOLE && rows == TILE_ROWS && r16_is_plain(p);
  for (int64_t j = 0; j < to->n && last && !direct; j++) {
    __builtin_prefetch(to->y[j] + at, 1);
    __builtin_prefetch(to->y[j] + at + TILE_ROWS - 1, 1);
  }
  PG_FN(r16_multiply)
  (direct ? to->y[0] + at : **total, direct ? to->ld : TILE_ROWS, s ? *total : NULL, panel, c, p, g, s);
  for (int64_t j = 0; j < to->n && last && !direct; j++) {
    if (r16_is_plain(p)) {
      memcpy(to->y[j] + at, (*total)[j], rows * sizeof(float));
    } else {
      r16_put(p, to->y[j], (*total)[j], to->other[j], at, rows);
    }
  }
}

// One chunk: tiles of rows first .. last times groups of columns.
static void chunk(const r16_product *p, const r16_columns *c, pg_range tiles, pg_range groups, scratch *work) {
  results to[GROUPS];
  for (int64_t g = groups.first; g < groups.last; g++)
    to[g - groups.first] = results_of(p, r16_first_column(c, g), r16_group_columns(c, g));
  for (int64_t s = 0; s < c->n_strips; s++) {
    for (int64_t r0 = tiles.first; r0 < tiles.last; r0 += R16_PANELS) {
      const int64_t end = PG_MIN(r0 + R16_PANELS, tiles.last);
      for (int64_t r = r0; r < end; r++) PG_FN(r16_put_panel)(&work->panels[r - r0], p, r, s);
      for (int64_t g = groups.first; g < groups.last; g++) {
        const int64_t nth = g - groups.first;
        for (int64_t r = r0; r < end; r++)
          multiply(p, c, r, g, s, &to[nth], &work->panels[r - r0], &work->totals[nth * R16_TILES + r - tiles.first]);
      }
    }
  }
}

void PG_FN(r16_gemm_columns)(const r16_product *p, r16_queue *q, char *work) {
  const r16_columns c = r16_columns_in(work, p);
  // A group is more than one share: when there is only one group, other threads would have to wait.
  const int64_t n = c.n_groups * R16_QUADS * HALVES;
  for (int64_t i = r16_take(q, n, -1); i >= 0; i = r16_take(q, n, i)) {
    const int64_t quad = i / HALVES, half = i % HALVES;
    PG_FN(r16_put_columns)
    (&c, p,
     (r16_share){.group = quad / R16_QUADS,
                 .column = quad % R16_QUADS * R16_QUAD,
                 .first = c.n_strips * half / HALVES,
                 .last = c.n_strips * (half + 1) / HALVES});
  }
  pg_sync(q->t, q->nth);
}

void PG_FN(r16_gemm)(const r16_product *p, int n_p, r16_queue *q, char *work, int ith) {
  const r16_columns c = r16_columns_in(work, p);
  const int64_t n_groups = c.n_groups, n_tiles = ceil_div(p->m, TILE_ROWS);
  // As many columns in a chunk as may be, so that panels are converted less often, unless there are too few rows to
  // share.
  scratch *own = (scratch *)(work + columns_bytes(p) + ith * scratch_bytes(p));
  const pg_deal d = pg_deal_of(n_tiles, q->nth);
  const int64_t wanted = q->nth == 1 ? 1 : CHUNKS * q->nth;
  const int64_t parts = PG_MAX(ceil_div(wanted, n_tiles), ceil_div(n_groups, GROUPS));
  const int64_t per = ceil_div(n_groups, PG_MIN(n_groups, parts)), n_parts = ceil_div(n_groups, per);
  r16_begin();
  for (int64_t i = r16_take(q, d.n_chunks * n_parts, -1); i >= 0; i = r16_take(q, d.n_chunks * n_parts, i)) {
    const int64_t g = i % n_parts * per;
    const pg_range all = pg_chunk_of(&d, i / n_parts), groups = {g, PG_MIN(g + per, n_groups)};
    for (int64_t t = all.first; t < all.last; t += R16_TILES) {
      const pg_range tiles = {t, PG_MIN(t + R16_TILES, all.last)};
      for (int j = 0; j < n_p; j++) chunk(p + j, &c, tiles, groups, own);
    }
  }
  r16_end();
}
