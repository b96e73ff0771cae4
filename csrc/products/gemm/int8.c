// The product of a panel of codes with a group of columns in bytes, in the order of sums.h: the bits of gemv.c.
#define R16_INT8
#include "products/gemm/int8_columns.h"
#include "products/gemm/fixed_dot.h"

// How the sums of a format are computed: the scales of a unit; whether there are integer scales; and, without VNNI, how
// many quartets' products fit 16 bits.
typedef struct kind {
  int halves, whole, run;
} kind;

#define EACH_SUM UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < TILE_VECTORS; i++)

PG_INLINE vi four_bytes(const uint8_t *x) { return pair((const int16_t *)(const void *)x); }

// dots[j] = the sum over a part of codes times bytes of nt columns, times their factors.
PG_INLINE void dot(int nt, int run, const r16_panel *w, int64_t part, const uint8_t (*x)[NT][4], const int32_t *factors,
                   const r16_fetch *fetch, fetching *at, vi (*dots)[TILE_VECTORS]) {
  const int8_t(*codes)[TILE_ROWS][4] = w->codes + part * R16_PART_QUARTETS;
  const int32_t(*less)[TILE_ROWS] = w->less + part * (R16_PART_QUARTETS / run);
#if defined(__AVX512VNNI__)
  UNROLL for (int i = 0; i < TILE_VECTORS; i++) {
    const vi first = vi_load(less[0] + i * VF_N);
    UNROLL for (int j = 0; j < nt; j++) dots[j][i] = first;
  }
  UNROLL for (int p = 0; p < R16_PART_QUARTETS; p++) {
    fetch_two(fetch, at);
    vi v[TILE_VECTORS];
    UNROLL for (int i = 0; i < TILE_VECTORS; i++) v[i] = vi_load(codes[p] + i * VF_N);
    UNROLL for (int j = 0; j < nt; j++) {
      const vi b = four_bytes(x[p][j]);
      UNROLL for (int i = 0; i < TILE_VECTORS; i++) {
        dots[j][i] = _mm512_dpbusd_epi32(dots[j][i], b, v[i]);
        STAYS(dots[j][i]);
      }
    }
  }
  EACH_SUM dots[j][i] = vi_mul(dots[j][i], vi_set1(factors[j]));
#else
  vi words[NT][TILE_VECTORS];
  UNROLL for (int p = 0; p < R16_PART_QUARTETS; p++) {
    if (p % 2 == 0) fetch_two(fetch, at);
    vi v[TILE_VECTORS];
    UNROLL for (int i = 0; i < TILE_VECTORS; i++) v[i] = vi_load(codes[p] + i * VF_N);
    UNROLL for (int j = 0; j < nt; j++) {
      const vi b = four_bytes(x[p][j]);
      UNROLL for (int i = 0; i < TILE_VECTORS; i++) {
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

// acc += scale times v of nt columns.
PG_INLINE void add_scaled(int nt, vf (*acc)[TILE_VECTORS], const float *scale, vi (*v)[TILE_VECTORS]) {
  UNROLL for (int i = 0; i < TILE_VECTORS; i++) {
    const vf of = vf_load(scale + i * VF_N);
    UNROLL for (int j = 0; j < nt; j++) acc[j][i] = vf_fma(vf_of_vi(v[j][i]), of, acc[j][i]);
  }
}

// sum += integer scales times v of nt columns.
PG_INLINE void add_whole(int nt, vi (*sum)[TILE_VECTORS], const int32_t *whole, vi (*v)[TILE_VECTORS]) {
  UNROLL for (int i = 0; i < TILE_VECTORS; i++) {
    const vi of = vi_load(whole + i * VF_N);
    UNROLL for (int j = 0; j < nt; j++) sum[j][i] = vi_add(sum[j][i], vi_mul(v[j][i], of));
  }
}

// acc += shifts times sums of columns.
PG_INLINE void add_shift(int nt, vf (*acc)[TILE_VECTORS], const float *shift, const float *sums) {
  UNROLL for (int i = 0; i < TILE_VECTORS; i++) {
    const vf of = vf_load(shift + i * VF_N);
    UNROLL for (int j = 0; j < nt; j++) acc[j][i] = vf_fma(of, vf_set1(sums[j]), acc[j][i]);
  }
}

// A panel times nt columns, over a run.
PG_INLINE void tile(int nt, kind k, const r16_panel *w, r16_byte_columns x, target t) {
  const r16_fetch fetch = w->next;
  fetching at = fetching_of(&fetch);
  const r16_numbers *of = x.numbers;
  const float(*scale)[TILE_ROWS] = w->scales, (*shift)[TILE_ROWS] = w->shifts;
  vf acc[NT][TILE_VECTORS];
  vi sum[NT][TILE_VECTORS]; // with integer scales
  EACH_SUM acc[j][i] = vf_zero();
  EACH_SUM sum[j][i] = vi_zero();
  for (int64_t u = 0; u < w->n_units; u++) {
    vi unit[NT][TILE_VECTORS];
    UNROLL for (int h = 0; h < 2; h++) {
      const int64_t part = 2 * u + h;
      if (w->has_shifts && (k.halves == 2 || h)) {
        add_shift(nt, acc, *shift++, of->sums[k.halves == 1][k.halves == 1 ? u : part]);
      }
      vi dots[NT][TILE_VECTORS];
      IN_ORDER;
      dot(nt, k.run, w, part, x.bytes + part * R16_PART_QUARTETS, of->factors[part], &fetch, &at, dots);
      IN_ORDER;
      EACH_SUM unit[j][i] = h && k.halves == 1 ? vi_add(unit[j][i], dots[j][i]) : dots[j][i];
      if (k.halves == 1 && !h) continue;
      if (k.whole)
        add_whole(nt, sum, w->whole[k.halves == 1 ? u : part], unit);
      else
        add_scaled(nt, acc, *scale++, unit);
    }
    if (!k.whole || (u + 1) % w->sum_units) continue;
    add_scaled(nt, acc, *scale++, sum);
    EACH_SUM sum[j][i] = vi_zero();
  }
  EACH_SUM vf_store(t.to + j * t.ld + i * VF_N,
                    vf_fma(acc[j][i], vf_set1(of->steps[j]), vf_load(t.before[j] + i * VF_N)));
}

// The kinds of tiles: number, halves, whole, run.
#if defined(__AVX512VNNI__)
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
