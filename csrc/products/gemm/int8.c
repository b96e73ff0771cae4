// The product of a panel of codes with a group of columns in bytes (int8.h).
#define R16_INT8
#include "products/gemm/int8_columns.h"
#include "products/gemm/fixed_dot.h"

// Keep loads and stores in their order: gcc would load what does not fit the registers early.
#define IN_ORDER __asm__ volatile("" : : : "memory")

// The place of a tile's results, whose columns lie `ld` apart; and the sums before them, if any, TILE_ROWS apart.
typedef struct target {
  float *to;
  int64_t ld;
  const float (*before)[TILE_ROWS];
} target;

// How the sums of a type are computed: sums of a unit; whether there are shifts; log2 of the offset of codes, -1 for
// none; and, without VNNI, how many quartets' products fit 16 bits.
typedef struct way {
  int halves, shifts, offset, run;
} way;

PG_INLINE vi times_offset(vi a, int offset) { return (vi)((rows)a << offset); }

// dots[j] = the sum over `n` quartets of codes times bytes of nt columns, from -offset times the columns' sums.
PG_INLINE void dot(int nt, way f, int n, const uint8_t (*w)[TILE_ROWS][4], const int8_t *x, int width,
                   const int32_t *sums, const r16_fetch *fetch, fetching *at, vi (*dots)[2]) {
#if defined(__AVX512VNNI__)
  UNROLL for (int j = 0; j < nt; j++) dots[j][0] = dots[j][1] =
      f.offset < 0 ? vi_zero() : times_offset(vi_set1(sums[j]), f.offset);
  UNROLL for (int p = 0; p < n; p++, x += 4 * width) {
    fetch_two(fetch, at);
    const vi w0 = vi_load(w[p][0]), w1 = vi_load(w[p][VF_N]);
    UNROLL for (int j = 0; j < nt; j++) {
      const vi b = pair((const int16_t *)(const void *)(x + 4 * j));
      dots[j][0] = _mm512_dpbusd_epi32(dots[j][0], w0, b);
      STAYS(dots[j][0]);
      dots[j][1] = _mm512_dpbusd_epi32(dots[j][1], w1, b);
      STAYS(dots[j][1]);
    }
  }
#elif VF_N == 8
  const vi ones = _mm256_set1_epi16(1);
  vi words[NT][2];
  UNROLL for (int p = 0; p < n; p++, x += 4 * width) {
    if (p % 2 == 0) fetch_two(fetch, at);
    const vi w0 = vi_load(w[p][0]), w1 = vi_load(w[p][VF_N]);
    UNROLL for (int j = 0; j < nt; j++) {
      const vi b = pair((const int16_t *)(const void *)(x + 4 * j));
      const vi a0 = _mm256_maddubs_epi16(w0, b), a1 = _mm256_maddubs_epi16(w1, b);
      words[j][0] = p % f.run ? _mm256_add_epi16(words[j][0], a0) : a0;
      STAYS(words[j][0]);
      words[j][1] = p % f.run ? _mm256_add_epi16(words[j][1], a1) : a1;
      STAYS(words[j][1]);
    }
    if (p % f.run < f.run - 1) continue;
    UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < 2; i++) {
      const vi whole = _mm256_madd_epi16(words[j][i], ones);
      dots[j][i] = p < f.run ? whole : vi_add(dots[j][i], whole);
    }
  }
  if (f.offset >= 0) UNROLL for (int j = 0; j < nt; j++) {
      const vi less = times_offset(vi_set1(sums[j]), f.offset);
      dots[j][0] = vi_add(dots[j][0], less);
      dots[j][1] = vi_add(dots[j][1], less);
    }
#endif
}

// A panel times nt columns, over a strip.
PG_INLINE void tile(int nt, int halves, int run, way f, const r16_panel *w, r16_byte_columns x, target t) {
  f.halves = halves, f.run = run;
  const r16_fetch fetch = w->next;
  fetching at = fetching_of(&fetch);
  const int width = (nt + 3) / 4 * 4, per = R16_QUARTETS / halves, whole = halves == 1;
  _Alignas(64) float room[NT][2][VF_N];
  float(*acc)[2][VF_N] = room;
  __asm__("" : "+r"(acc) : : "memory"); // in memory: there are no registers left
  UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < 2; i++)
      vf_store(acc[j][i], vf_load(t.before[j] + i * VF_N));
  const r16_numbers *of = x.numbers;
  for (int64_t s = 0; s < w->n_units * halves; s++, x.bytes += 4 * per * width) {
    IN_ORDER;
    vi dots[NT][2];
    dot(nt, f, per, w->codes + s * per, x.bytes, width, of->sums[whole][s], &fetch, &at, dots);
    IN_ORDER;
    UNROLL for (int j = 0; j < nt; j++) { // scales and shifts are loaded for each column: there are no registers left
      const vf d = vf_set1(of->steps[s / halves][j]);
      vf a0 = vf_load(acc[j][0]), a1 = vf_load(acc[j][1]);
      if (f.shifts) {
        const vf m = vf_set1(of->moments[whole][s][j]);
        a0 = vf_fma(m, vf_load(w->shifts[s]), a0);
        a1 = vf_fma(m, vf_load(w->shifts[s] + VF_N), a1);
      }
      vf_store(acc[j][0], vf_fma(vf_of_vi(dots[j][0]), vf_mul(d, vf_load(w->scales[s])), a0));
      vf_store(acc[j][1], vf_fma(vf_of_vi(dots[j][1]), vf_mul(d, vf_load(w->scales[s] + VF_N)), a1));
      IN_ORDER;
    }
  }
  UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < 2; i++)
      vf_store(t.to + j * t.ld + i * VF_N, vf_load(acc[j][i]));
}

// The kinds of tiles: number, halves, and without VNNI the run.
#if defined(__AVX512VNNI__)
#define KINDS(X, nt) X(nt, 0, 1, 8) X(nt, 1, 2, 8)
enum { N_KINDS = 2 };
#else
#define KINDS(X, nt) X(nt, 0, 1, 8) X(nt, 1, 1, 4) X(nt, 2, 1, 1) X(nt, 3, 2, 4) X(nt, 4, 2, 2) X(nt, 5, 2, 1)
enum { N_KINDS = 6 };
#endif

// They are not inlined: in a larger function the sums would not stay in registers.
#define TILE(nt, kind, halves, run)                                                                                    \
  static __attribute__((noinline)) void tile_##nt##_##kind(way f, const r16_panel *w, r16_byte_columns x, target t) {  \
    tile(nt, halves, run, f, w, x, t);                                                                                 \
  }
#define X(nt) KINDS(TILE, nt)
EACH_NT(X)
#undef X

#define AT(nt, kind, halves, run) [kind][(nt)-1] = tile_##nt##_##kind,
#define X(nt) KINDS(AT, nt)
static void (*const tiles[N_KINDS][NT])(way f, const r16_panel *w, r16_byte_columns x, target t) = {EACH_NT(X)};
#undef X

// How many quartets' products are summed in 16 bits: a power of two; 0 when one product alone may not fit.
PG_INLINE int run_of(r16_format f) {
#if defined(__AVX512VNNI__)
  return 8;
#else
  const int fit = 32767 / (2 * 127 * r16_bytes_of(f).max);
  return fit >= 8 && r16_halves(f) == 1 ? 8 : fit >= 4 ? 4 : PG_MIN(fit, 2);
#endif
}

int R16_INT8_FN(r16_suits)(r16_format f) { return run_of(f) > 0; }

static const r16_totals nothing;

void R16_INT8_FN(r16_multiply)(float *to, int64_t ld, const r16_totals before, r16_panel *w, const r16_columns *c,
                               const r16_product *p, int64_t group, int64_t strip) {
  static const struct {
    int halves, run;
  } kinds[N_KINDS] = {
#define HAS(nt, kind, halves, run) [kind] = {halves, run},
      KINDS(HAS, )
#undef HAS
  };
  const way f = {r16_halves(p->f), r16_head_bytes(p->f) == 64, r16_bytes_of(p->f).offset, run_of(p->f)};
  int kind = 0;
  while (kinds[kind].halves != f.halves || kinds[kind].run != f.run) kind++;
  const int64_t n = r16_group_columns(c, group);
  for (int64_t j = 0; j < n && before; j++) // prefetched, because they have left the cache since the last strip
    for (int i = 0; i < TILE_ROWS; i += 16) __builtin_prefetch(before[j] + i);
  tiles[kind][n - 1](f, w, r16_bytes_at(c, group, strip), (target){to, ld, before ? before : nothing});
  w->next = r16_no_fetch(w);
}
