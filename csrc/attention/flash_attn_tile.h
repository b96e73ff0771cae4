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

// Finish the scores of a block: cap them, apply the mask, and keep the largest of each row.
PG_INLINE void finish_scores(const attention *a, const block *b, const scratch *w, float *s, float *top, int NV) {
  const int64_t ld = NV * VF_N;
  for (int64_t v = 0; v < ld; v += VF_N) {
    vf most = vf_load(top + v);
    for (int i = 0; i < b->n; i++) {
      vf x = vf_load(s + i * ld + v);
      if (a->cap > 0) x = vf_set1(a->cap) * vf_tanh(x);
      if (b->biased) {
        const vf bias = vf_load(w->bias + i * ld + v);
        x = vf_masked(x + bias, bias);
      }
      vf_store(s + i * ld + v, x);
      most = vf_max(x, most);
    }
    vf_store(top + v, most);
  }
}

// The largest scores of VF_N rows, 0 for rows that see no key.
PG_INLINE vf tops_of(const float *top) {
  const vf x = vf_load(top);
  return vf_if_lt(vf_set1(-3e38f), x, x, vf_zero());
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

// The two products of a block. The first one writes the scores of its keys to s. The second one adds its values times
// the weights s to the sums. `ends`: all groups end with the block, and begin with it. `next` is prefetched meanwhile.
typedef void (*scores_of)(const attention *a, const scratch *w, const block *b, const char *k, float *s, fetch next);
typedef void (*values_of)(const attention *a, const tile *t, const scratch *w, const block *b, const char *v,
                          const float *s, const state *st, int ends, fetch next);

// Compute scores of blocks, see `attend`.
PG_INLINE void walk_scores(const attention *a, const tile *t, const scratch *w, const sight *x, pg_range blocks,
                           float *s, float *top, int NV, scores_of scores) {
  const char *k = tile_kv(a->k, t);
  for (int64_t i = blocks.first; i < blocks.last; i++) {
    const block *b = x->blocks + i;
    float *to = s + i * KEYS * NV * VF_N;
    if (i == blocks.first) {
      fetch first = block_at(a->k, 0, k, b->keys[0]);
      fetch_up_to(&first, 1, 1);
    }
    block_bias(a, t, b, w, 1, NV * VF_N);
    scores(a, w, b, k, to, block_at(a->k, 0, k, b->keys[b->n - 1] + 1));
    finish_scores(a, b, w, to, top, NV);
  }
}

// Turn the scores of a block into weights. With `sum`, add them to it.
PG_INLINE void weigh(const block *b, float *s, const float *top, float *sum, int NV) {
  const int64_t ld = NV * VF_N;
  for (int64_t v = 0; v < ld; v += VF_N) {
    const vf most = tops_of(top + v);
    vf all = vf_zero();
    for (int i = 0; i < b->n; i++) {
      const vf e = vf_exp_below(vf_load(s + i * ld + v) - most);
      vf_store(s + i * ld + v, e);
      all += e;
    }
    if (sum) vf_store(sum + v, vf_load(sum + v) + all);
  }
}

// Whether the groups of all rows end with the block.
static inline int all_end(const tile *t, const block *b) { return !(tile_rows(t) & ~(b->ends[b->n - 1] | b->done)); }

// Lanes r .. of rows, as a mask.
PG_INLINE vbits lanes_of(uint32_t rows, int64_t r) {
  int32_t lanes[VF_N];
  vbits x;
  for (int i = 0; i < VF_N; i++) lanes[i] = -(int32_t)(rows >> (r + i) & 1);
  memcpy(&x, lanes, sizeof x);
  return x;
}

// Add the parts of these rows to their sums, n of each, and begin new ones.
PG_INLINE void end_groups(float *sums, float *parts, int64_t n, uint32_t rows, int NV) {
  const int64_t ld = NV * VF_N;
  for (int64_t v = 0; v < ld; v += VF_N) {
    const vbits lanes = lanes_of(rows, v);
    for (int64_t c = v; c < n * ld; c += ld) {
      const vf part = vf_load(parts + c);
      vf_store(sums + c, vf_load(sums + c) + vf_pick(lanes, part, vf_zero()));
      vf_store(parts + c, vf_pick(lanes, vf_zero(), part));
    }
  }
}

// Sum up the weights of a block whose groups end anywhere.
PG_INLINE void sum_weights(const block *b, const float *s, const state *st, int NV) {
  const int64_t ld = NV * VF_N;
  uint32_t rows;
  for (int i = 0, last; i < b->n; i = last) {
    last = group_end(b, i, &rows);
    for (int64_t v = 0; v < ld; v += VF_N) {
      vf part = vf_load(st->sum_part + v);
      for (int k = i; k < last; k++) part += vf_load(s + k * ld + v);
      vf_store(st->sum_part + v, part);
    }
    end_groups(st->sum, st->sum_part, 1, rows, NV);
  }
}

// Add all values to the sums, see `attend`.
PG_INLINE void walk_values(const attention *a, const tile *t, const scratch *w, const sight *x, float *s,
                           int are_scores, const state *st, int NV, values_of add_values) {
  const char *v = tile_kv(a->v, t);
  int ended = 1; // no group is under way
  for (int64_t i = 0; i < x->n_blocks; i++, s += KEYS * NV * VF_N) {
    const block *b = x->blocks + i;
    const int end = all_end(t, b), ends = ended && end && !b->split;
    if (i == 0) {
      fetch first = block_at(a->v, a->transposed, v, b->keys[0]);
      fetch_up_to(&first, 1, 1);
    }
    if (are_scores) weigh(b, s, st->top, ends ? st->sum : NULL, NV);
    if (!are_scores || !ends) sum_weights(b, s, st, NV);
    add_values(a, t, w, b, v, s, st, ends, next_v(a, v, b->keys[0]));
    ended = end;
  }
}
