// mul_mat_id: column (u, t) of y[m, n_used, n_tokens] = matrix ids[u, t] of as[k, m, n_expert] times column
// (u % n_b, t) of b[k, n_b, n_tokens]. The columns are sorted by expert, so that each matrix is read once.
// Its gradients: by the columns, which meet the matrices transposed; and by the matrices, sums of outer products.
#include "products/deal.h"
#include "products/experts.h"
#include "products/product.h"

enum { PARTS = 8 }; // per thread

// The columns of all experts: `list` has them by expert, `end` where each one's end.
typedef struct experts {
  int32_t *list, *end;
  int64_t n;
  float *work; // of this thread, for products
} experts;

// Scratch per thread: the columns by expert, then what products need.
static int64_t experts_bytes(const pg_tensor *ids, int64_t n_expert) {
  return pg_plus(pg_sorted_bytes_of(ids, n_expert), PG_FN(product_work)());
}

static int experts_of(const pg_task *t, int64_t n_expert, char *scratch, experts *x) {
  const pg_tensor *ids = &t->src[2];
  x->list = (int32_t *)scratch;
  x->end = x->list + ids->ne[0] * ids->ne[1];
  x->n = n_expert;
  x->work = (float *)(scratch + pg_sorted_bytes_of(ids, n_expert));
  return pg_sort_columns_of(t, n_expert, x->list, x->end);
}

// Make a product that of expert e, whose columns are `first` .. first + n - 1 in the list.
typedef void (*of_expert)(const pg_task *t, const experts *x, int64_t e, int64_t first, int64_t n, pg_product *p);

static void multiply_experts(const pg_task *t, int nth, const experts *x, pg_product p, of_expert of) {
  int64_t n_busy = 0; // experts that have columns
  for (int64_t e = 0; e < x->n; e++) n_busy += x->end[e] > (e ? x->end[e - 1] : 0);
  int64_t i = pg_next_chunk(t, nth, -1), first = 0; // chunks are numbered through all experts
  for (int64_t e = 0; e < x->n; e++) {
    const int64_t start = e ? x->end[e - 1] : 0;
    if (start == x->end[e]) continue;
    of(t, x, e, start, x->end[e] - start, &p);
    const pg_cut cut = PG_FN(product_cut)(&p, nth == 1 ? 1 : (PARTS * nth + n_busy - 1) / n_busy);
    const pg_deal d = pg_deal_of(cut.n_rows * cut.n_cols, nth);
    for (; i < first + d.n_chunks; i = pg_next_chunk(t, nth, i)) {
      const pg_range r = pg_chunk_of(&d, i - first);
      for (int64_t j = r.first; j < r.last; j++) PG_FN(product)(&p, pg_part_of(&p, &cut, j), x->work);
    }
    first += d.n_chunks;
  }
}

int64_t PG_FN(mul_mat_id_work)(const pg_task *t, int nth) {
  return pg_times(nth, experts_bytes(&t->src[2], t->src[0].ne[2]));
}

static void matrix_of_expert(const pg_task *t, const experts *x, int64_t e, int64_t first, int64_t n, pg_product *p) {
  p->a_rows = p->a->data + e * p->a->nb[2];
  p->list = x->list + first;
  p->n_cols = n;
}

static int multiply(const pg_task *t, int ith, int nth, int across) {
  const pg_tensor *y = &t->dst, *as = &t->src[0], *b = &t->src[1], *ids = &t->src[2];
  experts x;
  const int status = experts_of(t, as->ne[2], t->work + ith * experts_bytes(ids, as->ne[2]), &x);
  if (status) return status; // all threads see the same ids
  const pg_product p = {
      .a = as,
      .b = b,
      .across = across,
      .k = as->ne[!across ? 0 : 1],
      .m = as->ne[across ? 0 : 1],
      .b_first = b->data,
      .y_first = y->data,
      .n = {ids->ne[0], ids->ne[1]},
      .n_b = b->ne[1],
      .nb_b = {b->nb[1], b->nb[2], 0},
      .nb_y = {y->nb[1], y->nb[2], 0},
  };
  multiply_experts(t, nth, &x, p, matrix_of_expert);
  return PG_OK;
}

int PG_FN(mul_mat_id_any)(const pg_task *t, int ith, int nth) { return multiply(t, ith, nth, 0); }

// y[k, u, t] = sum over m of as[k, m, ids[u, t]] b[m, u, t]
int PG_FN(mul_mat_id_back_b_any)(const pg_task *t, int ith, int nth) { return multiply(t, ith, nth, 1); }

// y[k, m, e] = sum over e's columns (u, t) of a[k, u % n_a, t] b[m, u, t]. All columns are copied, by expert: a's
// first, then b's.
int64_t PG_FN(mul_mat_id_back_as_work)(const pg_task *t, int nth) {
  const pg_tensor *y = &t->dst, *ids = &t->src[2];
  const int64_t columns = pg_times(pg_times(ids->ne[0], ids->ne[1]), pg_times(4, pg_plus(y->ne[0], y->ne[1])));
  return pg_plus(pg_times(nth, experts_bytes(ids, y->ne[2])), columns);
}

static void columns_of_expert(const pg_task *t, const experts *x, int64_t e, int64_t first, int64_t n, pg_product *p) {
  p->k = n;
  p->a_rows = p->a->data + first * p->a->nb[1];
  p->b_first = p->b->data + first * p->b->nb[0];
  p->y_first = t->dst.data + e * t->dst.nb[2];
}

int PG_FN(mul_mat_id_back_as_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0], *b = &t->src[1], *ids = &t->src[2];
  const int64_t k = y->ne[0], m = y->ne[1], n_used = ids->ne[0], n = n_used * ids->ne[1];
  const int64_t bytes = experts_bytes(ids, y->ne[2]);
  experts x;
  const int status = experts_of(t, y->ne[2], t->work + ith * bytes, &x);
  if (status) return status;
  float *as = (float *)(t->work + nth * bytes), *bs = as + n * k;
  const pg_range r = pg_share(n, ith, nth);
  for (int64_t i = r.first; i < r.last; i++) {
    const int64_t u = x.list[i] % n_used, token = x.list[i] / n_used;
    memcpy(as + i * k, a->data + u % a->ne[1] * a->nb[1] + token * a->nb[2], (size_t)k * sizeof *as);
    const char *column = b->data + u * b->nb[1] + token * b->nb[2];
    for (int64_t j = 0; j < m; j++) bs[i * m + j] = *(const float *)(column + j * b->nb[0]);
  }
  for (int64_t e = 0; ith == 0 && e < x.n; e++)
    if (x.end[e] == (e ? x.end[e - 1] : 0)) memset(y->data + e * y->nb[2], 0, (size_t)y->nb[2]);
  pg_sync(t, nth);
  const pg_tensor rows = {.data = (char *)as, .ne = {k, n, 1, 1}, .nb = {4, 4 * k, 4 * k * n, 4 * k * n}};
  const pg_tensor columns = {.data = (char *)bs, .ne = {n, m, 1, 1}, .nb = {4 * m, 4, 4 * m * n, 4 * m * n}};
  const pg_product p = {
      .a = &rows,
      .b = &columns,
      .across = 1,
      .m = k,
      .n_cols = m,
      .n = {m, 1},
      .n_b = m,
      .nb_b = {4, 0, 0},
      .nb_y = {y->nb[1], 0, 0},
  };
  multiply_experts(t, nth, &x, p, columns_of_expert);
  return PG_OK;
}
