// Solve A X = B for X, A lower or upper triangular. dst may be B: no restrict.
#include "kernel.h"

enum { WIDTH = 4 }; // registers of columns at a time

// Columns from `at` on, N registers of them (0: one column), of one matrix. Rows are solved from the first one on, or,
// when A is upper triangular, from the last one on.
PG_INLINE void solve(const pg_task *t, pg_idx m, int64_t at, int N) {
  const pg_tensor *a = &t->src[0], *b = &t->src[1], *x = &t->dst;
  const int lower = t->param[1] != 0; // parameters: left, lower, uni
  const int64_t step = x->nb[1] / 4, n = a->ne[1];
  const float *x0 = (const float *)pg_row_at(x, 0, m.i2, m.i3) + at;
  for (int64_t row = 0; row < n; row++) {
    const int64_t i = lower ? row : n - 1 - row, first = lower ? 0 : i + 1, last = lower ? i : n;
    const float *pa = (const float *)pg_row_at(a, i, m.i2, m.i3), *px = x0 + first * step;
    const float *pb = (const float *)pg_row_at(b, i, m.i2, m.i3) + at;
    float *y = (float *)pg_row_at(x, i, m.i2, m.i3) + at;
    if (N == 0) {
      float sum = *pb;
      for (int64_t k = first; k < last; k++, px += step) sum -= pa[k] * *px;
      *y = sum / pa[i];
      continue;
    }
    vf acc[WIDTH];
    for (int j = 0; j < N; j++) acc[j] = vf_load(pb + j * VF_N);
    for (int64_t k = first; k < last; k++, px += step)
      for (int j = 0; j < N; j++) acc[j] = vf_fma(vf_set1(-pa[k]), vf_load(px + j * VF_N), acc[j]);
    for (int j = 0; j < N; j++) vf_store(y + j * VF_N, acc[j] / vf_set1(pa[i]));
  }
}

int PG_FN(solve_tri_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *x = &t->dst;
  const int64_t n = x->ne[0], width = WIDTH * VF_N, blocks = (n + width - 1) / width;
  const pg_range r = pg_share(blocks * x->ne[2] * x->ne[3], ith, nth);
  for (int64_t u = r.first; u < r.last; u++) {
    const int64_t m = u / blocks;
    const pg_idx i = {0, m % x->ne[2], m / x->ne[2]};
    int64_t at = u % blocks * width;
    const int64_t end = PG_MIN(n, at + width);
    if (end - at == width) {
      solve(t, i, at, WIDTH);
      continue;
    }
    for (; at + VF_N <= end; at += VF_N) solve(t, i, at, 1);
    for (; at < end; at++) solve(t, i, at, 0);
  }
  return PG_OK;
}
