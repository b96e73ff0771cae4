// mul_mat and mul_mat_id of repacked weights (r16.h): a matrix keeps the type and the shape of the tensor that was
// repacked, its data is the repacked copy, its nb means nothing. A matrix for each index of dimension 2 (mul_mat_id),
// one after another.
#include "experts.h"
#include "r16/product.h"

// Sources of mul_mat_r16 and mul_mat_half. All after COLUMNS may be absent: what norms the columns, what is added to
// the products, and up to two more matrices times the same columns with their results; or, where the results are
// silu(gate) * up, one more, of which `dst` is the result.
enum { WEIGHTS, COLUMNS, NORM, OTHER, WEIGHTS_1, RESULT_1, WEIGHTS_2, RESULT_2, MAX_PRODUCTS = 3 };
enum { STORE, EPS }; // parameters

PG_INLINE int64_t up64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

PG_INLINE int64_t columns_of(const pg_task *t) { return pg_n_rows(&t->dst); }

PG_INLINE int64_t x_bytes(const pg_task *t) { return up64(PG_FN(r16_x_bytes)(t->src[0].ne[0], pg_n_rows(&t->src[1]))); }

// A way through many columns: gemm.c in some numbers.
typedef struct gemm {
  int64_t (*work)(const r16_product *p, int nth);
  void (*columns)(const r16_product *p, r16_queue *q, char *work);
  void (*multiply)(const r16_product *p, int n_p, r16_queue *q, char *work, int ith);
} gemm;

#define GEMM(isa) ((gemm){PG_CAT(r16_gemm_work, __, isa), PG_CAT(r16_gemm_columns, __, isa), PG_CAT(r16_gemm, __, isa)})

PG_INLINE gemm gemm_for(int64_t n_cols) {
#if defined(__AMX_BF16__)
  if (n_cols <= R16_FIXED) return GEMM(avx512vnni);
#endif
  return GEMM(PG_ISA);
}

// Enough for all columns, or fewer.
static int64_t gemm_bytes(r16_product p, int nth) {
  int64_t bytes = gemm_for(p.n_cols).work(&p, nth);
#if defined(__AMX_BF16__)
  p.n_cols = PG_MIN(p.n_cols, R16_FIXED);
  bytes = PG_MAX(bytes, gemm_for(p.n_cols).work(&p, nth));
#endif
  return up64(bytes);
}

int64_t PG_FN(mul_mat_r16_work)(const pg_task *t, int nth) {
  const r16_product p = {.k = t->src[WEIGHTS].ne[0], .n_cols = columns_of(t)};
  return p.n_cols <= R16_FEW ? x_bytes(t) : gemm_bytes(p, nth);
}

typedef struct products {
  r16_product p[MAX_PRODUCTS];
  int n;
} products;

PG_INLINE products products_of(const pg_task *t, int stored) {
  const pg_tensor *norm = &t->src[NORM];
  const int store = (int)t->param[STORE];
  products s = {.n = 0};
  for (int i = 0; i < MAX_PRODUCTS; i++) {
    const pg_tensor *a = &t->src[i ? WEIGHTS_1 + 2 * (i - 1) : WEIGHTS];
    if (!a->data) break;
    s.p[s.n++] = (r16_product){.f = stored ? (r16_format){.type = (int)a->type} : *r16_find(a->type),
                               .w = (const uint8_t *)a->data,
                               .row_bytes = stored ? a->nb[1] : 0,
                               .k = a->ne[0],
                               .m = a->ne[1],
                               .b = &t->src[COLUMNS],
                               .norm = (const float *)norm->data,
                               .eps = t->param[EPS],
                               .y = i && store != R16_SWIGLU ? &t->src[RESULT_1 + 2 * (i - 1)] : &t->dst,
                               .n_cols = columns_of(t)};
  }
  if (store == R16_ADD) {
    s.p[0].store = R16_ADD;
    s.p[0].other = &t->src[OTHER];
  } else if (store == R16_SWIGLU) {
    s.p[1].store = R16_SWIGLU;
    s.p[1].other = &t->dst;
  }
  return s;
}

static int multiply(const pg_task *t, int ith, int nth, int stored) {
  const products s = products_of(t, stored);
  const int n_p = (int)t->param[STORE] == R16_SWIGLU ? 2 : 1; // at a time
  r16_queue q = r16_queue_of(t, nth);
  if (!stored && s.p[0].n_cols <= R16_FEW) {
    r16_x *x = (r16_x *)t->work;
    PG_FN(r16_quantize)(s.p, x, ith, nth);
    pg_sync(t, nth);
    for (int i = 0; i < s.n; i += n_p) PG_FN(r16_gemv)(s.p + i, n_p, x, &q);
  } else {
    const gemm g = gemm_for(s.p[0].n_cols);
    g.columns(s.p, &q, t->work);
    for (int i = 0; i < s.n; i += n_p) g.multiply(s.p + i, n_p, &q, t->work, ith);
  }
  return PG_OK;
}

int PG_FN(mul_mat_r16_any)(const pg_task *t, int ith, int nth) { return multiply(t, ith, nth, 0); }

// mul_mat_half: matrices of F16 or BF16 as they are stored, rows a whole number of units long, times many columns.
int PG_FN(mul_mat_half_any)(const pg_task *t, int ith, int nth) { return multiply(t, ith, nth, 1); }

int64_t PG_FN(mul_mat_half_work)(const pg_task *t, int nth) {
  return gemm_bytes(
      (r16_product){.row_bytes = t->src[WEIGHTS].nb[1], .k = t->src[WEIGHTS].ne[0], .n_cols = columns_of(t)}, nth);
}

// Scratch: the columns of each thread by expert, the columns in integers, what a product of many columns needs.
int64_t PG_FN(mul_mat_id_r16_work)(const pg_task *t, int nth) {
  const r16_product p = {.k = t->src[WEIGHTS].ne[0], .n_cols = columns_of(t)};
  return nth * pg_sorted_bytes(t) + x_bytes(t) + (p.n_cols <= R16_FEW ? 0 : gemm_bytes(p, nth));
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
  PG_FN(r16_quantize)(&p, x, ith, nth);
  pg_sync(t, nth);
  for (int64_t e = 0; e < n_expert; e++) {
    const int32_t start = e ? end[e - 1] : 0;
    p.w = (const uint8_t *)a->data + e * matrix;
    p.list = list + start;
    p.n_cols = end[e] - start;
    if (p.n_cols > R16_FEW) {
      pg_sync(t, nth); // the scratch of the expert before is free
      const gemm g = gemm_for(p.n_cols);
      g.columns(&p, &q, work);
      g.multiply(&p, 1, &q, work, ith);
    } else if (p.n_cols) {
      PG_FN(r16_gemv)(&p, 1, x, &q);
    }
  }
  return PG_OK;
}
