// A repacked matrix times few columns. Memory is the limit, so each byte of the matrix is read once, in order, with
// prefetch. r16.h has the layout, sums.h the order of the sums.
#include "products/r16/dot.h"

enum {
  STRIP = 1024, // elements of stored rows that are repacked at a time, whole runs: they stay in the L1 cache
  AHEAD = 8192, // bytes of prefetch ...
  NEAR = 2560   // ... and on AMD's CPUs for two to four columns, when their own prefetchers do most of it
};

// How many bytes ahead prefetch goes.
PG_INLINE int64_t ahead_of(int64_t nc) { return pg_cpu_is_amd && nc > 1 && nc <= 4 ? NEAR : AHEAD; }

// Prefetch `bytes` from p on. For one column on AMD's CPUs it goes into the L2 cache, which can wait for more lines at
// once than L1 (docs/products.md). Heads are prefetched, too, because every line left out would be waited for.
PG_INLINE void prefetch(int nc, const uint8_t *p, int bytes) {
  if (nc == 1 && pg_cpu_is_amd) {
    _Pragma("GCC unroll 16") for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
  } else {
    _Pragma("GCC unroll 16") for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
  }
}

PG_INLINE void dot(r16_format f, int nc, const uint8_t *unit, blocks x, dots *t) {
  if (nc == 1 && f.codes == R16_BYTES) { // memory is the limit: the first part prefetches all lines early
    EACH(PARTS, i) dot_parts(f, nc, r16_quartet, unit, i, 1, x, t);
  } else {
    dot_parts(f, nc, r16_quartet, unit, 0, PARTS, x, t);
  }
}

// One unit of 16 rows, of a block with these heads.
PG_INLINE void add_unit(r16_format f, int nc, const r16_head *h, const uint8_t *unit, blocks x, r16_sums (*s)[NC]) {
  dots t[NC];
  dot(f, nc, unit, x, t);
  EACH(PARTS, i) {
    const r16_unit_scales of = r16_scales_of(f, h[i], unit + r16_lines(f) * R16_LINE + i * VF_N);
    add_unit_of(f, nc, &of, i, t, x, s[i]);
  }
}

// y[c][0..16) = a group of 16 rows times nc columns; with `add`, added to what y holds. `ahead`: ahead_of, or 0 for a
// strip, which is in the L1 cache and needs no prefetch.
PG_INLINE void group(r16_format f, int nc, const uint8_t *w, int64_t n_blocks, blocks x0, float *const *y,
                     int64_t ahead, int add) {
  const int head = r16_head_bytes(f), unit_bytes = r16_unit_bytes(f), asks = nc > 1 || ahead, per = r16_sum_units(f);
  vf total[PARTS][NC];
  const r16_x *x[NC];
  EACH(nc, c) {
    x[c] = x0[c];
    EACH(PARTS, i) total[i][c] = add ? vf_load(y[c] + i * VF_N) : vf_zero();
  }
  r16_sums s[PARTS][NC];
  EACH(PARTS, i)
  EACH(nc, c) s[i][c] = (r16_sums){vi_zero(), vf_zero()};
  for (int64_t b = 1; b <= n_blocks; b++, w += head + f.units * unit_bytes) {
    __asm__("" : "+r"(w));
    if (asks && f.units > 1) prefetch(nc, w + ahead, head);
    r16_head h[PARTS];
    EACH(PARTS, i) h[i] = r16_head_at(f, w, i);
    for (int first = 0; first < f.units; first += per) {
      for (int u = first; u < first + per; u++) {
        const uint8_t *unit = w + head + u * unit_bytes;
        if (asks) prefetch(nc, unit + ahead, f.units == 1 ? head + unit_bytes : unit_bytes);
        add_unit(f, nc, h, unit, x, s);
        __asm__ volatile("" ::: "memory"); // loading x again is cheaper than keeping it in memory of its own
        EACH(nc, c) {
          x[c]++;
          if (nc < 4) __asm__("" : "+r"(x[c])); // one address, and no address of each dword
        }
      }
      EACH(PARTS, i) {
        const r16_head of = r16_head_at(f, w, i); // again, rather than in registers
        EACH(nc, c) r16_end_sum(f, &s[i][c], of);
      }
    }
    if (b % (R16_RUN_UNITS / f.units) && b < n_blocks) continue;
    EACH(PARTS, i) EACH(nc, c) {
      total[i][c] = r16_end_run(total[i][c], s[i][c], x[c][-1].d);
      s[i][c] = (r16_sums){vi_zero(), vf_zero()};
    }
  }
  EACH(nc, c) EACH(PARTS, i) vf_store(y[c] + i * VF_N, total[i][c]);
}

typedef void (*group_fn)(const uint8_t *w, int64_t n_blocks, blocks x, float *const *y, int64_t ahead, int add);

#define GROUP(name, nc)                                                                                                \
  static void group_##name##_##nc(const uint8_t *w, int64_t n_blocks, blocks x, float *const *y, int64_t ahead,        \
                                  int add) {                                                                           \
    group(r16_##name, nc, w, n_blocks, x, y, ahead, add);                                                              \
  }
#if defined(__AVX512VNNI__)
#define COLUMNS(X, name) X(name, 1) X(name, 2) X(name, 3) X(name, 4) X(name, 5) X(name, 6) X(name, 7) X(name, 8)
#elif R16_WORDS
#define COLUMNS(X, name) X(name, 1) X(name, 2) X(name, 3) X(name, 4)
#else
#define COLUMNS(X, name) X(name, 1) X(name, 2) X(name, 3) X(name, 4) X(name, 5)
#endif
#define NAME(name, nc) group_##name##_##nc,
#define X(name, ...) COLUMNS(GROUP, name) static const group_fn groups_##name[NC] = {COLUMNS(NAME, name)};
R16_FORMATS(X)
#undef X

#define X(name, ...) [PG_##name] = groups_##name,
static const group_fn *const groups_of[] = {R16_FORMATS(X)};
#undef X

// Some columns of a product, and the places of their results.
typedef struct columns {
  int64_t n;
  const r16_x *x[NC];
  float *y[NC];
} columns;

// The columns from `first` on that one pass multiplies, before `last`: passes have similar numbers of columns.
static columns columns_of(const r16_product *p, const r16_x *x, int64_t first, int64_t last) {
  const int64_t left = last - first, passes = (left + NC - 1) / NC;
  columns s = {.n = (left + passes - 1) / passes};
  for (int64_t j = 0; j < s.n; j++) {
    int64_t b_col;
    s.y[j] = r16_result(p, first + j, &b_col);
    s.x[j] = x + b_col * (p->k / R16_UNIT);
  }
  return s;
}

// Group g of 16 rows times columns. From the second pass on, the group comes from a cache.
static void group_of(const r16_product *p, const r16_x *x, int64_t g, pg_range cols) {
  const int64_t row = g * R16_ROWS, rows = PG_MIN(R16_ROWS, p->m - row);
  const uint8_t *w = r16_group_at(p, g, 0, p->k, NULL);
  for (int64_t c = cols.first, nc; c < cols.last; c += nc) {
    const columns s = columns_of(p, x, c, cols.last);
    nc = s.n;
    float *to[NC], products[NC][R16_ROWS];
    const int in_place = rows == R16_ROWS && r16_is_plain(p);
    for (int64_t j = 0; j < s.n; j++) to[j] = in_place ? s.y[j] + row : products[j];
    groups_of[p->f.type][s.n - 1](w, p->k / R16_UNIT / p->f.units, s.x, to, ahead_of(s.n), 0);
    for (int64_t j = 0; j < s.n && !in_place; j++) r16_put(p, s.y[j], products[j], r16_other(p, c + j), row, rows);
  }
}

// The same for rows as they are stored, with the same bits. For few columns, codes go from registers into products; for
// more columns, a strip is repacked once for all.
static void stored_group_of(const r16_product *p, const r16_x *x, int64_t g, pg_range cols) {
  const int64_t row = g * R16_ROWS, rows = PG_MIN(R16_ROWS, p->m - row);
  _Alignas(64) uint8_t own[STRIP / R16_UNIT * R16_UNIT_MAX];
  float products[R16_GEMV_MAX][R16_ROWS];
  const int64_t n_cols = cols.last - cols.first;
  if (n_cols <= r16_taken(p->f) && rows == R16_ROWS) {
    const columns s = columns_of(p, x, cols.first, cols.last);
    float *to[NC];
    for (int64_t j = 0; j < s.n; j++) to[j] = products[j];
    PG_FN(r16_multiply_stored)(p, g, (int)s.n, s.x, to);
  } else {
    for (int64_t k = 0, n; k < p->k; k += n) {
      n = PG_MIN(STRIP, p->k - k);
      const uint8_t *w = r16_group_at(p, g, k, n, own);
      for (int64_t c = 0, nc; c < n_cols; c += nc) {
        columns s = columns_of(p, x, cols.first + c, cols.last);
        nc = s.n;
        float *to[NC];
        for (int64_t j = 0; j < s.n; j++) {
          to[j] = products[c + j];
          s.x[j] += k / R16_UNIT;
        }
        groups_of[p->f.type][s.n - 1](w, n / R16_UNIT / p->f.units, s.x, to, 0, k > 0);
      }
    }
  }
  for (int64_t c = 0; c < n_cols; c++) {
    int64_t b_col;
    float *y = r16_result(p, cols.first + c, &b_col);
    r16_put(p, y, products[c], r16_other(p, cols.first + c), row, rows);
  }
}

// This thread's next chunk of rows (`last`: its previous one, -1 at first); -1: all are taken. Threads that stay on
// memory nodes begin with the large chunk that is theirs: its pages are near (backends/cpu/repack.py).
PG_INLINE int64_t take_rows(r16_queue *q, const pg_deal *d, int64_t last) {
  if (!q->t->plan->at_home) return r16_take(q, d->n_chunks, last);
  if (last < 0 && q->ith < d->n_large) return q->ith;
  const int64_t i = r16_take(q, d->n_chunks - d->n_large, last - d->n_large);
  return i < 0 ? -1 : d->n_large + i;
}

void PG_FN(r16_gemv)(const r16_product *p, int n_p, const r16_x *x, r16_queue *q) {
  const pg_deal d = pg_deal_of((p->m + R16_ROWS - 1) / R16_ROWS, q->nth);
  for (int64_t i = take_rows(q, &d, -1); i >= 0; i = take_rows(q, &d, i)) {
    const pg_range r = pg_chunk_of(&d, i);
    for (int64_t c = 0; c < p->n_cols; c += R16_GEMV_MAX) { // a chunk's rows stay in a cache until all have met them
      const pg_range cols = {c, PG_MIN(c + R16_GEMV_MAX, p->n_cols)};
      for (int j = 0; j < n_p; j++) // one product after the other: memory is slower when two streams take turns
        for (int64_t g = r.first; g < r.last; g++) (p->row_bytes ? stored_group_of : group_of)(p + j, x, g, cols);
    }
  }
}
