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
  r16_panel *panels;
  r16_totals *totals; // of each group and tile of a chunk; not in y, whose columns often share cache sets
  float *own;         // of products across rows
} scratch;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t columns_bytes(const r16_product *p) {
  return pg_plus(R16_NUMBERS_FN(r16_columns_bytes)(p), 63) / 64 * 64;
}

// Panels that are converted at a time.
static int64_t panels_of(const r16_product *p) { return p->across ? R16_TILES : R16_PANELS; }
static int64_t n_totals(const r16_product *p) { return PG_MIN(GROUPS, ceil_div(p->n_cols, NT)) * R16_TILES; }

static int64_t scratch_bytes(const r16_product *p) {
  return panels_of(p) * (int64_t)sizeof(r16_panel) + n_totals(p) * (int64_t)sizeof(r16_totals) +
         (p->across ? R16_OWN * (int64_t)sizeof(float) : 0);
}

static scratch scratch_at(char *at, const r16_product *p) {
  r16_panel *panels = (r16_panel *)at;
  r16_totals *totals = (r16_totals *)(panels + panels_of(p));
  return (scratch){panels, totals, (float *)(totals + n_totals(p))};
}

int64_t R16_NUMBERS_FN(r16_gemm_work)(const r16_product *p, int nth) {
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
  R16_NUMBERS_FN(r16_multiply)
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
static void chunk(const r16_product *p, const r16_columns *c, pg_range tiles, pg_range groups, const scratch *work) {
  results to[GROUPS];
  for (int64_t g = groups.first; g < groups.last; g++)
    to[g - groups.first] = results_of(p, r16_first_column(c, g), r16_group_columns(c, g));
#define MULTIPLY(r, g)                                                                                                 \
  multiply(p, c, r, g, s, &to[(g)-groups.first], &work->panels[(r)-r0],                                                \
           &work->totals[((g)-groups.first) * R16_TILES + (r)-tiles.first])
  for (int64_t s = 0; s < c->n_strips; s++) {
#if defined(R16_ACROSS_ROWS)
    if (p->across) {
      const int64_t r0 = tiles.first;
      R16_NUMBERS_FN(r16_put_across)(work->panels, p, tiles, s, work->own);
      for (int64_t r = r0; r < tiles.last; r++)
        for (int64_t g = groups.first; g < groups.last; g++) MULTIPLY(r, g);
      continue;
    }
#endif
    for (int64_t r0 = tiles.first; r0 < tiles.last; r0 += R16_PANELS) {
      const int64_t end = PG_MIN(r0 + R16_PANELS, tiles.last);
      for (int64_t r = r0; r < end; r++) R16_NUMBERS_FN(r16_put_panel)(&work->panels[r - r0], p, r, s);
      for (int64_t g = groups.first; g < groups.last; g++)
        for (int64_t r = r0; r < end; r++) MULTIPLY(r, g);
    }
  }
#undef MULTIPLY
}

void R16_NUMBERS_FN(r16_gemm_columns)(const r16_product *p, r16_queue *q, char *work) {
  const r16_columns c = r16_columns_in(work, p);
  // A group is more than one share: when there is only one group, other threads would have to wait.
  const int64_t n = c.n_groups * R16_QUADS * HALVES;
  for (int64_t i = r16_take(q, n, -1); i >= 0; i = r16_take(q, n, i)) {
    const int64_t quad = i / HALVES, half = i % HALVES;
    R16_NUMBERS_FN(r16_put_columns)
    (&c, p,
     (r16_share){.group = quad / R16_QUADS,
                 .column = quad % R16_QUADS * R16_QUAD,
                 .first = c.n_strips * half / HALVES,
                 .last = c.n_strips * (half + 1) / HALVES});
  }
  pg_sync(q->t, q->nth);
}

void R16_NUMBERS_FN(r16_gemm)(const r16_product *p, int n_p, r16_queue *q, char *work, int ith) {
  const r16_columns c = r16_columns_in(work, p);
  const int64_t n_groups = c.n_groups, n_tiles = ceil_div(p->m, TILE_ROWS), unit = p->across ? R16_TILES : 1;
  // As many columns in a chunk as may be, so that panels are converted less often, unless there are too few rows to
  // share.
  const scratch own = scratch_at(work + columns_bytes(p) + ith * scratch_bytes(p), p);
  const pg_deal d = pg_deal_of(ceil_div(n_tiles, unit), q->nth);
  const int64_t wanted = q->nth == 1 ? 1 : CHUNKS * q->nth;
  const int64_t parts = PG_MAX(ceil_div(wanted, ceil_div(n_tiles, unit)), ceil_div(n_groups, GROUPS));
  const int64_t per = ceil_div(n_groups, PG_MIN(n_groups, parts)), n_parts = ceil_div(n_groups, per);
  for (int64_t i = r16_take(q, d.n_chunks * n_parts, -1); i >= 0; i = r16_take(q, d.n_chunks * n_parts, i)) {
    const int64_t g = i % n_parts * per;
    const pg_range all = pg_chunk_of(&d, i / n_parts), groups = {g, PG_MIN(g + per, n_groups)};
    const int64_t end = PG_MIN(all.last * unit, n_tiles);
    for (int64_t t = all.first * unit; t < end; t += R16_TILES) {
      const pg_range tiles = {t, PG_MIN(t + R16_TILES, end)};
      for (int j = 0; j < n_p; j++) {
        R16_BEGIN(p + j);
        chunk(p + j, &c, tiles, groups, &own);
      }
    }
  }
  R16_END();
}
