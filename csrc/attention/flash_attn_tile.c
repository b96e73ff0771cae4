// Attention of many query rows. The lanes of a vector are query rows, so scores, maxima and sums need no operation
// across lanes. Both products (K with q, V with the weights) are computed in the same way: broadcast an element of K or
// V, and multiply it with all lanes.
#include "attention/flash_attn_tile.h"
#include "attention/tile_product.h"

PG_INLINE void dots_of(const attention *a, const scratch *w, const block *b, const char *k, float *s, fetch next,
                       int NV) {
  PG_FN(attention_rows)(a->k, k, b, w->kv, a->dp);
  tile_dots(s, w->kv, a->dp, w->q, b->n, a->d, next, NV);
}

// A product with the values in w->kv, either in columns or in rows.
PG_INLINE void mix(const attention *a, const scratch *w, float *out, enum sums how, int in_columns, const float *s,
                   int first, int last, fetch next, int NV) {
  const float *lanes = s + first * NV * VF_N;
  if (in_columns) {
    tile_product(out, how, w->kv + first, 1, KEYS, lanes, a->dv, last - first, next, NV);
  } else {
    tile_product(out, how, w->kv + first * a->dvp, 0, a->dvp, lanes, a->dv, last - first, next, NV);
  }
}

PG_INLINE void values_add(const attention *a, const tile *t, const scratch *w, const block *b, const char *v,
                          const float *s, const state *st, int ends, fetch next, int NV) {
  const int in_columns = a->transposed && b->run;
  if (in_columns) {
    PG_FN(attention_columns)(a->v, v, b, w->kv);
  } else if (a->transposed) {
    PG_FN(attention_turned)(a->v, v, b, w->kv, a->dvp);
  } else {
    PG_FN(attention_rows)(a->v, v, b, w->kv, a->dvp);
  }
  if (ends) {
    mix(a, w, st->out, SUMS_ADD, in_columns, s, 0, b->n, next, NV);
    return;
  }
  uint32_t rows;
  for (int i = 0, last; i < b->n; i = last) {
    last = group_end(b, i, &rows);
    mix(a, w, st->out_part, SUMS_ON, in_columns, s, i, last, next, NV);
    end_groups(st->out, st->out_part, a->dv, rows, NV);
  }
}

#define OF_REGISTERS(NV)                                                                                               \
  static void scores_##NV(const attention *a, const scratch *w, const block *b, const char *k, float *s, fetch next) { \
    dots_of(a, w, b, k, s, next, NV);                                                                                  \
  }                                                                                                                    \
  static void values_##NV(const attention *a, const tile *t, const scratch *w, const block *b, const char *v,          \
                          const float *s, const state *st, int ends, fetch next) {                                     \
    values_add(a, t, w, b, v, s, st, ends, next, NV);                                                                  \
  }
OF_REGISTERS(1)
OF_REGISTERS(2)

static void tile_scores(const attention *a, const tile *t, const scratch *w, const sight *x, pg_range blocks, float *s,
                        float *top) {
  put_queries(a, t, w, a->tile);
  if (a->tile == VF_N) {
    walk_scores(a, t, w, x, blocks, s, top, 1, scores_1);
  } else {
    walk_scores(a, t, w, x, blocks, s, top, 2, scores_2);
  }
}

static void tile_weights(const attention *a, const tile *t, const block *b, float *s, const float *top) {
  if (a->tile == VF_N) {
    weigh(b, s, top, NULL, 1);
  } else {
    weigh(b, s, top, NULL, 2);
  }
}

static void tile_values(const attention *a, const tile *t, const scratch *w, const sight *x, float *s, int are_scores,
                        const state *st) {
  if (a->tile == VF_N) {
    walk_values(a, t, w, x, s, are_scores, st, 1, values_1);
  } else {
    walk_values(a, t, w, x, s, are_scores, st, 2, values_2);
  }
}

const attend PG_FN(attend_tile) = {tile_scores, tile_weights, tile_values};
