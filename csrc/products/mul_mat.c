// mul_mat: y[m, n, b2, b3] = rows of a[k, m, a2, a3] times columns of b[k, n, b2, b3]; a repeats along dimensions 2, 3.
// Columns that meet the same matrix of a (grouped-query attention) become one product, so that the matrix is read once.
#include "products/deal.h"
#include "products/product.h"

enum { PARTS = 8 }; // per thread: several, so that a thread that was interrupted does fewer

int64_t PG_FN(mul_mat_work)(const pg_task *t, int nth) { return nth * PG_FN(product_work)(); }

int PG_FN(mul_mat_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0], *b = &t->src[1];
  const int64_t r2 = b->ne[2] / a->ne[2], r3 = b->ne[3] / a->ne[3], n_mat = a->ne[2] * a->ne[3];
  float *work = (float *)(t->work + ith * PG_FN(product_work)());
  pg_product p = {
      .a = a,
      .b = b,
      .n_cols = b->ne[1] * r2 * r3,
      .n = {b->ne[1], r2},
      .n_b = b->ne[1],
      .nb_b = {b->nb[1], b->nb[2], b->nb[3]},
      .nb_y = {y->nb[1], y->nb[2], y->nb[3]},
  };
  const pg_cut cut = PG_FN(product_cut)(&p, nth == 1 ? 1 : (PARTS * nth + n_mat - 1) / n_mat);
  const int64_t parts = cut.n_rows * cut.n_cols;
  const pg_deal d = pg_deal_of(parts * n_mat, nth);
  for (int64_t c = pg_next_chunk(t, nth, -1); c < d.n_chunks; c = pg_next_chunk(t, nth, c)) {
    const pg_range r = pg_chunk_of(&d, c);
    for (int64_t i = r.first; i < r.last; i++) {
      const int64_t i2 = i / parts % a->ne[2], i3 = i / parts / a->ne[2];
      p.a_rows = a->data + i2 * a->nb[2] + i3 * a->nb[3];
      p.b_first = b->data + i2 * r2 * b->nb[2] + i3 * r3 * b->nb[3];
      p.y_first = y->data + i2 * r2 * y->nb[2] + i3 * r3 * y->nb[3];
      PG_FN(product)(&p, pg_part_of(&p, &cut, i % parts), work);
    }
  }
  return PG_OK;
}
