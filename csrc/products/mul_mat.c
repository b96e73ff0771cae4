// mul_mat: y[m, n, b2, b3] = rows of a[k, m, a2, a3] times columns of b[k, n, b2, b3]; a repeats along dimensions 2, 3.
// Columns that meet the same matrix of a (grouped-query attention) become one product, so that the matrix is read once.
// out_prod: the same for a[m, k, a2, a3] and b[n, k, b2, b3].
#include "products/deal.h"
#include "products/product.h"

enum { PARTS = 8 }; // per thread: several, so that a thread that was interrupted does fewer

int64_t PG_FN(mul_mat_work)(const pg_task *t, int nth) { return pg_times(nth, PG_FN(product_work)()); }

static void swap(int64_t *x) {
  const int64_t x0 = x[0];
  x[0] = x[1];
  x[1] = x0;
}

static int multiply(const pg_task *t, int ith, int nth, int across) {
  const pg_tensor *y = &t->dst, *a = &t->src[0];
  pg_tensor b = t->src[1];
  if (across) {
    swap(b.ne);
    swap(b.nb);
  }
  const int64_t r2 = b.ne[2] / a->ne[2], r3 = b.ne[3] / a->ne[3], n_mat = a->ne[2] * a->ne[3];
  float *work = (float *)(t->work + ith * PG_FN(product_work)());
  pg_product p = {
      .a = a,
      .b = &b,
      .across = across,
      .k = b.ne[0],
      .m = y->ne[0],
      .n_cols = b.ne[1] * r2 * r3,
      .n = {b.ne[1], r2},
      .n_b = b.ne[1],
      .nb_b = {b.nb[1], b.nb[2], b.nb[3]},
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
      p.b_first = b.data + i2 * r2 * b.nb[2] + i3 * r3 * b.nb[3];
      p.y_first = y->data + i2 * r2 * y->nb[2] + i3 * r3 * y->nb[3];
      pg_part part = pg_part_of(&p, &cut, i % parts);
      while (i + 1 < r.last && (i + 1) % cut.n_cols) part.cols.last = pg_part_of(&p, &cut, ++i % parts).cols.last;
      PG_FN(product)(&p, part, work);
    }
  }
  return PG_OK;
}

int PG_FN(mul_mat_any)(const pg_task *t, int ith, int nth) { return multiply(t, ith, nth, 0); }
int PG_FN(out_prod_any)(const pg_task *t, int ith, int nth) { return multiply(t, ith, nth, 1); }
