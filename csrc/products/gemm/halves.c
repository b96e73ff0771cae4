// mul_mat_half: matrices of F16 and BF16 in the fast form. Rows and columns become integers of 16 bits, with a step
// (f32) for each strip of STRIP elements of them, and are multiplied exactly. The integers of a row are ROW_MAX at most
// in size, the sizes of those of a column add up to COLUMN_SUM at most: no sum of products leaves 32 bits, whatever the
// values are.
//
// Few columns are multiplied here, while each row passes once. Many are multiplied by gemm.c, and become panels and
// groups here. A column has the same bits in both: all that is rounded is a sum times its two steps, one after the
// other (their product may leave the range of f32), added in f32 from the first strip on.
#include "products/gemm/halves.h"

#include "products/gemm/columns.h"
#include "products/gemm/fixed_columns.h"
#include "products/gemm/fixed_dot.h"
#include "products/gemm/fixed_pairs.h"
#include "simd/ahead.h"
#include "simd/lanes.h"

enum {
  STRIP = KC / 2,
  ROW_MAX = 8191,
  COLUMN_SUM = 262000,            // and room for rounding: (262000 + STRIP / 2) * ROW_MAX is below 2^31
  REGISTERS = STRIP / (2 * VF_N), // of the integers of a strip
  BATCH = 8,                      // strips whose steps are computed together
  SOME = 4 * BATCH,               // strips that are multiplied before the next steps are computed
  TABLE = 128,                    // strips of a row, times columns, whose sums are kept
  NEAR = 4096                     // bytes of prefetch on CPUs that are not AMD's: into the L1 cache
};

// Below it, all elements of a strip count as 0.
static const float tiny = 1e-30f;

// -- integers

#if VF_N == 16
#define WIDE(op) _mm512_##op
PG_INLINE __m256i lower(vi a) { return (__m256i)_mm512_castps512_ps256((__m512)a); }
PG_INLINE __m256i upper(vi a) { return (__m256i)_mm512_extractf32x8_ps((__m512)a, 1); }
PG_INLINE __m256i larger_half(vi a) { return _mm256_max_epu16(lower(a), upper(a)); }
PG_INLINE __m256i half_sum(vi a) { return _mm256_add_epi32(lower(a), upper(a)); }
#else
#define WIDE(op) _mm256_##op
PG_INLINE __m256i larger_half(vi a) { return a; }
PG_INLINE __m256i half_sum(vi a) { return a; }
#endif

// Each step of a tree halves the registers: words, pairs of words ... of a and b in turn.
PG_INLINE vi larger(vi a, vi b) { return WIDE(max_epu16)(a, b); }
PG_INLINE vi larger_of_2(vi a, vi b) { return larger(WIDE(unpacklo_epi16)(a, b), WIDE(unpackhi_epi16)(a, b)); }
PG_INLINE vi larger_of_4(vi a, vi b) { return larger(WIDE(unpacklo_epi32)(a, b), WIDE(unpackhi_epi32)(a, b)); }
PG_INLINE __m128i larger_of_8(vi a, vi b) {
  const __m256i h = larger_half(larger(WIDE(unpacklo_epi64)(a, b), WIDE(unpackhi_epi64)(a, b)));
  return _mm_max_epu16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}
PG_INLINE vi sum_of_2(vi a, vi b) { return vi_add(WIDE(unpacklo_epi32)(a, b), WIDE(unpackhi_epi32)(a, b)); }
PG_INLINE __m128i sum_of_4(vi a, vi b) {
  const __m256i h = half_sum(vi_add(WIDE(unpacklo_epi64)(a, b), WIDE(unpackhi_epi64)(a, b)));
  return _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}

// x * by as integers, in the lowest 16 bits: the sum with such a number has its integer there, rounded to even.
PG_INLINE vi integers(vf x, vf by) { return (vi)vf_fma(x, by, vf_set1(0x1.8p23f)); }
// Those of a and of b in turn.
PG_INLINE vi pack(vf a, vf b, vf by) { return vi_words(integers(a, by), integers(b, by)); }

// The largest elements of a strip in size, one for each place of 16 bits. Numbers without their signs are in the order
// of their bits.
PG_INLINE vi sizes_of(const char *w) { return vi_and(vi_load(w), vi_set1(0x7fff7fff)); }
PG_INLINE vi largest(const char *w) {
  vi max = sizes_of(w);
  for (int i = 1; i < REGISTERS; i++) max = larger(max, sizes_of(w + i * 4 * VF_N));
  return max;
}

// Of BATCH strips, nb bytes apart, of which there are n (the others are the last one again): by what they are
// multiplied to become integers, and their steps. A strip with NaN or an infinity has the step NaN.
PG_INLINE void steps_of(int type, const char *w, int64_t nb, int64_t n, float *inv, float *steps) {
  vi m[BATCH];
  for (int i = 0; i < BATCH; i++) m[i] = largest(w + PG_MIN(i, n - 1) * nb);
  const __m128i max = larger_of_8(larger_of_4(larger_of_2(m[0], m[1]), larger_of_2(m[2], m[3])),
                                  larger_of_4(larger_of_2(m[4], m[5]), larger_of_2(m[6], m[7])));
  const __m256 v =
      type == PG_F16 ? _mm256_cvtph_ps(max) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(max), 16));
  const __m256 some = _mm256_cmp_ps(v, _mm256_set1_ps(tiny), _CMP_GT_OQ);
  _mm256_storeu_ps(inv, _mm256_and_ps(some, _mm256_div_ps(_mm256_set1_ps(ROW_MAX), v)));
  const __m256 step = _mm256_and_ps(some, _mm256_mul_ps(v, _mm256_set1_ps(1.0f / ROW_MAX)));
  _mm256_storeu_ps(steps, _mm256_fmadd_ps(v, _mm256_setzero_ps(), step));
}

// The integers of a strip of a row. Those of BF16 are in their order; of F16, in a register, the two halves take turns.
PG_INLINE void integers_of(int type, const char *w, float inv, vi *q) {
  const vf by = vf_set1(inv);
  for (int i = 0; i < REGISTERS; i++, w += 4 * VF_N) {
    if (type == PG_F16) {
      q[i] = pack(vf_load_f16(w), vf_load_f16(w + 2 * VF_N), by);
    } else { // a number is the upper half of a float
      const rows two = (rows)vi_load(w);
      q[i] = pack((vf)(two << 16), (vf)(two & 0xffff0000), by);
    }
  }
}

// Put the integers of x[0..n), a strip of a column, to `to`, as the rows of this type have them, and return their step.
// n is a multiple of 32.
static float put_column(int type, int16_t *to, const float *x, int64_t n) {
  const vf part = vf_set1(0x1p-8f); // so that no sum overflows
  vf max[2] = {vf_zero(), vf_zero()}, sum[2] = {vf_zero(), vf_zero()};
  for (int64_t i = 0; i < n; i += 2 * VF_N)
    for (int j = 0; j < 2; j++) {
      const vf v = vf_abs(vf_load(x + i + j * VF_N));
      max[j] = vf_max(max[j], v);
      sum[j] = vf_fma(v, part, sum[j]);
    }
  const float most = vf_hmax(vf_max(max[0], max[1])), all = vf_sum(vf_add(sum[0], sum[1]));
  const int is_some = all < INFINITY && most > tiny;
  const float inv = is_some ? PG_MIN(COLUMN_SUM * 0x1p-8f / all, R16_MAX / most) : 0;
  const vf by = vf_set1(inv);
  for (int64_t i = 0; i < n; i += 2 * VF_N) {
    if (type == PG_F16) {
      vi_store(to + i, pack(vf_load(x + i), vf_load(x + i + VF_N), by));
    } else {
      for (int j = 0; j < 2 * VF_N; j += VF_N)
        put_words((uint8_t *)(to + i + j), (rows)integers(vf_load(x + i + j), by));
    }
  }
  return is_some ? 1 / inv : all < INFINITY ? 0 : NAN;
}

// -- many columns

void PG_FN(r16_put_half_columns)(const r16_columns *c, const r16_product *p, r16_share share) {
  const r16_quad g = r16_quad_of(c, p, share);
  for (int64_t s = share.first; s < share.last && g.n; s++) {
    const int64_t n = r16_strip_elements(c, s);
    const r16_fixed to = r16_fixed_of(c, share.group, s);
    int16_t four[R16_QUAD][KC];
    for (int j = 0; j < R16_QUAD; j++) {
      float x[STRIP] = {0};
      if (j < g.n) r16_get(x, p, &g, j, s * c->strip, n);
      to.steps[share.column + j] = put_column(p->f.type, four[j], x, n);
    }
    put_4_columns(to.ints + share.column * 2, four, to.width, n / 2);
  }
}

// Strip s of the rows from `row` on, VF_N of them, filled up with zeros.
static const char *strips_of(const r16_product *p, int64_t row, int64_t s, uint16_t (*own)[STRIP], int64_t *nb) {
  const int64_t n = PG_MIN(STRIP, p->b->ne[0] - s * STRIP), rows = PG_MIN(VF_N, p->m - row);
  const char *w = (const char *)p->w + row * p->row_bytes + s * STRIP * 2;
  *nb = p->row_bytes;
  if (n == STRIP && rows == VF_N) return w;
  memset(own, 0, VF_N * sizeof *own);
  for (int64_t r = 0; r < rows; r++) memcpy(own[r], w + r * p->row_bytes, n * 2);
  *nb = sizeof *own;
  return (const char *)own;
}

PG_INLINE void put_rows(int type, r16_panel *panel, const r16_product *p, int64_t tile, int64_t s) {
  // What is prefetched: the next strip of these rows; after the last one, the first strip of the rows behind the chunk.
  const int64_t last = (s + 1) * STRIP >= p->k, next_row = (tile + (last ? R16_TILES : 0)) * TILE_ROWS;
  const char *next = (const char *)p->w + next_row * p->row_bytes + (last ? 0 : s + 1) * STRIP * 2;
  for (int64_t i = 0, nb; i < TILE_ROWS; i += VF_N) {
    uint16_t own[VF_N][STRIP];
    int16_t ints[VF_N][STRIP];
    const char *w = strips_of(p, tile * TILE_ROWS + i, s, own, &nb);
    float inv[BATCH];
    for (int64_t r = 0; r < VF_N; r++) {
      if (r % BATCH == 0) steps_of(type, w + r * nb, nb, BATCH, inv, panel->steps + i + r);
      pg_ask(next + (i + r) * p->row_bytes, STRIP * 2);
      vi q[REGISTERS];
      integers_of(type, w + r * nb, inv[r % BATCH], q);
      for (int j = 0; j < REGISTERS; j++) vi_store(ints[r] + j * 2 * VF_N, q[j]);
    }
    const int64_t pairs = PG_MIN(STRIP, p->k - s * STRIP) / 2;
    pg_turn((float *)panel->ints[0][i], TILE_ROWS, VF_N * TILE_ROWS, (const char *)ints, sizeof *ints, pairs);
  }
}

void PG_FN(r16_put_halves)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip) {
  if (p->f.type == PG_F16) {
    put_rows(PG_F16, panel, p, tile, strip);
  } else {
    put_rows(PG_BF16, panel, p, tile, strip);
  }
}

// -- few columns

// All columns: integers [column][strip][STRIP], then steps [column][strip].
typedef struct few {
  int64_t n_strips;
  int16_t *ints;
  float *steps;
} few;

_Static_assert(R16_FEW_HALVES <= NT && R16_FEW_HALVES <= R16_QUAD, "few columns are one group, and are read together");

static few few_in(char *work, const r16_product *p) {
  const int64_t n_strips = r16_columns_in(NULL, p).n_strips;
  return (few){n_strips, (int16_t *)work, (float *)(work + p->n_cols * n_strips * STRIP * 2)};
}

int64_t PG_FN(r16_few_work)(const r16_product *p) {
  return pg_times(p->n_cols, pg_times(r16_columns_in(NULL, p).n_strips, STRIP * 2 + (int64_t)sizeof(float)));
}

void PG_FN(r16_few_columns)(const r16_product *p, char *work, int ith, int nth) {
  const few x = few_in(work, p);
  const r16_columns c = r16_columns_in(NULL, p);
  const r16_quad g = r16_quad_of(&c, p, (r16_share){.group = 0});
  const pg_range share = pg_share(x.n_strips, ith, nth);
  for (int64_t j = 0; j < g.n; j++)
    for (int64_t s = share.first; s < share.last; s++) {
      const int64_t at = j * x.n_strips + s;
      float column[STRIP] = {0};
      r16_get(column, p, &g, j, s * STRIP, r16_strip_elements(&c, s));
      x.steps[at] = put_column(p->f.type, x.ints + at * STRIP, column, STRIP);
    }
}

// The sums of n strips of the rows of a group, for each column in turn, and the steps of these rows: [strip][R16_ROWS].
typedef struct table {
  int32_t sums[TABLE * R16_ROWS];
  float steps[TABLE * R16_ROWS];
} table;

// sum[c] = a strip of a row times that of column c.
PG_INLINE void dot_strip(int type, int nc, const char *w, float inv, const int16_t *x, int64_t ld, vi *sum) {
  if (pg_cpu_is_amd) {
    pg_ask(w + PG_AHEAD, STRIP * 2);
  } else {
    for (int j = 0; j < STRIP * 2; j += 64) __builtin_prefetch(w + NEAR + j);
  }
  vi q[REGISTERS];
  integers_of(type, w, inv, q);
  UNROLL for (int c = 0; c < nc; c++) {
    sum[c] = vi_zero();
    UNROLL for (int j = 0; j < REGISTERS; j++) sum[c] = dot_pairs(sum[c], q[j], vi_load(x + c * ld + j * 2 * VF_N));
  }
}

// A part of the table: `total` strips that lie one behind the other, n of each row, from row r on.
PG_INLINE void put_sums(int type, int nc, table *t, int64_t r, const char *w, int64_t n, int64_t total,
                        const int16_t *x, int64_t ld) {
  for (int64_t i = 0, some, s = 0; i < total; i += some, w += some * STRIP * 2) {
    some = PG_MIN(SOME, total - i);
    float inv[SOME], steps[SOME];
    for (int64_t e = 0; e < some; e += BATCH)
      steps_of(type, w + e * STRIP * 2, STRIP * 2, PG_MIN(BATCH, some - e), inv + e, steps + e);
    for (int64_t e = 0; e < some; e += 4) {
      int64_t strip[4], to[4];
      const int16_t *of[4];
      for (int j = 0; j < 4; j++) {
        if (e + j < some) {
          strip[j] = e + j, to[j] = s * R16_ROWS + r, of[j] = x + s * STRIP;
          if (++s == n) s = 0, r++;
        } else { // the last one again
          strip[j] = strip[j - 1], to[j] = to[j - 1], of[j] = of[j - 1];
        }
        t->steps[to[j]] = steps[strip[j]];
      }
      vi a[R16_FEW_HALVES], b[R16_FEW_HALVES], both[2][R16_FEW_HALVES];
      UNROLL for (int j = 0; j < 2; j++) {
        dot_strip(type, nc, w + strip[2 * j] * STRIP * 2, inv[strip[2 * j]], of[2 * j], ld, a);
        dot_strip(type, nc, w + strip[2 * j + 1] * STRIP * 2, inv[strip[2 * j + 1]], of[2 * j + 1], ld, b);
        UNROLL for (int c = 0; c < nc; c++) both[j][c] = sum_of_2(a[c], b[c]);
      }
      UNROLL for (int c = 0; c < nc; c++) {
        int32_t four[4];
        _mm_storeu_si128((__m128i *)four, sum_of_4(both[0][c], both[1][c]));
        for (int j = 0; j < 4; j++) t->sums[c * n * R16_ROWS + to[j]] = four[j];
      }
    }
  }
}

#define COLUMNS(X, type) X(type, 1) X(type, 2) X(type, 3) X(type, 4)
#define SUMS(type, nc)                                                                                                 \
  static void sums_##type##_##nc(table *t, int64_t r, const char *w, int64_t n, int64_t total, const int16_t *x,       \
                                 int64_t ld) {                                                                         \
    put_sums(PG_##type, nc, t, r, w, n, total, x, ld);                                                                 \
  }
COLUMNS(SUMS, F16)
COLUMNS(SUMS, BF16)

typedef void (*sums_fn)(table *t, int64_t r, const char *w, int64_t n, int64_t total, const int16_t *x, int64_t ld);

#define NAME(type, nc) sums_##type##_##nc,
static const sums_fn sums_of[2][R16_FEW_HALVES] = {{COLUMNS(NAME, F16)}, {COLUMNS(NAME, BF16)}};

// A group of up to 16 rows, from `row` on, times all columns.
static void multiply(const r16_product *p, const few *x, int64_t row, float (*y)[R16_ROWS]) {
  const int64_t nc = p->n_cols, rows = PG_MIN(R16_ROWS, p->m - row), some = TABLE / nc, ld = x->n_strips * STRIP;
  const int64_t whole = p->b->ne[0] / STRIP; // strips that need no zeros
  const sums_fn sums = sums_of[p->f.type == PG_BF16][nc - 1];
  table t;
  memset(y, 0, nc * sizeof *y);
  for (int64_t s0 = 0, n; s0 < x->n_strips; s0 += n) {
    n = s0 < whole ? PG_MIN(some, whole - s0) : 1;
    const int dense = p->row_bytes == n * STRIP * 2; // then the rows are like one, which matters when they are short
    for (int64_t r = 0; r < (dense ? 1 : rows); r++) {
      const char *w = (const char *)p->w + (row + r) * p->row_bytes + s0 * STRIP * 2;
      uint16_t own[STRIP] = {0};
      if (s0 == whole) w = memcpy(own, w, (p->b->ne[0] - s0 * STRIP) * 2);
      sums(&t, r, w, n, dense ? rows * n : n, x->ints + s0 * STRIP, ld);
    }
    for (int64_t c = 0; c < nc; c++)
      for (int i = 0; i < R16_ROWS; i += VF_N) {
        vf sum = vf_load(y[c] + i);
        for (int64_t s = 0; s < n; s++) {
          const vf of_rows =
              vf_mul(vf_of_vi(vi_load(t.sums + (c * n + s) * R16_ROWS + i)), vf_load(t.steps + s * R16_ROWS + i));
          sum = vf_fma(of_rows, vf_set1(x->steps[c * x->n_strips + s0 + s]), sum);
        }
        vf_store(y[c] + i, sum);
      }
  }
}

void PG_FN(r16_few_halves)(const r16_product *p, int n_p, char *work, r16_queue *q) {
  const few x = few_in(work, p);
  const pg_deal d = pg_deal_of((p->m + R16_ROWS - 1) / R16_ROWS, q->nth);
  for (int64_t i = r16_take(q, d.n_chunks, -1); i >= 0; i = r16_take(q, d.n_chunks, i)) {
    const pg_range r = pg_chunk_of(&d, i);
    for (int j = 0; j < n_p; j++)
      for (int64_t g = r.first; g < r.last; g++) {
        const int64_t row = g * R16_ROWS;
        float y[R16_FEW_HALVES][R16_ROWS];
        multiply(p + j, &x, row, y);
        for (int64_t c = 0; c < p->n_cols; c++) {
          int64_t b_col;
          r16_put(p + j, r16_result(p + j, c, &b_col), y[c], r16_other(p + j, c), row, PG_MIN(R16_ROWS, p->m - row));
        }
      }
  }
}
