// mul_mat: y[m, n, b2, b3] = rows of a[k, m, a2, a3] times columns of b[k, n, b2, b3]; a repeats along dimensions 2, 3.
// Columns that meet the same matrix of a (grouped-query attention) become one product, so that the matrix is read once.
// out_prod: the same for a[m, k, a2, a3] and b[n, k, b2, b3].
#include "products/multiply.h"

int64_t PG_FN(mul_mat_work)(const pg_task *t, int nth) { return pg_times(nth, PG_FN(product_work)()); }

int PG_FN(mul_mat_any)(const pg_task *t, int ith, int nth) {
  return multiply_all(t, &t->src[0], t->src[1], 0, t->work, ith, nth);
}

int PG_FN(out_prod_any)(const pg_task *t, int ith, int nth) {
  return multiply_all(t, &t->src[0], t->src[1], 1, t->work, ith, nth);
}
