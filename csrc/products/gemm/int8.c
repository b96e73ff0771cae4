// The product of a panel of codes with a group of columns in bytes, in the order of sums.h: the bits of gemv.c.
#define R16_INT8
#include "products/gemm/int8_columns.h"
#include "products/gemm/fixed_dot.h"

// How the sums of a format are computed: the scales of a unit; whether there are integer scales; and, without VNNI, how
// many quartets' products fit 16 bits.
typedef struct kind {
  int halves, whole, run;
} kind;

// The sums of a tile: for AT_ONCE rows at a time, because only so many fit the registers. A vector has VF_N rows of a
// column; or, where products are of 2 x 8 with 8 x 2 bytes, two rows of two columns: r0 c0, r0 c1, r1 c0, r1 c1.
enum {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  ABREAST = 2, // columns of a vector
#else
  ABREAST = 1,
#endif
  VECTORS = 2 * ABREAST, // of rows
  AT_ONCE = 2 * VF_N
};
typedef vi sums_of_tile[NT / ABREAST][VECTORS];
typedef vf floats_of_tile[NT / ABREAST][VECTORS];

#define EACH_COLUMN UNROLL for (int j = 0; j < (nt + ABREAST - 1) / ABREAST; j++)
#define EACH_ROW UNROLL for (int i = 0; i < VECTORS; i++)
#define EACH_SUM EACH_COLUMN EACH_ROW

// Numbers of rows, and of columns, as the sums of a vector lie: of vector i from p on.
#if defined(__ARM_FEATURE_MATMUL_INT8)
PG_INLINE vi two_of(const void *p, int i) { return (vi)vld1q_dup_s64((const int64_t *)p + i); }
PG_INLINE vf of_rows(const float *p, int i) {
  const vf two = (vf)vcombine_s64(vld1_s64((const int64_t *)p + i), vcreate_s64(0));
  return vzip1q_f32(two, two);
}
PG_INLINE vi ints_of_rows(const int32_t *p, int i) { return (vi)of_rows((const float *)p, i); }
PG_INLINE vf of_columns(const float *p, int j) { return (vf)two_of(p, j); }
PG_INLINE vi ints_of_columns(const int32_t *p, int j) { return two_of(p, j); }
#else
PG_INLINE vf of_rows(const float *p, int i) { return vf_load(p + i * VF_N); }
PG_INLINE vi ints_of_rows(const int32_t *p, int i) { return vi_load(p + i * VF_N); }
PG_INLINE vf of_columns(const float *p, int j) { return vf_set1(p[j]); }
PG_INLINE vi ints_of_columns(const int32_t *p, int j) { return vi_set1(p[j]); }
#endif

// VF_N rows of column j.
PG_INLINE vf column_of(floats_of_tile v, int j, int i) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  const vf a = v[j / 2][2 * i], b = v[j / 2][2 * i + 1];
  return j % 2 ? vuzp2q_f32(a, b) : vuzp1q_f32(a, b);
#else
  return v[j][i];
#endif
}

// dots[j] = the sum over a part of codes, of rows from `row` on, times bytes of nt columns, times their factors.
#if VF_N == 4
PG_INLINE void dot(int nt, int run, const r16_panel *w, int row, int64_t part, const uint8_t (*x)[NT][R16_TOGETHER],
                   const int32_t *factors, const r16_fetch *fetch, fetching *at, sums_of_tile dots) {
  if (fetch->run) fetch_two(fetch, at);
  EACH_SUM dots[j][i] = vi_zero();
  UNROLL for (int p = 0; p < R16_PART / R16_TOGETHER; p++) {
    const int8_t *codes = w->codes[part * (R16_PART / R16_TOGETHER) + p][row];
    int8x16_t v[VECTORS];
    EACH_ROW v[i] = vld1q_s8(codes + i * 16);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    EACH_COLUMN {
      const int8x16_t b = vld1q_s8((const int8_t *)x[p][2 * j]);
      EACH_ROW dots[j][i] = (vi)vmmlaq_s32((int32x4_t)dots[j][i], v[i], b);
    }
#else
    const int8x16_t b = vld1q_s8((const int8_t *)x[p]);
#define ADD(j)                                                                                                         \
  if (j < nt) EACH_ROW dots[j][i] = (vi)vdotq_laneq_s32((int32x4_t)dots[j][i], v[i], b, j);
    ADD(0) ADD(1) ADD(2) ADD(3)
#undef ADD
#endif
  }
  EACH_SUM dots[j][i] = vi_mul(dots[j][i], ints_of_columns(factors, j));
}
#else
PG_INLINE vi four_bytes(const uint8_t *x) { return pair((const int16_t *)(const void *)x); }

PG_INLINE void dot(int nt, int run, const r16_panel *w, int row, int64_t part, const uint8_t (*x)[NT][R16_TOGETHER],
                   const int32_t *factors, const r16_fetch *fetch, fetching *at, sums_of_tile dots) {
  const int8_t(*codes)[TILE_ROWS][R16_TOGETHER] = w->codes + part * R16_PART_QUARTETS;
  const int32_t(*less)[TILE_ROWS] = w->less + part * (R16_PART_QUARTETS / run);
#if defined(__AVX512VNNI__)
  EACH_ROW {
    const vi first = vi_load(less[0] + i * VF_N);
    EACH_COLUMN dots[j][i] = first;
  }
  UNROLL for (int p = 0; p < R16_PART_QUARTETS; p++) {
    fetch_two(fetch, at);
    vi v[VECTORS];
    EACH_ROW v[i] = vi_load(codes[p] + i * VF_N);
    EACH_COLUMN {
      const vi b = four_bytes(x[p][j]);
      EACH_ROW {
        dots[j][i] = _mm512_dpbusd_epi32(dots[j][i], b, v[i]);
        STAYS(dots[j][i]);
      }
    }
  }
  EACH_SUM dots[j][i] = vi_mul(dots[j][i], vi_set1(factors[j]));
#else
  sums_of_tile words;
  UNROLL for (int p = 0; p < R16_PART_QUARTETS; p++) {
    if (p % 2 == 0) fetch_two(fetch, at);
    vi v[VECTORS];
    EACH_ROW v[i] = vi_load(codes[p] + i * VF_N);
    EACH_COLUMN {
      const vi b = four_bytes(x[p][j]);
      EACH_ROW {
        const vi before = p % run ? words[j][i] : vi_load(less[p / run] + i * VF_N);
        words[j][i] = _mm256_add_epi16(before, _mm256_maddubs_epi16(b, v[i]));
        STAYS(words[j][i]);
      }
    }
    if (p % run < run - 1) continue;
    EACH_SUM {
      const vi sum = _mm256_madd_epi16(words[j][i], vi_set1(factors[j]));
      dots[j][i] = p < run ? sum : vi_add(dots[j][i], sum);
    }
  }
#endif
}
#endif

// acc += scale times v of nt columns.
PG_INLINE void add_scaled(int nt, floats_of_tile acc, const float *scale, sums_of_tile v) {
  EACH_ROW {
    const vf of = of_rows(scale, i);
    EACH_COLUMN acc[j][i] = vf_fma(vf_of_vi(v[j][i]), of, acc[j][i]);
  }
}

// sum += integer scales times v of nt columns.
PG_INLINE void add_whole(int nt, sums_of_tile sum, const int32_t *whole, sums_of_tile v) {
  EACH_ROW {
    const vi of = ints_of_rows(whole, i);
    EACH_COLUMN sum[j][i] = vi_add(sum[j][i], vi_mul(v[j][i], of));
  }
}

// acc += shifts times sums of columns.
PG_INLINE void add_shift(int nt, floats_of_tile acc, const float *shift, const float *sums) {
  EACH_ROW {
    const vf of = of_rows(shift, i);
    EACH_COLUMN acc[j][i] = vf_fma(of, of_columns(sums, j), acc[j][i]);
  }
}

// Rows of a panel from `row` on times nt columns, over a run.
PG_INLINE void rows_of_tile(int nt, kind k, const r16_panel *w, int row, r16_byte_columns x, target t,
                            const r16_fetch *fetch, fetching *at) {
  const r16_numbers *of = x.numbers;
  const float(*scale)[TILE_ROWS] = w->scales, (*shift)[TILE_ROWS] = w->shifts;
  floats_of_tile acc;
  sums_of_tile sum; // with integer scales
  EACH_SUM acc[j][i] = vf_zero();
  EACH_SUM sum[j][i] = vi_zero();
  for (int64_t u = 0; u < w->n_units; u++) {
    sums_of_tile unit;
    UNROLL for (int h = 0; h < 2; h++) {
      const int64_t part = 2 * u + h;
      if (w->has_shifts && (k.halves == 2 || h)) {
        add_shift(nt, acc, *shift++ + row, of->sums[k.halves == 1][k.halves == 1 ? u : part]);
      }
      sums_of_tile dots;
      IN_ORDER;
      dot(nt, k.run, w, row, part, x.bytes + part * (R16_PART / R16_TOGETHER), of->factors[part], fetch, at, dots);
      IN_ORDER;
      EACH_SUM unit[j][i] = h && k.halves == 1 ? vi_add(unit[j][i], dots[j][i]) : dots[j][i];
      if (k.halves == 1 && !h) continue;
      if (k.whole)
        add_whole(nt, sum, w->whole[k.halves == 1 ? u : part] + row, unit);
      else
        add_scaled(nt, acc, *scale++ + row, unit);
    }
    if (!k.whole || (u + 1) % w->sum_units) continue;
    add_scaled(nt, acc, *scale++ + row, sum);
    EACH_SUM sum[j][i] = vi_zero();
  }
  UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < 2; i++) {
    const int at_row = row + i * VF_N;
    vf_store(t.to + j * t.ld + at_row,
             vf_fma(column_of(acc, j, i), vf_set1(of->steps[j]), vf_load(t.before[j] + at_row)));
  }
}

// A panel times nt columns, over a run.
PG_INLINE void tile(int nt, kind k, const r16_panel *w, r16_byte_columns x, target t) {
  const r16_fetch fetch = w->next;
  fetching at = fetching_of(&fetch);
  for (int row = 0; row < TILE_ROWS; row += AT_ONCE) rows_of_tile(nt, k, w, row, x, t, &fetch, &at);
}

// The kinds of tiles: number, halves, whole, run.
#if defined(__AVX512VNNI__) || VF_N == 4
#define KINDS(X, nt) X(nt, 0, 1, 0, 4) X(nt, 1, 2, 0, 4) X(nt, 2, 1, 1, 4) X(nt, 3, 2, 1, 4)
enum { N_KINDS = 4 };
#else
#define KINDS(X, nt)                                                                                                   \
  X(nt, 0, 1, 0, 4) X(nt, 1, 2, 0, 4) X(nt, 2, 1, 1, 4) X(nt, 3, 1, 1, 2) X(nt, 4, 2, 1, 4) X(nt, 5, 2, 1, 2)
enum { N_KINDS = 6 };
#endif

// A function for each number of columns, so that missing columns cost nothing.
#define EACH(X) X(1) X(2) X(3) X(4)

// They are not inlined: in a larger function the sums would not stay in registers.
#define TILE(nt, n, halves, whole, run)                                                                                \
  static __attribute__((noinline)) void tile_##nt##_##n(const r16_panel *w, r16_byte_columns x, target t) {            \
    tile(nt, (kind){halves, whole, run}, w, x, t);                                                                     \
  }
#define X(nt) KINDS(TILE, nt)
EACH(X)
#undef X

#define AT(nt, n, halves, whole, run) [n][(nt)-1] = tile_##nt##_##n,
#define X(nt) KINDS(AT, nt)
static void (*const tiles[N_KINDS][NT])(const r16_panel *w, r16_byte_columns x, target t) = {EACH(X)};
#undef X

int R16_INT8_FN(r16_suits)(r16_format f) { return r16_run_of(f) > 0; }

static const r16_totals nothing;

void R16_INT8_FN(r16_multiply)(float *to, int64_t ld, const r16_totals before, r16_panel *w, const r16_columns *c,
                               const r16_product *p, int64_t group, int64_t strip) {
  static const kind kinds[N_KINDS] = {
#define HAS(nt, n, halves, whole, run) [n] = {halves, whole, run},
      KINDS(HAS, )
#undef HAS
  };
  const kind k = {r16_halves(p->f), r16_sums_units(p->f), r16_run_of(p->f)};
  int i = 0;
  while (kinds[i].halves != k.halves || kinds[i].whole != k.whole || kinds[i].run != k.run) i++;
  const int64_t n = r16_group_columns(c, group);
  for (int64_t j = 0; j < n && before; j++) // prefetched, because they have left the cache since the last strip
    for (int e = 0; e < TILE_ROWS; e += 16) __builtin_prefetch(before[j] + e);

  tiles[i][n - 1](w, r16_bytes_at(c, group, strip), (target){to, ld, before ? before : nothing});
  w->next = r16_no_fetch(w);
}
