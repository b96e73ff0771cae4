// Shared by the two kinds of attention of many query rows, in which lanes are query rows.
#pragma once
#include "attention/flash_attn.h"
#include "simd/units.h"

// Write the scaled queries, and clear the bias. Lanes without a row compute something harmless.
PG_INLINE void put_queries(const attention *a, const tile *t, const scratch *w, int64_t ld) {
  memset(w->q, 0, (size_t)(a->d * ld) * sizeof(float));
  memset(w->bias, 0, (size_t)(KEYS * ld) * sizeof(float));
  for (int r = 0; r < t->n; r++) {
    const float *q = tile_query(a, t, r);
    for (int64_t c = 0; c < a->d; c++) w->q[c * ld + r] = q[c] * a->scale;
  }
}

// Turn scores into exp(score - top). `keep` gets the factors for the results so far, because tops may have risen.
PG_INLINE void exponentials(const attention *a, float *s, const float *bias, int n, const state *st, float *keep,
                            int NV) {
  const int64_t ld = NV * VF_N;
  for (int64_t v = 0; v < ld; v += VF_N) {
    const vf old = vf_load(st->top + v);
    vf top = old;
    for (int i = 0; i < n; i++) {
      vf x = vf_load(s + i * ld + v);
      if (a->cap > 0) x = vf_set1(a->cap) * vf_tanh(x);
      if (bias) {
        const vf b = vf_load(bias + i * ld + v);
        x = vf_masked(x + b, b);
      }
      vf_store(s + i * ld + v, x);
      top = vf_max(x, top);
    }
    vf_store(st->top + v, top);
    top = vf_if_lt(vf_set1(-3e38f), top, top, vf_zero()); // no key was visible yet
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

// Memory to prefetch in the course of a product: the next block of K or V. It is requested bit by bit, because all at
// once would have to wait for memory. The hardware does not follow the rows of one head, which lie far apart.
typedef struct fetch {
  const char *data;
  int64_t n_rows, nb, bytes, done;
} fetch;

// The block of x that begins at `key`.
static fetch block_at(const pg_tensor *x, int transposed, const char *head, int64_t key) {
  const int64_t row = x->ne[0] / pg_block_size(x->type) * x->nb[0];
  if (transposed) return (fetch){head + key * x->nb[0], x->ne[1], x->nb[1], KEYS * x->nb[0], 0};
  return (fetch){head + key * x->nb[1], KEYS, x->nb[1], row, 0};
}

// The part of v that comes after the block at `key`. Rows of a transposed v are fetched for two blocks at a time, half
// of the rows in the course of each block.
static fetch next_v(const attention *a, const char *head, int64_t key) {
  if (!a->transposed) return block_at(a->v, 0, head, key + KEYS);
  const int64_t odd = key / KEYS % 2, half = a->dv / 2;
  fetch f = block_at(a->v, 1, head + odd * half * a->v->nb[1], key + (2 - odd) * KEYS);
  f.n_rows = odd ? a->dv - half : half;
  f.bytes *= 2;
  return f;
}

// Fetch rows in proportion to the work done: i of n results.
PG_INLINE void fetch_up_to(fetch *f, int64_t i, int64_t n) {
  for (; f->done * n < f->n_rows * i; f->done++)
    for (int64_t o = 0; o < f->bytes; o += 64) __builtin_prefetch(f->data + f->done * f->nb + o);
}

// The two products of a block. The first one writes the scores of its keys to w->s. The second one multiplies the
// weights, which have replaced the scores there, with the block's values, and adds the result so far times `keep`.
// `next` is prefetched meanwhile.
typedef void (*scores_of)(const attention *a, const scratch *w, const block *b, const char *k, fetch next);
typedef void (*values_of)(const attention *a, const scratch *w, const block *b, const char *v, const float *keep,
                          const state *st, fetch next);

// Walk the keys first .. last, block by block. The queries have been written before.
PG_INLINE void walk_keys(const attention *a, const tile *t, const scratch *w, const state *st, int64_t first,
                         int64_t last, int NV, scores_of scores, values_of add_values) {
  const char *k = tile_kv(a->k, t), *v = tile_kv(a->v, t);
  fetch k0 = block_at(a->k, 0, k, first), v0 = block_at(a->v, a->transposed, v, first);
  fetch_up_to(&k0, 1, 1);
  fetch_up_to(&v0, 1, 1);
  for (int64_t j = first; j < last; j += KEYS) {
    float keep[TILE];
    const block b = tile_block(a, t, j, last, w, 1, NV * VF_N);
    if (!b.n) continue;
    scores(a, w, &b, k, block_at(a->k, 0, k, j + KEYS));
    exponentials(a, w->s, b.biased ? w->bias : NULL, b.n, st, keep, NV);
    add_values(a, w, &b, v, keep, st, next_v(a, v, j));
  }
}
