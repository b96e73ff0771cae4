// mul_mat and mul_mat_id of repacked weights (r16.h): src[0] keeps the type and the shape of the tensor that was
// repacked, its data is the repacked copy, its nb means nothing. A matrix for each index of dimension 2 (mul_mat_id),
// one after another.
#include "experts.h"
#include "r16/product.h"

PG_INLINE int64_t up64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

PG_INLINE int64_t columns_of(const pg_task *t) { return pg_n_rows(&t->dst); }

PG_INLINE int64_t x_bytes(const pg_task *t) { return up64(PG_FN(r16_x_bytes)(t->src[0].ne[0], pg_n_rows(&t->src[1]))); }

PG_INLINE int64_t gemm_bytes(const pg_task *t, int nth) {
  return up64(PG_FN(r16_gemm_work)(&(r16_product){.k = t->src[0].ne[0], .n_cols = columns_of(t)}, nth));
}

int64_t PG_FN(mul_mat_r16_work)(const pg_task *t, int nth) {
  return columns_of(t) <= R16_FEW ? x_bytes(t) : gemm_bytes(t, nth);
}

int PG_FN(mul_mat_r16_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *a = &t->src[0];
  const r16_product p = {.f = *r16_find(a->type),
                         .w = (const uint8_t *)a->data,
                         .k = a->ne[0],
                         .m = a->ne[1],
                         .b = &t->src[1],
                         .y = &t->dst,
                         .n_cols = columns_of(t)};
  r16_queue q = r16_queue_of(t, nth);
  if (p.n_cols <= R16_FEW) {
    r16_x *x = (r16_x *)t->work;
    PG_FN(r16_quantize)(p.b, x, ith, nth);
    pg_sync(t, nth);
    PG_FN(r16_gemv)(&p, x, &q);
  } else {
    PG_FN(r16_gemm)(&p, &q, t->work, ith);
  }
  return PG_OK;
}

// mul_mat_fixed: a matrix of F16 or BF16 as it is stored, rows a whole number of units long, times many columns.
PG_INLINE r16_product plain_product(const pg_task *t) {
  const pg_tensor *a = &t->src[0];
  return (r16_product){.f = {.type = (int)a->type},
                       .w = (const uint8_t *)a->data,
                       .row_bytes = a->nb[1],
                       .k = a->ne[0],
                       .m = a->ne[1],
                       .b = &t->src[1],
                       .y = &t->dst,
                       .n_cols = columns_of(t)};
}

int64_t PG_FN(mul_mat_fixed_work)(const pg_task *t, int nth) {
  const r16_product p = plain_product(t);
  return PG_FN(r16_gemm_work)(&p, nth);
}

int PG_FN(mul_mat_fixed_any)(const pg_task *t, int ith, int nth) {
  const r16_product p = plain_product(t);
  r16_queue q = r16_queue_of(t, nth);
  PG_FN(r16_gemm)(&p, &q, t->work, ith);
  return PG_OK;
}

// Scratch: the columns of each thread by expert, the columns in integers, what a product of many columns needs.
int64_t PG_FN(mul_mat_id_r16_work)(const pg_task *t, int nth) {
  return nth * pg_sorted_bytes(t) + x_bytes(t) + (columns_of(t) <= R16_FEW ? 0 : gemm_bytes(t, nth));
}

int PG_FN(mul_mat_id_r16_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *a = &t->src[0];
  const r16_format f = *r16_find(a->type);
  const int64_t n_expert = a->ne[2], matrix = r16_matrix_bytes(f, a->ne[0], a->ne[1]);
  int32_t *list = (int32_t *)(t->work + ith * pg_sorted_bytes(t)), *end = list + columns_of(t);
  r16_x *x = (r16_x *)(t->work + nth * pg_sorted_bytes(t));
  char *work = (char *)x + x_bytes(t);
  const int status = pg_sort_columns(t, list, end);
  if (status) return status; // all threads see the same ids
  r16_product p = {.f = f, .k = a->ne[0], .m = a->ne[1], .b = &t->src[1], .y = &t->dst};
  r16_queue q = r16_queue_of(t, nth);
  PG_FN(r16_quantize)(p.b, x, ith, nth);
  pg_sync(t, nth);
  for (int64_t e = 0; e < n_expert; e++) {
    const int32_t start = e ? end[e - 1] : 0;
    p.w = (const uint8_t *)a->data + e * matrix;
    p.list = list + start;
    p.n_cols = end[e] - start;
    if (p.n_cols > R16_FEW) {
      pg_sync(t, nth); // the scratch of the expert before is free
      PG_FN(r16_gemm)(&p, &q, work, ith);
    } else if (p.n_cols) {
      PG_FN(r16_gemv)(&p, x, &q);
    }
  }
  return PG_OK;
}
