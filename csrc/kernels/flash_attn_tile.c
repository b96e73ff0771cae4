// Attention of many query rows. Lanes are query rows: scores, maxima and sums need no operation across lanes, and both
// products (K with q, V with the weights) are the same one: broadcast an element of K or V, multiply with rows in
// lanes.
#include "flash_attn.h"

enum { BATCH = VF_N == 16 ? 8 : 4 }; // result rows at a time

// out[i][lanes] = out[i][lanes] * keep[lanes] + sum over l < n_l of a[i * i_step + l * l_step] * b[l][lanes]; NV
// registers of lanes, I rows. keep NULL: out is only written.
PG_INLINE void product_part(float *out, const float *keep, const float *a, int64_t i_step, int64_t l_step,
                            const float *b, int64_t n_l, int I, int NV) {
  const int64_t ld = NV * VF_N;
  vf acc[BATCH][2];
  for (int i = 0; i < I; i++)
    for (int v = 0; v < NV; v++) acc[i][v] = vf_zero();
  for (int64_t l = 0; l < n_l; l++, a += l_step, b += ld) {
    vf x[2];
    for (int v = 0; v < NV; v++) x[v] = vf_load(b + v * VF_N);
    for (int i = 0; i < I; i++)
      for (int v = 0; v < NV; v++) acc[i][v] = vf_fma(vf_set1(a[i * i_step]), x[v], acc[i][v]);
  }
  for (int i = 0; i < I; i++)
    for (int v = 0; v < NV; v++) {
      float *o = out + i * ld + v * VF_N;
      vf_store(o, keep ? vf_fma(vf_load(o), vf_load(keep + v * VF_N), acc[i][v]) : acc[i][v]);
    }
}

PG_INLINE void product(float *out, const float *keep, const float *a, int64_t i_step, int64_t l_step, const float *b,
                       int64_t n_i, int64_t n_l, int NV) {
  int64_t i = 0;
  for (; i + BATCH <= n_i; i += BATCH)
    product_part(out + i * NV * VF_N, keep, a + i * i_step, i_step, l_step, b, n_l, BATCH, NV);
  for (; i < n_i; i++) product_part(out + i * NV * VF_N, keep, a + i * i_step, i_step, l_step, b, n_l, 1, NV);
}

// Scores -> exp(score - top); keep: what the results so far are multiplied with as the tops rise.
PG_INLINE void exponentials(const attention *a, float *s, const float *bias, int n, const state *st, float *keep,
                            int NV) {
  const int64_t ld = NV * VF_N;
  for (int64_t v = 0; v < ld; v += VF_N) {
    const vf old = vf_load(st->top + v);
    vf top = old;
    for (int i = 0; i < n; i++) {
      vf x = vf_load(s + i * ld + v);
      if (a->cap > 0) x = vf_set1(a->cap) * vf_tanh(x);
      if (bias) x += vf_load(bias + i * ld + v);
      vf_store(s + i * ld + v, x);
      top = vf_max(x, top);
    }
    vf_store(st->top + v, top);
    top = vf_if_lt(vf_set1(-3e38f), top, top, vf_zero()); // nothing visible yet
    vf part = vf_zero();
    for (int i = 0; i < n; i++) {
      const vf e = vf_exp_below(vf_load(s + i * ld + v) - top);
      vf_store(s + i * ld + v, e);
      part += e;
    }
    const vf factor = vf_exp_below(old - top);
    vf_store(keep + v, factor);
    vf_store(st->sum + v, vf_fma(vf_load(st->sum + v), factor, part));
  }
}

static void to_buffer(const pg_tensor *x, const char *data, pg_to_f32 to_f32, float *buf, const uint8_t *keys,
                      int n_keys) {
  for (int i = 0; i < n_keys; i++) to_f32(data + keys[i] * x->nb[1], buf + i * x->ne[0], x->ne[0]);
}

PG_INLINE void attend(const attention *a, const tile *t, const scratch *w, const state *st, int64_t first, int64_t last,
                      int NV) {
  const int64_t ld = NV * VF_N;
  memset(w->q, 0, (size_t)(a->d * ld) * sizeof(float)); // lanes without a row compute something harmless
  memset(w->bias, 0, (size_t)(KEYS * ld) * sizeof(float));
  for (int r = 0; r < t->n; r++) {
    const float *q = tile_query(a, t, r);
    for (int64_t c = 0; c < a->d; c++) w->q[c * ld + r] = q[c] * a->scale;
  }
  for (int64_t j = first; j < last; j += KEYS) {
    uint8_t keys[KEYS];
    int n_keys;
    float keep[TILE];
    const enum visibility seen = tile_mask(a, t, j, (int)PG_MIN(KEYS, last - j), w, 1, ld, keys, &n_keys);
    if (seen == HIDDEN) continue;
    to_buffer(a->k, tile_kv(a->k, t) + j * a->k->nb[1], a->k_to_f32, w->kv, keys, n_keys);
    product(w->s, NULL, w->kv, a->d, 1, w->q, n_keys, a->d, NV);
    exponentials(a, w->s, seen == MIXED ? w->bias : NULL, n_keys, st, keep, NV);
    to_buffer(a->v, tile_kv(a->v, t) + j * a->v->nb[1], a->v_to_f32, w->kv, keys, n_keys);
    product(st->out, keep, w->kv, 1, a->dv, w->s, a->dv, n_keys, NV);
  }
}

void PG_FN(attend_tile)(const attention *a, const tile *t, const scratch *w, const state *st, int64_t first,
                        int64_t last) {
  if (a->tile == VF_N)
    attend(a, t, w, st, first, last, 1);
  else
    attend(a, t, w, st, first, last, 2);
}
