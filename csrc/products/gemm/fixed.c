// The product of a panel with a group of columns in fixed point.
#include "products/gemm/fixed_columns.h"
#include "products/gemm/fixed_dot.h"

// A panel times nt columns, over a strip. Columns lie as many apart as r16_fixed_of says.
PG_INLINE void tile(int nt, const r16_panel *w, const int16_t *x, const float *steps, int64_t pairs, const target *t) {
  const r16_fetch f = w->next;
  fetching at = fetching_of(&f);
  const int width = (nt + 3) / 4 * 4;
  vi sum[NT][TILE_VECTORS];
  UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < TILE_VECTORS; i++) sum[j][i] = vi_zero();
  for (int64_t i = 0; i < pairs; i += 2, x += 4 * width) dot_two_pairs(nt, sum, w->ints + i, x, width, &f, &at);
  UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < TILE_VECTORS; i++) {
    const vf of_rows = vf_mul(vf_of_vi(sum[j][i]), vf_load(w->steps + i * VF_N));
    vf_store(t->to + j * t->ld + i * VF_N, vf_fma(of_rows, vf_set1(steps[j]), vf_load(t->before[j] + i * VF_N)));
  }
}

// They are not inlined: in a larger function the sums would not stay in registers.
#define TILE(nt)                                                                                                       \
  static __attribute__((noinline)) void tile_##nt(const r16_panel *w, const int16_t *x, const float *steps,            \
                                                  int64_t pairs, const target *t) {                                    \
    tile(nt, w, x, steps, pairs, t);                                                                                   \
  }
EACH_NT(TILE)

#define X(nt) tile_##nt,
static void (*const tiles[NT])(const r16_panel *w, const int16_t *x, const float *steps, int64_t pairs,
                               const target *t) = {EACH_NT(X)};
#undef X

static const r16_totals nothing;

int64_t PG_FN(r16_columns_bytes)(const r16_product *p) {
  const r16_columns c = r16_columns_in(NULL, p);
  const int64_t floats = r16_in_runs(p) ? 1 + R16_RUN_SUMS : 1; // of a strip
  const int64_t column = pg_plus(pg_times(c.k, sizeof(int16_t)), pg_times(c.n_strips, floats * sizeof(float)));
  return pg_times(pg_times(c.n_groups, R16_WIDTH), column);
}

void PG_FN(r16_multiply)(float *to, int64_t ld, const r16_totals before, r16_panel *w, const r16_columns *c,
                         const r16_product *p, int64_t group, int64_t strip) {
  if (r16_in_runs(p)) {
    PG_FN(r16_multiply_runs)(to, ld, before, w, c, p, group, strip);
    r16_stop_fetch(&w->next, w);
    return;
  }
  const r16_fixed x = r16_fixed_of(c, group, strip);
  const int64_t n = r16_group_columns(c, group);
  for (int64_t j = 0; j < n && before; j++) // prefetched, because they have left the cache since the last strip
    for (int i = 0; i < TILE_ROWS; i += 16) __builtin_prefetch(before[j] + i);
  tiles[n - 1](w, x.ints, x.steps, r16_strip_elements(c, strip) / 2, &(target){to, ld, before ? before : nothing});
  r16_stop_fetch(&w->next, w);
}
