// Steps of optimisers, over dense f32: dst is src[0], the weights. No element depends on another one.
#include "kernel.h"

enum { UNIT = 4096 }; // elements that threads share out

int PG_FN(opt_step_adamw_f32)(const pg_task *t, int ith, int nth) {
  const float *p = (const float *)t->src[4].data; // alpha, beta1, beta2, eps, wd, beta1h, beta2h
  float *w = (float *)t->dst.data, *m = (float *)t->src[2].data, *v = (float *)t->src[3].data;
  const float *g = (const float *)t->src[1].data;
  const int64_t n = t->dst.ne[0] * pg_n_rows(&t->dst);
  const vf b1 = vf_set1(p[1]), c1 = vf_set1((float)(1.0 - p[1])), b2 = vf_set1(p[2]), c2 = vf_set1((float)(1.0 - p[2]));
  const vf keep = vf_set1((float)(1.0 - (double)p[0] * p[4])), rate = vf_set1((float)((double)p[0] * p[5]));
  const vf b2h = vf_set1(p[6]), eps = vf_set1(p[3]);
  const pg_range r = pg_share((n + UNIT - 1) / UNIT, ith, nth);
  for (int64_t i = r.first * UNIT; i < PG_MIN(r.last * UNIT, n); i += VF_N) {
    const int few = n - i < VF_N ? (int)(n - i) : 0;
    const vf x = few ? vf_load_n(g + i, few) : vf_load(g + i), w0 = few ? vf_load_n(w + i, few) : vf_load(w + i);
    const vf m1 = vf_fma(few ? vf_load_n(m + i, few) : vf_load(m + i), b1, x * c1);
    const vf v1 = vf_fma(few ? vf_load_n(v + i, few) : vf_load(v + i), b2, x * x * c2);
    const vf w1 = w0 * keep - m1 * rate / (vf_sqrt(v1 * b2h) + eps);
    if (!few) {
      vf_store(m + i, m1);
      vf_store(v + i, v1);
      vf_store(w + i, w1);
      continue;
    }
    float tail[VF_N];
    vf_store(tail, m1);
    memcpy(m + i, tail, (size_t)few * sizeof(float));
    vf_store(tail, v1);
    memcpy(v + i, tail, (size_t)few * sizeof(float));
    vf_store(tail, w1);
    memcpy(w + i, tail, (size_t)few * sizeof(float));
  }
  return PG_OK;
}

int PG_FN(opt_step_sgd_f32)(const pg_task *t, int ith, int nth) {
  const float *p = (const float *)t->src[2].data, *g = (const float *)t->src[1].data; // alpha, wd
  float *w = (float *)t->dst.data;
  const int64_t n = t->dst.ne[0] * pg_n_rows(&t->dst);
  const float keep = (float)(1.0 - (double)p[0] * p[1]), rate = p[0];
  const pg_range r = pg_share((n + UNIT - 1) / UNIT, ith, nth);
  for (int64_t i = r.first * UNIT; i < PG_MIN(r.last * UNIT, n); i++) w[i] = w[i] * keep - g[i] * rate;
  return PG_OK;
}
