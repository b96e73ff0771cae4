// The product of a panel of codes with a group of columns in bytes, in the order of sums.h: the bits of gemv.c.
#define R16_INT8
#include "products/gemm/int8_columns.h"
#include "products/gemm/fixed_dot.h"

// How the sums of a product are computed.
typedef struct kind {
  int planes; // of the columns (r16_planes)
  int units;  // whether units are summed (r16_sums_units); in the fast form they have one factor then, otherwise each
              // part of them has its own
  int halves; // scales of a unit (r16_halves)
  int summed; // quartets (r16_summed_quartets)
  int words;  // whether sums of the parts of a unit become words, side by side (r16_in_words)
} kind;

#if VF_N == 4
#include "products/gemm/int8_arm.h"
#else
#define EACH_SUM UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < TILE_VECTORS; i++)

typedef const uint8_t (*bytes)[R16_WIDTH][4];
typedef const int8_t (*codes)[TILE_ROWS][4];
typedef const int32_t (*ints)[TILE_ROWS];

// Quartets of a dot. With VNNI these are few: a chain of eight instructions would wait for itself. So two dots with the
// same scale are joined before they are multiplied with it.
PG_INLINE int dot_quartets(kind k) { return VF_N < 16 && k.units && k.halves == 1 ? R16_QUARTETS : R16_PART_QUARTETS; }
PG_INLINE int joins(kind k) { return VF_N == 16 && k.units && k.halves == 1 && !k.words; }

PG_INLINE vi four_bytes(const uint8_t *x) { return pair((const int16_t *)(const void *)x); }

// What a dot is multiplied with first: the integer scales of its rows, or the factor of its column.
PG_INLINE vi first_factor(kind k, const int32_t *whole, const int32_t *factors, int j, int i) {
  return k.units ? vi_load(whole + i * VF_N) : vi_set1(factors[j]);
}

// dots[j] = the sums of n quartets of codes times bytes of column j, times the first factor unless two dots are joined
// or become words.
PG_INLINE void dot(int nt, kind k, int n, codes w, ints less, const int32_t *whole, bytes x, const int32_t *factors,
                   const r16_fetch *fetch, fetching *at, vi (*dots)[TILE_VECTORS]) {
#if defined(__AVX512VNNI__)
  UNROLL for (int i = 0; i < TILE_VECTORS; i++) {
    const vi first = vi_load(less[0] + i * VF_N);
    UNROLL for (int j = 0; j < nt; j++) dots[j][i] = first;
  }
  UNROLL for (int p = 0; p < n; p++) {
    fetch_two(fetch, at);
    vi v[TILE_VECTORS];
    UNROLL for (int i = 0; i < TILE_VECTORS; i++) v[i] = vi_load(w[p] + i * VF_N);
    UNROLL for (int j = 0; j < nt; j++) {
      const vi b = four_bytes(x[p][j]);
      UNROLL for (int i = 0; i < TILE_VECTORS; i++) {
        dots[j][i] = _mm512_dpbusd_epi32(dots[j][i], b, v[i]);
        STAYS(dots[j][i]);
      }
    }
  }
  if (joins(k) || k.words) return;
  EACH_SUM dots[j][i] = vi_mul(dots[j][i], first_factor(k, whole, factors, j, i));
#else
  vi words[NT][TILE_VECTORS];
  UNROLL for (int p = 0; p < n; p++) {
    if (p % 2 == 0) fetch_two(fetch, at);
    vi v[TILE_VECTORS];
    UNROLL for (int i = 0; i < TILE_VECTORS; i++) v[i] = vi_load(w[p] + i * VF_N);
    UNROLL for (int j = 0; j < nt; j++) {
      const vi b = four_bytes(x[p][j]);
      UNROLL for (int i = 0; i < TILE_VECTORS; i++) {
        const vi before = p % k.summed ? words[j][i] : vi_load(less[p / k.summed] + i * VF_N);
        words[j][i] = _mm256_add_epi16(before, _mm256_maddubs_epi16(b, v[i]));
        STAYS(words[j][i]);
      }
    }
    if (p % k.summed < k.summed - 1) continue;
    EACH_SUM {
      const vi sum = _mm256_madd_epi16(words[j][i], first_factor(k, whole, factors, j, i));
      dots[j][i] = p < k.summed ? sum : vi_add(dots[j][i], sum);
    }
  }
#endif
}

#if defined(__AVX512VNNI__)
PG_INLINE vi add_words_dot(vi sum, vi a, vi b) { return _mm512_dpwssd_epi32(sum, a, b); }
#else // no format has words (r16_in_words)
PG_INLINE vi add_words_dot(vi sum, vi a, vi b) { return sum; }
#endif

// A panel times nt columns, over a run.
PG_INLINE void tile(int nt, kind k, const r16_panel *w, const r16_byte_columns *x, const target *t) {
  const int n = dot_quartets(k), step = R16_QUARTETS / n / (k.units ? 1 : k.halves); // of a unit, or a sum
  const int64_t n_steps = k.units ? w->sum_units : 1;
  const r16_fetch fetch = w->next;
  fetching at = fetching_of(&fetch);
  const r16_numbers *of = x->numbers;
  codes code = (codes)w->codes;
  ints less = (ints)w->less, whole = (ints)w->whole;
  bytes byte = (bytes)x->bytes;
  const float(*scale)[TILE_ROWS] = w->scales, (*shift)[TILE_ROWS] = w->shifts;
  const float(*x_sums)[R16_WIDTH] = of->sums[k.halves == 1];
  const int32_t(*factors)[R16_WIDTH] = of->factors, (*pairs)[R16_WIDTH] = of->pairs;
  vf room[NT][TILE_VECTORS], (*acc)[TILE_VECTORS] = room;
  if (k.units || VF_N < 16) __asm__("" : "+r"(acc) : : "memory"); // in memory: there are no registers left
  EACH_SUM acc[j][i] = vf_zero();
  for (int64_t e = 0; e < w->n_sums; e++, scale++) {
    if (w->n_shifts) {
      vf v[NT][TILE_VECTORS];
      EACH_SUM v[j][i] = acc[j][i];
      for (int64_t s = 0; s < w->n_shifts; s++, shift++, x_sums++) {
        vf by[TILE_VECTORS];
        UNROLL for (int i = 0; i < TILE_VECTORS; i++) by[i] = vf_load(shift[0] + i * VF_N);
        UNROLL for (int j = 0; j < nt; j++) {
          const vf b = vf_set1(x_sums[0][j]);
          UNROLL for (int i = 0; i < TILE_VECTORS; i++) v[j][i] = vf_fma(by[i], b, v[j][i]);
        }
      }
      EACH_SUM acc[j][i] = v[j][i];
    }
    IN_ORDER;
    vi sum[NT][TILE_VECTORS];
    EACH_SUM sum[j][i] = vi_zero();
    for (int64_t d = 0; d < n_steps; d++) {
      if (k.words) { // one instruction multiplies both with their factors, where vpmulld would take two for each
        vi dots[2][NT][TILE_VECTORS];
        UNROLL for (int h = 0; h < 2; h++, code += n, byte += n, less++) {
          dot(nt, k, n, code, less, NULL, byte, NULL, &fetch, &at, dots[h]);
          IN_ORDER;
        }
        EACH_SUM {
          const vi of_x = vi_set1(pairs[0][j]), by = k.units ? vi_mul_16(vi_load(whole[0] + i * VF_N), of_x) : of_x;
          sum[j][i] = add_words_dot(sum[j][i], vi_words(dots[0][j][i], dots[1][j][i]), by);
        }
        pairs++, whole++;
        continue;
      }
      vi unit[NT][TILE_VECTORS];
      UNROLL for (int h = 0; h < step; h++, code += n, byte += n, less += n / k.summed) {
        vi dots[NT][TILE_VECTORS];
        dot(nt, k, n, code, less, whole[0], byte, factors[0], &fetch, &at, dots);
        EACH_SUM unit[j][i] = h ? vi_add(unit[j][i], dots[j][i]) : dots[j][i];
        IN_ORDER;
        if (!k.units)
          factors++;
        else if (!joins(k))
          whole++;
      }
      if (joins(k)) {
        EACH_SUM unit[j][i] = vi_mul(unit[j][i], first_factor(k, whole[0], NULL, j, i));
        whole++;
      }
      if (!k.units) {
        EACH_SUM sum[j][i] = unit[j][i];
        continue;
      }
      EACH_SUM sum[j][i] = vi_add(sum[j][i], vi_mul(unit[j][i], vi_set1(factors[0][j])));
      factors++;
    }
    IN_ORDER;
    UNROLL for (int i = 0; i < TILE_VECTORS; i++) {
      const vf by = vf_load(scale[0] + i * VF_N);
      UNROLL for (int j = 0; j < nt; j++) acc[j][i] = vf_fma(vf_of_vi(sum[j][i]), by, acc[j][i]);
    }
  }
  EACH_SUM vf_store(t->to + j * t->ld + i * VF_N,
                    vf_fma(acc[j][i], vf_set1(of->steps[j]), vf_load(t->before[j] + i * VF_N)));
}

#endif

// The kinds of tiles: number, planes, units, halves, summed, words.
#if VF_N == 4
#define KINDS(X, nt)                                                                                                   \
  X(nt, 0, 1, 0, 1, 4, 0)                                                                                              \
  X(nt, 1, 1, 0, 2, 4, 0)                                                                                              \
  X(nt, 2, 1, 1, 1, 4, 0)                                                                                              \
  X(nt, 3, 1, 1, 2, 4, 0)                                                                                              \
  X(nt, 4, 2, 0, 1, 4, 0) X(nt, 5, 2, 0, 2, 4, 0) X(nt, 6, 2, 1, 1, 4, 0) X(nt, 7, 2, 1, 2, 4, 0)
enum { N_KINDS = 8 };
#elif defined(__AVX512VNNI__)
#define KINDS(X, nt)                                                                                                   \
  X(nt, 0, 1, 0, 1, 4, 0)                                                                                              \
  X(nt, 1, 1, 0, 2, 4, 0)                                                                                              \
  X(nt, 2, 1, 1, 1, 4, 0)                                                                                              \
  X(nt, 3, 1, 1, 2, 4, 0) X(nt, 4, 1, 0, 1, 4, 1) X(nt, 5, 1, 1, 1, 4, 1) X(nt, 6, 1, 1, 2, 4, 1)
enum { N_KINDS = 7 };
#else
#define KINDS(X, nt)                                                                                                   \
  X(nt, 0, 1, 0, 1, 4, 0)                                                                                              \
  X(nt, 1, 1, 0, 2, 4, 0)                                                                                              \
  X(nt, 2, 1, 1, 1, 8, 0)                                                                                              \
  X(nt, 3, 1, 1, 1, 4, 0) X(nt, 4, 1, 1, 1, 2, 0) X(nt, 5, 1, 1, 2, 4, 0) X(nt, 6, 1, 1, 2, 2, 0)
enum { N_KINDS = 7 };
#endif

// A function for each number of columns, so that missing columns cost nothing.
#define EACH(X) X(1) X(2) X(3) X(4)

// They are not inlined: in a larger function the sums would not stay in registers.
#define TILE(nt, n, ...)                                                                                               \
  static                                                                                                               \
      __attribute__((noinline)) void tile_##nt##_##n(const r16_panel *w, const r16_byte_columns *x, const target *t) { \
    tile(nt, (kind){__VA_ARGS__}, w, x, t);                                                                            \
  }
#define X(nt) KINDS(TILE, nt)
EACH(X)
#undef X

#define AT(nt, n, ...) [n][(nt)-1] = tile_##nt##_##n,
#define X(nt) KINDS(AT, nt)
static void (*const tiles[N_KINDS][NT])(const r16_panel *w, const r16_byte_columns *x, const target *t) = {EACH(X)};
#undef X

int R16_INT8_FN(r16_kind_of)(const r16_product *p) {
  static const kind kinds[N_KINDS] = {
#define HAS(nt, n, ...) [n] = {__VA_ARGS__},
      KINDS(HAS, )
#undef HAS
  };
  const kind k = {r16_planes(p), r16_sums_units(p->f), r16_halves(p->f), r16_summed_quartets(p->f), r16_in_words(p->f)};
  int i = 0;
  while (memcmp(kinds + i, &k, sizeof k)) i++;
  return i;
}

int R16_INT8_FN(r16_suits)(const r16_product *p) {
  return VF_N == 4 ? !r16_of_floats(p) : p->fast && r16_summed_quartets(p->f) > 0;
}

static const r16_totals nothing;

void R16_INT8_FN(r16_multiply)(float *to, int64_t ld, const r16_totals before, r16_panel *w, const r16_columns *c,
                               const r16_product *p, int64_t group, int64_t strip) {
  const int64_t n = r16_group_columns(c, group);
  for (int64_t j = 0; j < n && before; j++) // prefetched, because they have left the cache since the last strip
    for (int e = 0; e < TILE_ROWS; e += 16) __builtin_prefetch(before[j] + e);

  const r16_byte_columns x = r16_bytes_at(c, p, group, strip);
  tiles[w->kind][n - 1](w, &x, &(target){to, ld, before ? before : nothing});
  r16_stop_fetch(&w->next, w);
}
