// The product of a panel with a group of columns in fixed point.
#include "products/gemm/fixed_columns.h"
#include "products/r16/vec.h"

#define UNROLL _Pragma("GCC unroll 16")

#if VF_N == 16
PG_INLINE vi zero(void) { return _mm512_setzero_si512(); }
PG_INLINE vi pair(const int16_t *p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return _mm512_set1_epi32(v);
}
PG_INLINE vi dot_pairs(vi sum, vi a, vi b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
PG_INLINE vf vf_of_i32(vi a) { return _mm512_cvtepi32_ps(a); }
#else
PG_INLINE vi zero(void) { return _mm256_setzero_si256(); }
PG_INLINE vi pair(const int16_t *p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return _mm256_set1_epi32(v);
}
PG_INLINE vi dot_pairs(vi sum, vi a, vi b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
PG_INLINE vf vf_of_i32(vi a) { return _mm256_cvtepi32_ps(a); }
#endif

// Keep sums in their registers and additions in their order: gcc's own order does not fit the registers.
#if defined(PG_EMULATE)
#define STAYS(sum)
#else
#define STAYS(sum) __asm__("" : "+v"(sum))
#endif

// The place of a tile's results, whose columns lie `ld` apart; and the sums before them, if any, TILE_ROWS apart.
typedef struct target {
  float *to;
  int64_t ld;
  const float (*before)[TILE_ROWS];
} target;

// A panel times nt columns, over a strip. Columns lie as many apart as r16_fixed_of says.
PG_INLINE void tile(int nt, const r16_panel *w, const int16_t *x, const float *steps, int64_t pairs, target t) {
  const r16_fetch f = w->next;
  const char *next = f.at;
  int64_t left = f.run;
  const int width = (nt + 3) / 4 * 4;
  vi sum[NT][2];
  UNROLL for (int j = 0; j < nt; j++) sum[j][0] = sum[j][1] = zero();
  for (int64_t i = 0; i < pairs; i += 2) { // two pairs at a time share the instructions that do not multiply
    __builtin_prefetch(next);
    __builtin_prefetch(next + f.step);
    next += 2 * f.step;
    if ((left -= 2) == 0) {
      next += f.jump;
      left = f.run;
    }
    UNROLL for (int64_t e = i; e < i + 2; e++, x += 2 * width) {
      const vi w0 = vi_load(w->ints[e][0]), w1 = vi_load(w->ints[e][VF_N]);
      UNROLL for (int j = 0; j < nt; j++) {
        const vi b = pair(x + 2 * j);
        sum[j][0] = dot_pairs(sum[j][0], w0, b);
        STAYS(sum[j][0]);
        sum[j][1] = dot_pairs(sum[j][1], w1, b);
        STAYS(sum[j][1]);
      }
    }
  }
  UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < 2; i++) {
    const vf step = vf_mul(vf_load(w->steps + i * VF_N), vf_set1(steps[j]));
    vf_store(t.to + j * t.ld + i * VF_N, vf_fma(vf_of_i32(sum[j][i]), step, vf_load(t.before[j] + i * VF_N)));
  }
}

// A function for each number of columns, so that missing columns cost nothing. They are not inlined: in a larger
// function the sums would not stay in registers.
#define TILE(nt)                                                                                                       \
  static __attribute__((noinline)) void tile_##nt(const r16_panel *w, const int16_t *x, const float *steps,            \
                                                  int64_t pairs, target t) {                                           \
    tile(nt, w, x, steps, pairs, t);                                                                                   \
  }
#if VF_N == 16
#define COLUMNS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#else
#define COLUMNS(X) X(1) X(2) X(3) X(4)
#endif
COLUMNS(TILE)

#define X(nt) tile_##nt,
static void (*const tiles[NT])(const r16_panel *w, const int16_t *x, const float *steps, int64_t pairs,
                               target t) = {COLUMNS(X)};
#undef X

static const r16_totals nothing;

int64_t PG_FN(r16_columns_bytes)(const r16_product *p) {
  const r16_columns c = r16_columns_in(NULL, p);
  const int64_t column = pg_plus(pg_times(c.k, sizeof(int16_t)), pg_times(c.n_strips, sizeof(float)));
  return pg_times(pg_times(c.n_groups, R16_WIDTH), column);
}

void PG_FN(r16_multiply)(float *to, int64_t ld, const r16_totals before, r16_panel *w, const r16_columns *c,
                         const r16_product *p, int64_t group, int64_t strip) {
  const r16_fixed x = r16_fixed_of(c, group, strip);
  const int64_t n = r16_group_columns(c, group);
  for (int64_t j = 0; j < n && before; j++) // prefetched, because they have left the cache since the last strip
    for (int i = 0; i < TILE_ROWS; i += 16) __builtin_prefetch(before[j] + i);
  tiles[n - 1](w, x.ints, x.steps, r16_strip_elements(c, strip) / 2, (target){to, ld, before ? before : nothing});
  w->next = r16_no_fetch(w);
}
