// cpy, cont, dup, cast: move the elements of src[0], in ne order, into dst, and convert them. Both have equally many
// elements; shapes may differ, and strides are any. One function moves strided runs; the others decide which runs.
#include "formats/storage.h"
#include "simd/convert.h"
#include "simd/units.h"

enum {
  STRIP = 256,  // elements converted at a time: whole blocks of every block type
  PIECE = 4096, // elements of a long row that one thread takes at a time
  TILE = 32,    // rows and columns of a piece of a transposed copy
  MAX_TILE_UNIT = 8
};

// How to move a run of elements. Equal types move as units of `unit` bytes (a block is one unit); different types are
// converted through the type `between`. With a `limit`, floats are made finite: NaN becomes 0, others are clamped.
typedef struct mover {
  int64_t src, dst, between; // types
  int64_t unit;              // 0 when the types differ
  float limit;               // 0: none
} mover;

static int64_t size_between(const mover *m) { return m->between == PG_F32 ? 4 : 8; }

static void make_finite(float *x, int64_t n, float limit) {
  for (int64_t i = 0; i < n; i++) {
    const float c = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
    x[i] = c == c ? c : 0;
  }
}

static void move(const mover *m, char *pd, int64_t sd, const char *ps, int64_t ss, int64_t n) {
  if (m->unit) {
    pg_move_units(pd, sd, ps, ss, n, m->unit);
  } else if (m->src == m->between && ss == size_between(m) && !(m->limit > 0)) {
    pg_store_plain(ps, m->between, m->dst, pd, sd, n);
  } else if (m->dst == m->between && sd == size_between(m)) {
    pg_load_plain(pd, m->between, m->src, ps, ss, n);
    if (m->limit > 0) make_finite((float *)pd, n, m->limit);
  } else {
    double x[STRIP]; // or STRIP floats or integers
    for (int64_t k = 0; k < n; k += STRIP) {
      const int64_t c = PG_MIN(STRIP, n - k);
      pg_load_plain(x, m->between, m->src, ps + k * ss, ss, c);
      if (m->limit > 0) make_finite((float *)x, c, m->limit);
      pg_store_plain(x, m->between, m->dst, pd + k * sd, sd, c);
    }
  }
}

// -- the same shape, or one that a dense tensor can take ------------------------------------------------------------

// Elements and byte strides of both sides in four dimensions.
typedef struct grid {
  int64_t ne[4], d[4], s[4];
} grid;

static int is_dense(const pg_tensor *t, int64_t unit) {
  int64_t expected = unit;
  for (int i = 0; i < 4; i++) {
    if (t->ne[i] == 1) continue;
    if (t->nb[i] != expected) return 0;
    expected *= t->ne[i];
  }
  return 1;
}

static void dense_strides(int64_t *nb, const int64_t *ne, int64_t unit) {
  for (int i = 0; i < 4; i++) nb[i] = unit, unit *= ne[i];
}

// Describe both sides with one shape. Returns 0 when neither can take the other's shape.
static int common_shape(grid *g, const pg_tensor *dst, const pg_tensor *src, int64_t dst_unit, int64_t src_unit) {
  memcpy(g->ne, dst->ne, sizeof g->ne);
  memcpy(g->d, dst->nb, sizeof g->d);
  memcpy(g->s, src->nb, sizeof g->s);
  if (!memcmp(dst->ne, src->ne, sizeof g->ne)) return 1;
  if (is_dense(src, src_unit)) {
    dense_strides(g->s, g->ne, src_unit);
    return 1;
  }
  memcpy(g->ne, src->ne, sizeof g->ne);
  dense_strides(g->d, g->ne, dst_unit);
  return is_dense(dst, dst_unit);
}

static void swap_dims(grid *g, int i, int j) {
  int64_t *const rows[] = {g->ne, g->d, g->s};
  for (int k = 0; k < 3; k++) {
    const int64_t x = rows[k][i];
    rows[k][i] = rows[k][j], rows[k][j] = x;
  }
}

// Reorder the dimensions: ascending strides of the destination, dimensions of 1 last, neighbours merged when possible.
static void simplify(grid *g) {
  for (int i = 1; i < 4; i++)
    for (int j = i; j > 0 && g->ne[j] > 1 && (g->ne[j - 1] == 1 || g->d[j - 1] > g->d[j]); j--) swap_dims(g, j, j - 1);
  for (int i = 0; i < 3;) {
    if (g->ne[i + 1] > 1 && g->d[i + 1] == g->ne[i] * g->d[i] && g->s[i + 1] == g->ne[i] * g->s[i]) {
      g->ne[i] *= g->ne[i + 1];
      for (int j = i + 1; j < 3; j++) g->ne[j] = g->ne[j + 1], g->d[j] = g->d[j + 1], g->s[j] = g->s[j + 1];
      g->ne[3] = 1;
    } else {
      i++;
    }
  }
}

// Rows along dimension 0, long ones in pieces.
static void by_rows(const grid *g, const mover *m, char *dst, const char *src, int ith, int nth) {
  const int64_t n = g->ne[0], n_pieces = (n + PIECE - 1) / PIECE;
  const pg_range r = pg_share(n_pieces * g->ne[1] * g->ne[2] * g->ne[3], ith, nth);
  int64_t k = r.first % n_pieces, i1 = r.first / n_pieces % g->ne[1], i23 = r.first / n_pieces / g->ne[1];
  for (int64_t i = r.first; i < r.last; i++) {
    const int64_t i2 = i23 % g->ne[2], i3 = i23 / g->ne[2], c = PG_MIN(PIECE, n - k * PIECE);
    char *pd = dst + k * PIECE * g->d[0] + i1 * g->d[1] + i2 * g->d[2] + i3 * g->d[3];
    const char *ps = src + k * PIECE * g->s[0] + i1 * g->s[1] + i2 * g->s[2] + i3 * g->s[3];
    move(m, pd, g->d[0], ps, g->s[0], c);
    if (++k == n_pieces) {
      k = 0;
      if (++i1 == g->ne[1]) i1 = 0, i23++;
    }
  }
}

// For a source that is dense along dimension 1, and a destination along 0: read and write runs, transpose small tiles.
static void by_tiles(const grid *g, const mover *m, char *dst, const char *src, int ith, int nth) {
  const int64_t n = g->ne[0], n_cols = (g->ne[1] + TILE - 1) / TILE;
  const int64_t e = m->unit ? m->unit : size_between(m); // bytes of an element in the tile
  const mover in = {m->src, m->between, m->between, m->src == m->between && !(m->limit > 0) ? e : m->unit, m->limit};
  const mover out = {m->between, m->dst, m->between, m->dst == m->between ? e : m->unit, 0};
  const pg_range r = pg_share(n_cols * g->ne[2] * g->ne[3], ith, nth);
  char tile[TILE * TILE * MAX_TILE_UNIT] __attribute__((aligned(64))); // [TILE along 0][TILE along 1]
  for (int64_t i = r.first; i < r.last; i++) {
    const int64_t j = i % n_cols * TILE, i2 = i / n_cols % g->ne[2], i3 = i / n_cols / g->ne[2];
    const int64_t nj = PG_MIN(TILE, g->ne[1] - j);
    char *pd = dst + j * g->d[1] + i2 * g->d[2] + i3 * g->d[3];
    const char *ps = src + j * g->s[1] + i2 * g->s[2] + i3 * g->s[3];
    for (int64_t k = 0; k < n; k += TILE) {
      const int64_t nk = PG_MIN(TILE, n - k);
      for (int64_t a = 0; a < nk; a++) move(&in, tile + a * TILE * e, e, ps + (k + a) * g->s[0], g->s[1], nj);
      for (int64_t b = 0; b < nj; b++) move(&out, pd + b * g->d[1] + k * g->d[0], g->d[0], tile + b * e, TILE * e, nk);
    }
  }
}

// -- shapes that have nothing in common -----------------------------------------------------------------------------

// Element number k in ne order of a tensor, and how many elements its row still has from there.
static char *element(const pg_tensor *t, int64_t k, int64_t *left) {
  const int64_t i0 = k % t->ne[0];
  const pg_idx i = pg_unravel(t, k / t->ne[0]);
  *left = t->ne[0] - i0;
  return pg_row_at(t, i.i1, i.i2, i.i3) + i0 * t->nb[0];
}

static void by_runs(const pg_tensor *dst, const pg_tensor *src, const mover *m, int ith, int nth) {
  const pg_range r = pg_share(dst->ne[0] * pg_n_rows(dst), ith, nth);
  for (int64_t k = r.first, n; k < r.last; k += n) {
    int64_t left_d, left_s;
    char *pd = element(dst, k, &left_d);
    const char *ps = element(src, k, &left_s);
    n = PG_MIN(r.last - k, PG_MIN(left_d, left_s));
    move(m, pd, dst->nb[0], ps, src->nb[0], n);
  }
}

// -- block types to and from others ---------------------------------------------------------------------------------

// Elements k.. of a tensor in ne order as f32, and back; they may cross its rows.
static void gather(float *x, const pg_tensor *t, int64_t k, int64_t n) {
  for (int64_t left, c; n > 0; k += c, x += c, n -= c) {
    const char *p = element(t, k, &left);
    c = PG_MIN(n, left);
    pg_load_f32(x, t->type, p, t->nb[0], c);
  }
}

static void scatter(const float *x, const pg_tensor *t, int64_t k, int64_t n) {
  for (int64_t left, c; n > 0; k += c, x += c, n -= c) {
    char *p = element(t, k, &left);
    c = PG_MIN(n, left);
    pg_store_f32(x, t->type, p, t->nb[0], c);
  }
}

static void to_blocks(const pg_tensor *dst, const pg_tensor *src, pg_from_f32 encode, int64_t strip_bytes, float limit,
                      int ith, int nth) {
  const int64_t n = dst->ne[0];
  const pg_range r = pg_share(pg_n_rows(dst), ith, nth);
  float x[STRIP];
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(dst, ir);
    char *p = pg_row_at(dst, i.i1, i.i2, i.i3);
    for (int64_t k = 0; k < n; k += STRIP, p += strip_bytes) {
      const int64_t c = PG_MIN(STRIP, n - k);
      gather(x, src, ir * n + k, c);
      if (limit > 0) make_finite(x, c, limit);
      pg_encode(encode, dst, x, p, c);
    }
  }
}

static void from_blocks(const pg_tensor *dst, const pg_tensor *src, pg_to_f32 decode, int64_t strip_bytes, int ith,
                        int nth) {
  const int64_t n = src->ne[0];
  const pg_range r = pg_share(pg_n_rows(src), ith, nth);
  float x[STRIP];
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(src, ir);
    const char *p = pg_row_at(src, i.i1, i.i2, i.i3);
    for (int64_t k = 0; k < n; k += STRIP, p += strip_bytes) {
      const int64_t c = PG_MIN(STRIP, n - k);
      decode(p, x, c);
      scatter(x, dst, ir * n + k, c);
    }
  }
}

int PG_FN(cpy_any)(const pg_task *t, int ith, int nth) {
  pg_tensor dst = t->dst, src = t->src[0];
  if (!memcmp(&dst, &src, sizeof dst)) return PG_OK; // in place
  const int64_t block_d = pg_block_size(dst.type), block_s = pg_block_size(src.type);
  const int64_t unit_d = pg_unit_size(&dst), unit_s = pg_unit_size(&src);
  const float limit = t->src[1].data ? (float)t->param[0] : 0; // of cpy
  const int same = dst.type == src.type && !(limit > 0);
  if (!same && block_d > 1) {
    to_blocks(&dst, &src, PG_FN(from_f32)(dst.type), STRIP / block_d * unit_d, limit, ith, nth);
    return PG_OK;
  }
  if (!same && block_s > 1) {
    from_blocks(&dst, &src, PG_FN(to_f32)(src.type), STRIP / block_s * unit_s, ith, nth);
    return PG_OK;
  }
  dst.ne[0] /= block_d, src.ne[0] /= block_s; // a block moves as one element
  const mover m = {src.type, dst.type, pg_type_between(src.type, dst.type), same ? unit_d : 0, limit};
  grid g;
  if (!common_shape(&g, &dst, &src, unit_d, unit_s)) {
    by_runs(&dst, &src, &m, ith, nth);
    return PG_OK;
  }
  simplify(&g);
  const int transposed = g.d[0] == unit_d && g.s[1] == unit_s && g.s[0] != unit_s;
  if (transposed && g.ne[0] >= 8 && g.ne[1] >= 8 && unit_d <= MAX_TILE_UNIT) {
    by_tiles(&g, &m, dst.data, src.data, ith, nth);
  } else {
    by_rows(&g, &m, dst.data, src.data, ith, nth);
  }
  return PG_OK;
}
