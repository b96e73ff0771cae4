// The product of a panel of codes with a group of columns in bytes, in the order of sums.h: the bits of gemv.c.
#define R16_INT8
#include "products/gemm/int8_columns.h"
#include "products/gemm/fixed_dot.h"

// Keep loads and stores in their order: gcc would load what does not fit the registers early.
#define IN_ORDER __asm__ volatile("" : : : "memory")

// The place of a tile's results, whose columns lie `ld` apart; and the totals before them, if any, TILE_ROWS apart.
typedef struct target {
  float *to;
  int64_t ld;
  const float (*before)[TILE_ROWS];
} target;

// How the sums of a format are computed. Constants: the scales of a unit; whether there are integer scales; and,
// without VNNI, how many quartets' products fit 16 bits.
typedef struct kind {
  int halves, whole, run;
} kind;

// The rest: log2 of the offset of codes, -1 for none; units of a sum; elements of a shift, 0 when there are none.
typedef struct way {
  int offset, sum_units, shift_elements;
} way;

enum { QUARTETS = R16_PART / 4 }; // of a part

PG_INLINE vi times_offset(vi a, int offset) { return (vi)((rows)a << offset); }

PG_INLINE vi four_bytes(const int8_t *x) { return pair((const int16_t *)(const void *)x); }

// dots[j] = the sum over a part of codes less their offset times integers of nt columns: bytes times a factor.
PG_INLINE void dot(int nt, int run, int offset, const uint8_t (*w)[TILE_ROWS][4], const int8_t *x, int width,
                   const int32_t *factors, const int32_t *less, const r16_fetch *fetch, fetching *at, vi (*dots)[2]) {
#if defined(__AVX512VNNI__)
  UNROLL for (int j = 0; j < nt; j++) dots[j][0] = dots[j][1] =
      offset < 0 ? vi_zero() : times_offset(vi_set1(less[j]), offset);
  UNROLL for (int p = 0; p < QUARTETS; p++, x += 4 * width) {
    fetch_two(fetch, at);
    const vi w0 = vi_load(w[p][0]), w1 = vi_load(w[p][VF_N]);
    UNROLL for (int j = 0; j < nt; j++) {
      const vi b = four_bytes(x + 4 * j);
      dots[j][0] = _mm512_dpbusd_epi32(dots[j][0], w0, b);
      STAYS(dots[j][0]);
      dots[j][1] = _mm512_dpbusd_epi32(dots[j][1], w1, b);
      STAYS(dots[j][1]);
    }
  }
  UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < 2; i++) dots[j][i] =
      vi_mul(dots[j][i], vi_set1(factors[j]));
#elif VF_N == 8
  vi words[NT][2];
  UNROLL for (int p = 0; p < QUARTETS; p++, x += 4 * width) {
    if (p % 2 == 0) fetch_two(fetch, at);
    const vi w0 = vi_load(w[p][0]), w1 = vi_load(w[p][VF_N]);
    UNROLL for (int j = 0; j < nt; j++) {
      const vi b = four_bytes(x + 4 * j);
      const vi a0 = _mm256_maddubs_epi16(w0, b), a1 = _mm256_maddubs_epi16(w1, b);
      words[j][0] = p % run ? _mm256_add_epi16(words[j][0], a0) : a0;
      STAYS(words[j][0]);
      words[j][1] = p % run ? _mm256_add_epi16(words[j][1], a1) : a1;
      STAYS(words[j][1]);
    }
    if (p % run < run - 1) continue;
    UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < 2; i++) {
      const vi whole = _mm256_madd_epi16(words[j][i], vi_set1(factors[j]));
      dots[j][i] = p < run ? whole : vi_add(dots[j][i], whole);
    }
  }
  if (offset >= 0) UNROLL for (int j = 0; j < nt; j++) {
      const vi all = times_offset(vi_set1(less[j]), offset);
      dots[j][0] = vi_add(dots[j][0], all);
      dots[j][1] = vi_add(dots[j][1], all);
    }
#endif
}

// acc += shifts times sums of columns, n of them in turn.
PG_INLINE void add_shifts(int nt, float (*acc)[2][VF_N], const float (*shift)[TILE_ROWS],
                          const float (*sums)[R16_WIDTH], int n) {
  vf v[NT][2];
  UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < 2; i++) v[j][i] = vf_load(acc[j][i]);
  for (int s = 0; s < n; s++) {
    const vf of[2] = {vf_load(shift[s]), vf_load(shift[s] + VF_N)};
    UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < 2; i++) v[j][i] =
        vf_fma(of[i], vf_set1(sums[s][j]), v[j][i]);
  }
  UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < 2; i++) vf_store(acc[j][i], v[j][i]);
}

PG_INLINE vi int_at(const int32_t *p) { return vi_load(p); }
PG_INLINE void put_int(int32_t *p, vi a) { memcpy(p, &a, sizeof a); }

// A panel times nt columns, over a run.
PG_INLINE void tile(int nt, kind k, way f, const r16_panel *w, r16_byte_columns x, target t) {
  const r16_fetch fetch = w->next;
  fetching at = fetching_of(&fetch);
  const int width = (nt + 3) / 4 * 4;
  struct {
    _Alignas(64) float acc[NT][2][VF_N];
    int32_t sum[NT][2][VF_N], part[NT][2][VF_N]; // of integers: the sum so far, and the first part of a unit
  } room, *own = &room;
  __asm__("" : "+r"(own) : : "memory"); // in memory: there are no registers left
  UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < 2; i++) {
    vf_store(own->acc[j][i], vf_zero());
    if (k.whole) put_int(own->sum[j][i], vi_zero());
  }
  const r16_numbers *of = x.numbers;
  const float(*x_sums)[R16_WIDTH] = of->sums[f.shift_elements == R16_UNIT];
  if (k.whole && f.shift_elements) add_shifts(nt, own->acc, w->shifts, x_sums, (int)w->n_units * k.halves);
  const float(*scale)[TILE_ROWS] = w->scales;
  for (int64_t u = 0; u < w->n_units; u++) {
    if (!k.whole && f.shift_elements) add_shifts(nt, own->acc, w->shifts + u, x_sums + u, 1);
    UNROLL for (int h = 0; h < 2; h++, x.bytes += 4 * QUARTETS * width) {
      const int64_t part = 2 * u + h;
      vi dots[NT][2];
      IN_ORDER;
      dot(nt, k.run, f.offset, w->codes + part * QUARTETS, x.bytes, width, of->factors[part], of->less[part], &fetch,
          &at, dots);
      IN_ORDER;
      UNROLL for (int j = 0; j < nt; j++) {
        UNROLL for (int i = 0; i < 2; i++) {
          vi v = dots[j][i];
          if (k.halves == 1 && h == 0) {
            put_int(own->part[j][i], v);
            continue;
          }
          if (k.halves == 1) v = vi_add(v, int_at(own->part[j][i]));
          if (k.whole) {
            const vi scaled = vi_mul(v, int_at(w->whole[k.halves == 1 ? u : part] + i * VF_N));
            put_int(own->sum[j][i], vi_add(int_at(own->sum[j][i]), scaled));
          } else {
            vf_store(own->acc[j][i], vf_fma(vf_of_vi(v), vf_load(scale[0] + i * VF_N), vf_load(own->acc[j][i])));
          }
        }
        IN_ORDER;
      }
      if (!k.whole && (k.halves == 2 || h == 1)) scale++;
    }
    if (!k.whole || (u + 1) % f.sum_units) continue;
    UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < 2; i++) {
      vf_store(own->acc[j][i],
               vf_fma(vf_of_vi(int_at(own->sum[j][i])), vf_load(scale[0] + i * VF_N), vf_load(own->acc[j][i])));
      put_int(own->sum[j][i], vi_zero());
    }
    scale++;
  }
  UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < 2; i++)
      vf_store(t.to + j * t.ld + i * VF_N,
               vf_fma(vf_load(own->acc[j][i]), vf_set1(of->steps[j]), vf_load(t.before[j] + i * VF_N)));
}

// The kinds of tiles: number, halves, whole, run.
#if defined(__AVX512VNNI__)
#define KINDS(X, nt) X(nt, 0, 1, 0, 4) X(nt, 1, 2, 0, 4) X(nt, 2, 1, 1, 4) X(nt, 3, 2, 1, 4)
enum { N_KINDS = 4 };
#else
#define KINDS(X, nt)                                                                                                   \
  X(nt, 0, 1, 0, 4)                                                                                                    \
  X(nt, 1, 2, 0, 4) X(nt, 2, 1, 1, 4) X(nt, 3, 1, 1, 1) X(nt, 4, 2, 1, 4) X(nt, 5, 2, 1, 2) X(nt, 6, 2, 1, 1)
enum { N_KINDS = 7 };
#endif

// They are not inlined: in a larger function the sums would not stay in registers.
#define TILE(nt, n, halves, whole, run)                                                                                \
  static __attribute__((noinline)) void tile_##nt##_##n(way f, const r16_panel *w, r16_byte_columns x, target t) {     \
    tile(nt, (kind){halves, whole, run}, f, w, x, t);                                                                  \
  }
#define X(nt) KINDS(TILE, nt)
EACH_NT(X)
#undef X

#define AT(nt, n, halves, whole, run) [n][(nt)-1] = tile_##nt##_##n,
#define X(nt) KINDS(AT, nt)
static void (*const tiles[N_KINDS][NT])(way f, const r16_panel *w, r16_byte_columns x, target t) = {EACH_NT(X)};
#undef X

// How many quartets' products are summed in 16 bits: a power of two; 0 when one product alone may not fit.
PG_INLINE int run_of(r16_format f) {
#if defined(__AVX512VNNI__)
  return QUARTETS;
#else
  const int fit = 32767 / (2 * 127 * r16_bytes_of(f).max);
  return fit >= QUARTETS ? QUARTETS : PG_MIN(fit, 2);
#endif
}

int R16_INT8_FN(r16_suits)(r16_format f) { return run_of(f) > 0; }

static const r16_totals nothing;

void R16_INT8_FN(r16_multiply)(float *to, int64_t ld, const r16_totals before, r16_panel *w, const r16_columns *c,
                               const r16_product *p, int64_t group, int64_t strip) {
  static const kind kinds[N_KINDS] = {
#define HAS(nt, n, halves, whole, run) [n] = {halves, whole, run},
      KINDS(HAS, )
#undef HAS
  };
  const kind k = {r16_halves(p->f), r16_sums_units(p->f), run_of(p->f)};
  const way f = {r16_bytes_of(p->f).offset, r16_sum_units(p->f), r16_shift_elements(p->f)};
  int i = 0;
  while (kinds[i].halves != k.halves || kinds[i].whole != k.whole || kinds[i].run != k.run) i++;
  const int64_t n = r16_group_columns(c, group);
  for (int64_t j = 0; j < n && before; j++) // prefetched, because they have left the cache since the last strip
    for (int e = 0; e < TILE_ROWS; e += 16) __builtin_prefetch(before[j] + e);
  tiles[i][n - 1](f, w, r16_bytes_at(c, group, strip), (target){to, ld, before ? before : nothing});
  w->next = r16_no_fetch(w);
}
