// The product of a panel of weights in blocks with a group of columns, in the order of sums.h: the bits of gemv.c.
#include "products/gemm/columns.h"
#include "products/gemm/fixed_columns.h"
#include "products/gemm/fixed_dot.h"
#include "products/gemm/fixed_pairs.h"
#include "products/r16/round.h"

_Static_assert((int)KC == (int)R16_RUN, "a strip is a run");

// A panel times nt columns, over a run.
PG_INLINE void tile(int nt, const r16_panel *w, const r16_run *columns, const target *t) {
  const r16_fetch f = w->next;
  r16_run x = *columns;
  fetching at = fetching_of(&f);
  const int width = (nt + 3) / 4 * 4;
  _Alignas(64) float room[NT][TILE_VECTORS][VF_N];
  float(*acc)[TILE_VECTORS][VF_N] = room;
  __asm__("" : "+r"(acc) : : "memory"); // in memory: there are no registers left
  UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < TILE_VECTORS; i++) vf_store(acc[j][i], vf_zero());
  const int16_t(*ints)[TILE_ROWS][2] = w->ints;
  const float(*shift)[TILE_ROWS] = w->shifts;
  const float *x_sums = x.sums[w->shift_elements == R16_UNIT];
  for (int64_t e = 0; e < w->n_sums; e++) {
    if (w->n_shifts) {
      vf v[NT][TILE_VECTORS];
      UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < TILE_VECTORS; i++) v[j][i] = vf_load(acc[j][i]);
      for (int64_t n = 0; n < w->n_shifts; n++, shift++, x_sums += R16_WIDTH) {
        vf of[TILE_VECTORS];
        UNROLL for (int i = 0; i < TILE_VECTORS; i++) of[i] = vf_load(shift[0] + i * VF_N);
        UNROLL for (int j = 0; j < nt; j++) {
          const vf b = vf_set1(x_sums[j]);
          UNROLL for (int i = 0; i < TILE_VECTORS; i++) v[j][i] = vf_fma(of[i], b, v[j][i]);
        }
      }
      UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < TILE_VECTORS; i++) vf_store(acc[j][i], v[j][i]);
    }
    IN_ORDER;
    vi sum[NT][TILE_VECTORS];
    UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < TILE_VECTORS; i++) sum[j][i] = vi_zero();
    for (int64_t i = 0; i < w->pairs; i += 2, ints += 2, x.ints += 4 * width)
      dot_two_pairs(nt, sum, ints, x.ints, width, &f, &at);
    IN_ORDER;
    vf scale[TILE_VECTORS];
    UNROLL for (int i = 0; i < TILE_VECTORS; i++) scale[i] = vf_load(w->scales[e] + i * VF_N);
    UNROLL for (int j = 0; j < nt; j++) {
      UNROLL for (int i = 0; i < TILE_VECTORS; i++)
          vf_store(acc[j][i], vf_fma(vf_of_vi(sum[j][i]), scale[i], vf_load(acc[j][i])));
      IN_ORDER;
    }
  }
  UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < TILE_VECTORS; i++) vf_store(
      t->to + j * t->ld + i * VF_N, vf_fma(vf_load(acc[j][i]), vf_set1(x.steps[j]), vf_load(t->before[j] + i * VF_N)));
}

// They are not inlined: in a larger function the sums would not stay in registers.
#define TILE(nt)                                                                                                       \
  static __attribute__((noinline)) void tile_##nt(const r16_panel *w, const r16_run *columns, const target *t) {       \
    tile(nt, w, columns, t);                                                                                           \
  }
EACH_NT(TILE)

#define X(nt) tile_##nt,
static void (*const tiles[NT])(const r16_panel *w, const r16_run *columns, const target *t) = {EACH_NT(X)};
#undef X

static const r16_totals nothing;

void PG_FN(r16_multiply_runs)(float *to, int64_t ld, const r16_totals before, const r16_panel *w, const r16_columns *c,
                              const r16_product *p, int64_t group, int64_t strip) {
  const r16_run x = r16_run_of(c, group, strip);
  const int64_t n = r16_group_columns(c, group);
  for (int64_t j = 0; j < n && before; j++) // prefetched, because they have left the cache since the last strip
    for (int i = 0; i < TILE_ROWS; i += 16) __builtin_prefetch(before[j] + i);
  tiles[n - 1](w, &x, &(target){to, ld, before ? before : nothing});
}

// The sum of 16 integers.
#if VF_N == 4
PG_INLINE int32_t sum_of_16(const int16_t *q) { return vaddlvq_s16(vld1q_s16(q)) + vaddlvq_s16(vld1q_s16(q + 8)); }
#else
PG_INLINE int32_t sum_of_16(const int16_t *q) {
  const __m256i s = _mm256_madd_epi16(_mm256_loadu_si256((const __m256i *)q), _mm256_set1_epi16(1));
  __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
}
#endif

void PG_FN(r16_put_runs)(const r16_columns *c, const r16_product *p, r16_share share) {
  const r16_quad g = r16_quad_of(c, p, share);
  for (int64_t s = share.first; s < share.last && g.n; s++) {
    const int64_t k0 = s * c->strip, n = r16_strip_elements(c, s);
    const r16_run to = r16_run_of(c, share.group, s);
    int16_t four[R16_QUAD][KC];
    for (int j = 0; j < R16_QUAD; j++) {
      const int64_t column = share.column + j;
      float x[KC];
      if (j < g.n) r16_get(x, p, &g, j, k0, n);
      const r16_step step = j >= g.n  ? (r16_step){0, 0}
                            : p->fast ? r16_rounded(x, n, r16_rounds_units(p->f))
                                      : r16_step_of(x, n);
      to.steps[column] = step.d;
      if (step.inv == 0) {
        memset(four[j], 0, sizeof four[j]);
      } else {
        put_ints(four[j], x, step.inv, n);
      }
      for (int64_t u = 0; u < n / R16_UNIT; u++) {
        const int32_t first = sum_of_16(four[j] + u * R16_UNIT), second = sum_of_16(four[j] + u * R16_UNIT + 16);
        to.sums[0][2 * u * R16_WIDTH + column] = (float)first;
        to.sums[0][(2 * u + 1) * R16_WIDTH + column] = (float)second;
        to.sums[1][u * R16_WIDTH + column] = (float)(first + second);
      }
    }
    put_4_columns(to.ints + share.column * 2, four, to.width, n / 2);
  }
}
