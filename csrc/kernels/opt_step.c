// Steps of optimisers, over dense f32: dst is src[0], the weights. No element depends on another one, or none outside
// of its block.
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

enum { BLOCK8 = 256 }; // elements of 8-bit moments that share a scale

typedef uint32_t vcount __attribute__((vector_size(sizeof(vf))));
typedef int8_t vcodes __attribute__((vector_size(VF_N)));

typedef struct adamw8 {
  vf b1, c1, b2, c2, keep, rate, b2h, eps;
  uint32_t seed;
} adamw8;

// A hash of the indices first, first + 1, ... and of the seed.
PG_INLINE vcount hash_of(uint32_t first, uint32_t seed) {
  vcount x;
  for (int i = 0; i < VF_N; i++) x[i] = first + (uint32_t)i + seed * 0x9e3779b9u;
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

PG_INLINE vf share_of(vcount x) { return __builtin_convertvector((vbits)x, vf) * vf_set1(0x1p-16f); }

PG_INLINE vf clamped(vf x, float low, float high) { return vf_min(vf_max(x, vf_set1(low)), vf_set1(high)); }

PG_INLINE void store_codes(int8_t *p, vf x) {
  const vcodes y = __builtin_convertvector(__builtin_convertvector(x, vbits), vcodes);
  memcpy(p, &y, sizeof y);
}

// The scale of a block whose largest value is `most`; 0: all elements count as 0. (NaN: an element is no finite
// number.)
static float scale8(float most, float n) { return most / n < 0x1p-126f ? 0 : most / n; }

// One block, see opt_step_adamw8 in pyggml/ops/opt_step.py. No fused operations: a moment that lies between two codes
// is rounded to the same one on all processors.
static void adamw8_block(const adamw8 *p, float *w, const float *g, int8_t *m8, int8_t *v8, float *scales,
                         uint32_t first) {
  float m[BLOCK8], v[BLOCK8];
  const vf old_m = vf_set1(scales[0]), old_v = vf_set1(scales[1]), one = vf_set1(1);
  vf most_m = vf_zero(), most_v = vf_zero(), lost = vf_zero();
  for (int i = 0; i < BLOCK8; i += VF_N) {
    const vf x = vf_load(g + i), k = vf_load_i8(m8 + i), l = vf_load_i8(v8 + i) + vf_set1(128), root = l * l * old_v;
    const vf m1 = k * vf_abs(k) * old_m * p->b1 + x * p->c1, v1 = root * root * p->b2 + x * x * p->c2;
    vf_store(w + i, vf_load(w + i) * p->keep - m1 * p->rate / (vf_sqrt(v1 * p->b2h) + p->eps));
    vf_store(m + i, m1);
    vf_store(v + i, v1);
    most_m = vf_max(most_m, vf_abs(m1));
    most_v = vf_max(most_v, v1);
    lost += (m1 - m1) + (v1 - v1); // 0 for finite numbers
  }
  const int finite = vf_sum(lost) == 0;
  const float new_m = finite ? scale8(vf_hmax(most_m), 127 * 127) : NAN;
  const float new_v = finite ? scale8(sqrtf(vf_hmax(most_v)), 255 * 255) : NAN;
  scales[0] = new_m;
  scales[1] = new_v;
  if (!(new_m > 0)) memset(m8, 0, BLOCK8);
  if (!(new_v > 0)) memset(v8, 0, BLOCK8);
  for (int i = 0; i < BLOCK8; i += VF_N) {
    const vcount hash = hash_of(first + (uint32_t)i, p->seed);
    if (new_m > 0) {
      const vf m1 = vf_load(m + i), x = vf_abs(m1) / vf_set1(new_m);
      const vf k = clamped(vf_floor(vf_sqrt(x)), 0, 126);
      const vf code = vf_if_lt(share_of(hash >> 16), (x - k * k) / (k + k + one), k + one, k);
      store_codes(m8 + i, vf_if_lt(m1, vf_zero(), -code, code));
    }
    if (new_v > 0) {
      const vf x = vf_sqrt(vf_load(v + i)) / vf_set1(new_v);
      const vf k = clamped(vf_floor(vf_sqrt(x)), 1, 254), low = k * k, up = (k + one) * (k + one);
      const vf chance = (x * x - low * low) / (up * up - low * low);
      store_codes(v8 + i, vf_if_lt(share_of(hash & 0xffff), chance, k + one, k) - vf_set1(128));
    }
  }
}

int PG_FN(opt_step_adamw8_f32)(const pg_task *t, int ith, int nth) {
  const float *p = (const float *)t->src[5].data; // those of opt_step_adamw, then the number of the step
  const adamw8 numbers = {
      .b1 = vf_set1(p[1]),
      .c1 = vf_set1((float)(1.0 - p[1])),
      .b2 = vf_set1(p[2]),
      .c2 = vf_set1((float)(1.0 - p[2])),
      .keep = vf_set1((float)(1.0 - (double)p[0] * p[4])),
      .rate = vf_set1((float)((double)p[0] * p[5])),
      .b2h = vf_set1(p[6]),
      .eps = vf_set1(p[3]),
      .seed = p[7] >= 0 && p[7] < 0x1p32f ? (uint32_t)p[7] : 0,
  };
  float *w = (float *)t->dst.data, *scales = (float *)t->src[4].data;
  const float *g = (const float *)t->src[1].data;
  int8_t *m = (int8_t *)t->src[2].data, *v = (int8_t *)t->src[3].data;
  const int64_t n = t->dst.ne[0] * pg_n_rows(&t->dst);
  const pg_range r = pg_share((n + BLOCK8 - 1) / BLOCK8, ith, nth);
  for (int64_t ib = r.first; ib < r.last; ib++) {
    const int64_t at = ib * BLOCK8, few = n - at;
    if (few >= BLOCK8) {
      adamw8_block(&numbers, w + at, g + at, m + at, v + at, scales + 2 * ib, (uint32_t)at);
      continue;
    }
    float own_w[BLOCK8] = {0}, own_g[BLOCK8] = {0};
    int8_t own_m[BLOCK8] = {0}, own_v[BLOCK8];
    memset(own_v, -128, sizeof own_v); // what lies behind the end is 0
    memcpy(own_w, w + at, (size_t)few * sizeof(float));
    memcpy(own_g, g + at, (size_t)few * sizeof(float));
    memcpy(own_m, m + at, (size_t)few);
    memcpy(own_v, v + at, (size_t)few);
    adamw8_block(&numbers, own_w, own_g, own_m, own_v, scales + 2 * ib, (uint32_t)at);
    memcpy(w + at, own_w, (size_t)few * sizeof(float));
    memcpy(m + at, own_m, (size_t)few);
    memcpy(v + at, own_v, (size_t)few);
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
