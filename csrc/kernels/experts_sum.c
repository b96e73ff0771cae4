// experts_sum: y[n, n_columns] = sum over i of x[n, i, n_columns], in order. With weights, each term is multiplied by
// weights[0, i, n_columns]. With an `added` operand of y's shape, that is added. dst may be that operand: no restrict.
#include "kernel.h"

enum { UNIT = 512 }; // elements of a share of the work

int PG_FN(experts_sum_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *x = &t->src[PG_EXPERTS_ROWS], *w = &t->src[PG_EXPERTS_WEIGHTS];
  const pg_tensor *other = &t->src[PG_EXPERTS_ADDED];
  const int64_t n = y->ne[0], units = (n + UNIT - 1) / UNIT; // per column
  const pg_range r = pg_share(units * y->ne[1], ith, nth);
  for (int64_t u = r.first; u < r.last; u++) {
    const int64_t c = u / units, k0 = u % units * UNIT, k1 = PG_MIN(k0 + UNIT, n);
    const char *px = x->data + c * x->nb[2], *pw = w->data ? w->data + c * w->nb[2] : NULL;
    const float *po = other->data ? (const float *)(other->data + c * other->nb[1]) : NULL;
    float *py = (float *)(y->data + c * y->nb[1]);
    for (int64_t k = k0; k < k1; k += VF_N) {
      const int m = (int)PG_MIN(VF_N, k1 - k);
      vf sum = vf_zero();
      for (int64_t i = 0; i < x->ne[1]; i++) {
        const float *row = (const float *)(px + i * x->nb[1]) + k;
        vf v = m < VF_N ? vf_load_n(row, m) : vf_load(row);
        if (pw) v = vf_mul(v, vf_set1(*(const float *)(pw + i * w->nb[1])));
        sum = i ? vf_add(sum, v) : v;
      }
      if (po) sum = vf_add(sum, m < VF_N ? vf_load_n(po + k, m) : vf_load(po + k));
      float part[VF_N];
      vf_store(m < VF_N ? part : py + k, sum);
      if (m < VF_N) memcpy(py + k, part, m * sizeof *part);
    }
  }
  return PG_OK;
}
