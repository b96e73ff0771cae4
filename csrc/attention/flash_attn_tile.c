// Attention of many query rows. The lanes of a vector are query rows, so scores, maxima and sums need no operation
// across lanes. Both products (K with q, V with the weights) are computed in the same way: broadcast an element of K or
// V, and multiply it with all lanes.
#include "attention/flash_attn_tile.h"
#include "attention/tile_product.h"

PG_INLINE int n_registers(const attention *a) { return a->tile == VF_N ? 1 : 2; }

static void tile_scores(const attention *a, const scratch *w, const block *b, const char *k, fetch next) {
  PG_FN(attention_rows)(a->k, k, b, w->kv, a->dp);
  tile_product(w->s, NULL, w->kv, 1, a->dp, w->q, b->n, a->d, next, n_registers(a));
}

static void tile_add_values(const attention *a, const scratch *w, const block *b, const char *v, const float *keep,
                            const state *st, fetch next) {
  if (a->transposed) {
    PG_FN(attention_columns)(a->v, v, b, w->kv);
    tile_product(st->out, keep, w->kv, 1, KEYS, w->s, a->dv, b->n, next, n_registers(a));
  } else {
    PG_FN(attention_rows)(a->v, v, b, w->kv, a->dvp);
    tile_product(st->out, keep, w->kv, 0, a->dvp, w->s, a->dv, b->n, next, n_registers(a));
  }
}

void PG_FN(attend_tile)(const attention *a, const tile *t, const scratch *w, const state *st, int64_t first,
                        int64_t last) {
  put_queries(a, t, w, a->tile);
  if (n_registers(a) == 1) {
    walk_keys(a, t, w, st, first, last, 1, tile_scores, tile_add_values);
  } else {
    walk_keys(a, t, w, st, first, last, 2, tile_scores, tile_add_values);
  }
}
