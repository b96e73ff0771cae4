// mul_mat_id: column (u, t) of y[m, n_used, n_tokens] = matrix ids[u, t] of as[k, m, n_expert] times column
// (u % n_b, t) of b[k, n_b, n_tokens]. The columns are sorted by expert, so that each matrix is read once.
#include "products/deal.h"
#include "products/experts.h"
#include "products/product.h"

enum { PARTS = 8 }; // per thread

// Scratch per thread: the columns by expert, then what products need.
int64_t PG_FN(mul_mat_id_work)(const pg_task *t, int nth) {
  return pg_times(nth, pg_plus(pg_sorted_bytes(t), PG_FN(product_work)()));
}

int PG_FN(mul_mat_id_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *as = &t->src[0], *b = &t->src[1], *ids = &t->src[2];
  const int64_t n_expert = as->ne[2], n = ids->ne[0] * ids->ne[1];
  char *scratch = t->work + ith * (pg_sorted_bytes(t) + PG_FN(product_work)());
  int32_t *list = (int32_t *)scratch, *end = list + n;
  const int status = pg_sort_columns(t, list, end);
  if (status) return status; // all threads see the same ids
  pg_product p = {
      .a = as,
      .b = b,
      .k = as->ne[0],
      .m = as->ne[1],
      .b_first = b->data,
      .y_first = y->data,
      .n = {ids->ne[0], ids->ne[1]},
      .n_b = b->ne[1],
      .nb_b = {b->nb[1], b->nb[2], 0},
      .nb_y = {y->nb[1], y->nb[2], 0},
  };
  int64_t n_busy = 0; // experts that have columns
  for (int64_t e = 0; e < n_expert; e++) n_busy += end[e] > (e ? end[e - 1] : 0);
  int64_t i = pg_next_chunk(t, nth, -1), first = 0; // chunks are numbered through all experts
  for (int64_t e = 0; e < n_expert; e++) {
    const int32_t start = e ? end[e - 1] : 0;
    if (start == end[e]) continue;
    p.a_rows = as->data + e * as->nb[2];
    p.list = list + start;
    p.n_cols = end[e] - start;
    const pg_cut cut = PG_FN(product_cut)(&p, nth == 1 ? 1 : (PARTS * nth + n_busy - 1) / n_busy);
    const pg_deal d = pg_deal_of(cut.n_rows * cut.n_cols, nth);
    for (; i < first + d.n_chunks; i = pg_next_chunk(t, nth, i)) {
      const pg_range r = pg_chunk_of(&d, i - first);
      for (int64_t j = r.first; j < r.last; j++)
        PG_FN(product)(&p, pg_part_of(&p, &cut, j), (float *)(scratch + pg_sorted_bytes(t)));
    }
    first += d.n_chunks;
  }
  return PG_OK;
}
