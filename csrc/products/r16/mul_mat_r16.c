// mul_mat and mul_mat_id of repacked weights (r16.h), and of weights as they are stored: floats, or blocks that are
// repacked in passing. A repacked matrix keeps the type and the shape of the original tensor, and its data is the
// repacked copy. Of its nb only nb[2] is used, the bytes from one matrix of a stack to the next.
#include "products/experts.h"
#include "products/r16/repacked.h"
#include "products/r16/round.h"

PG_INLINE int is_gated(int store) { return store > R16_ADD; }

PG_INLINE int64_t up64(int64_t bytes) { return pg_plus(bytes, 63) / 64 * 64; }

PG_INLINE int64_t columns_of(const pg_task *t) { return pg_n_rows(&t->dst); }

PG_INLINE int64_t x_bytes(const pg_task *t) {
  return up64(R16_FN(r16_x_bytes)(t->src[0].ne[0], pg_n_rows(&t->src[1])));
}

// A product of many columns: products/gemm/gemm.c with one kind of numbers.
typedef struct gemm {
  int64_t (*work)(const r16_product *p, int nth);
  void (*columns)(const r16_product *p, r16_queue *q, char *work);
  void (*multiply)(const r16_product *p, int n_p, r16_queue *q, char *work, int ith);
} gemm;

#define GEMM(fn) ((gemm){fn(r16_gemm_work), fn(r16_gemm_columns), fn(r16_gemm)})

// For n products of the same columns.
PG_INLINE gemm gemm_for(const r16_product *p, int n) {
#if defined(PG_AMX)
  if (p->bf16) return p->n_cols > R16_NO_BF16 ? GEMM(R16_BF16_FN) : GEMM(R16_FN);
  int suits = p->n_cols > R16_NO_TILES;
  for (int i = 0; i < n; i++) suits = suits && r16_suits_tiles(p[i].f);
  if (suits) return GEMM(PG_FN);
#elif defined(PG_FAST)
  int suits = 1;
  for (int i = 0; i < n; i++) suits = suits && R16_INT8_FN(r16_suits)(p + i);
  if (suits) return GEMM(R16_INT8_FN);
#endif
  return GEMM(R16_FN); // the one that takes all products
}

// Scratch bytes, enough for all columns or fewer, in any way.
static int64_t gemm_bytes(const r16_product *p, int nth) {
  return up64(PG_MAX(GEMM(R16_FN).work(p, nth), gemm_for(p, 1).work(p, nth)));
}

// The field that says that a product has the fast form; and whether floats that are rounded (HALF) become bf16.
#if defined(PG_AMX)
#define IN_FAST_FORM bf16
enum { IN_BF16 = 1 };
#else
#define IN_FAST_FORM fast
enum { IN_BF16 = 0 };
#endif

PG_INLINE r16_product blocks_of(const pg_task *t, int fast) {
  const pg_tensor *a = &t->src[PG_MM_WEIGHTS];
  return (r16_product){.f = *r16_find(a->type), .IN_FAST_FORM = fast, .k = a->ne[0], .n_cols = columns_of(t)};
}

// The most columns that are few, for a product; and the least of that number for products in this form.
PG_INLINE int few_of(const r16_product *p) {
  const int few = r16_few(r16_unpacks_slowly(p->f));
#if defined(PG_FAST) && !defined(PG_AMX)
  if (p->fast && R16_INT8_FN(r16_suits)(p)) return PG_MIN(few, R16_BORDER(FEW_FAST));
#endif
  return few;
}
PG_INLINE int least_few(int fast) {
#if defined(PG_FAST) && !defined(PG_AMX)
  if (fast) return PG_MIN(r16_few(1), R16_BORDER(FEW_FAST));
#endif
  return r16_few(1);
}

// Scratch of products with each matrix of a stack. Each thread lists which columns meet which matrix (list_bytes). Then
// come the columns in integers, and what a product of many columns needs: by ids both, because experts get different
// numbers of columns; by place one of the two.
PG_INLINE int64_t list_bytes(const pg_task *t) {
  const int64_t n = columns_of(t);
  return pg_in_32_bits(n, up64(pg_times(pg_plus(n, t->src[PG_MM_WEIGHTS].ne[2]), sizeof(int32_t))));
}
// By place, each matrix meets as many columns as the others.
PG_INLINE r16_product one_of_stack(const pg_task *t, int fast) {
  r16_product p = blocks_of(t, fast);
  p.n_cols /= t->src[PG_MM_WEIGHTS].ne[2];
  return p;
}
static int64_t work_by_place(const pg_task *t, int nth, int fast) {
  const r16_product one = one_of_stack(t, fast);
  const int64_t n = t->src[PG_MM_WEIGHTS].ne[2], few = PG_MIN(one.n_cols, r16_few(0)); // of a Var there may be fewer
  const int64_t x = up64(R16_FN(r16_x_bytes)(one.k, pg_times(few, n)));
  const int64_t alone = one.n_cols <= least_few(fast) ? 0 : pg_times(PG_MIN(nth, n), gemm_bytes(&one, 1)),
                together = one.n_cols <= least_few(fast) ? 0 : gemm_bytes(&one, nth);
  return pg_plus(pg_times(nth, list_bytes(t)), PG_MAX(x, PG_MAX(alone, together)));
}
static int64_t work_by_id(const pg_task *t, int nth, int fast) {
  const r16_product p = blocks_of(t, fast);
  const int64_t many = p.n_cols <= least_few(fast) ? 0 : gemm_bytes(&p, nth);
  return pg_plus(pg_times(nth, list_bytes(t)), pg_plus(x_bytes(t), many));
}

static int64_t work_of(const pg_task *t, int nth, int fast) {
  if (t->src[PG_MM_WEIGHTS].ne[2] > 1) return work_by_place(t, nth, fast);
  const r16_product p = blocks_of(t, fast);
  return pg_plus(p.n_cols <= r16_few(0) ? x_bytes(t) : 0, p.n_cols <= least_few(fast) ? 0 : gemm_bytes(&p, nth));
}

int64_t PG_FN(mul_mat_r16_work)(const pg_task *t, int nth) { return work_of(t, nth, 0); }
#if defined(PG_FAST)
int64_t PG_FN(mul_mat_r16_fast_work)(const pg_task *t, int nth) { return work_of(t, nth, 1); }
#endif

// Let p take the results of the product before it as its gate.
PG_INLINE void gate(r16_product *p, const pg_task *t) {
  p->store = (int)t->param[PG_MM_STORE];
  p->alpha = (float)t->param[PG_MM_ALPHA];
  p->limit = (float)t->param[PG_MM_LIMIT];
  p->other = &t->dst;
}

typedef struct products {
  r16_product p[PG_MM_MAX];
  int n;
} products;

// What the matrices are. HALF: F16 or BF16 as they are stored, which are rounded: to bf16 where there are tiles,
// otherwise to fixed point.
enum { REPACKED, STORED, HALF };

// The elements of a row, filled up with zeros.
PG_INLINE int64_t whole_units(int64_t k) { return (k + R16_UNIT - 1) / R16_UNIT * R16_UNIT; }

PG_INLINE products products_of(const pg_task *t, int form, int fast) {
  const pg_tensor *norm = &t->src[PG_MM_NORM];
  const int store = (int)t->param[PG_MM_STORE];
  products s = {.n = 0};
  for (int i = 0; i < PG_MM_MAX; i++) {
    const pg_tensor *a = &t->src[i ? PG_MM_WEIGHTS_1 + 2 * (i - 1) : PG_MM_WEIGHTS];
    if (!a->data) break;
    s.p[s.n++] = (r16_product){.f = form < HALF ? *r16_find(a->type) : (r16_format){.type = (int)a->type},
                               .w = (const uint8_t *)a->data,
                               .row_bytes = form ? a->nb[1] : 0,
                               .IN_FAST_FORM = fast,
                               .k = whole_units(a->ne[0]),
                               .m = a->ne[1],
                               .b = &t->src[PG_MM_COLUMNS],
                               .norm = (const float *)norm->data,
                               .eps = t->param[PG_MM_EPS],
                               .y = i && !is_gated(store) ? &t->src[PG_MM_RESULT_1 + 2 * (i - 1)] : &t->dst,
                               .bias = (const float *)t->src[PG_MM_BIAS + i].data,
                               .n_cols = columns_of(t)};
  }
  if (store == R16_ADD) {
    s.p[0].store = R16_ADD;
    s.p[0].other = &t->src[PG_MM_ADDED];
  } else if (is_gated(store)) {
    gate(&s.p[1], t);
  }
  return s;
}

// Whether two matrices take the same columns: fast ones may round them differently.
PG_INLINE int same_columns(const r16_product *a, const r16_product *b) {
  return !a->fast || r16_rounds_units(a->f) == r16_rounds_units(b->f);
}

// Sort columns by the matrix of a stack that they meet, as pg_sort_columns does: mul_mat's matrix e meets as many
// matrices of columns in turn.
static int sort_by_place(const pg_task *t, int32_t *list, int32_t *end) {
  const pg_tensor *y = &t->dst;
  const int64_t n = t->src[PG_MM_WEIGHTS].ne[2], each = y->ne[1] * (y->ne[2] / n);
  for (int64_t e = 0; e < n; e++, end++) {
    for (int64_t i3 = 0; i3 < y->ne[3]; i3++)
      for (int64_t i = 0; i < each; i++) *list++ = (int32_t)((i3 * n + e) * each + i);
    *end = (int32_t)((e + 1) * each * y->ne[3]);
  }
  return PG_OK;
}

// Products with each matrix of a stack: by ids, or by place. By place and with many columns, threads share out the
// matrices if there is one for each: together they would wait for each other at each.
static int multiply_stack(const pg_task *t, int ith, int nth, int form, int fast, int by_id) {
  const pg_tensor *a = &t->src[PG_MM_WEIGHTS];
  const r16_format f = *r16_find(a->type);
  const int64_t n_matrices = a->ne[2];
  int32_t *list = (int32_t *)(t->work + ith * list_bytes(t)), *end = list + columns_of(t);
  r16_x *x = (r16_x *)(t->work + nth * list_bytes(t));
  const int status = by_id ? pg_sort_columns(t, list, end) : sort_by_place(t, list, end);
  if (status) return status; // all threads see the same ids
  const int n_p = t->src[PG_MM_WEIGHTS_1].data ? 2 : 1;
  r16_product p[2];
  for (int i = 0; i < n_p; i++)
    p[i] = (r16_product){.f = f,
                         .IN_FAST_FORM = fast,
                         .row_bytes = form ? a->nb[1] : 0,
                         .k = a->ne[0],
                         .m = a->ne[1],
                         .b = &t->src[PG_MM_COLUMNS],
                         .y = &t->dst};
  if (n_p == 2) gate(&p[1], t);
  const int many = !by_id && end[0] > few_of(p), alone = many && n_matrices >= nth;
  char *work = many ? (char *)x : (char *)x + x_bytes(t);
  r16_queue all = r16_queue_of(t, ith, nth), own = r16_queue_of(t, 0, 1), *q = alone ? &own : &all;
  if (alone) {
    const r16_product one = one_of_stack(t, fast);
    work += ith * gemm_bytes(&one, 1);
  }
  if (!many) {
    R16_FN(r16_quantize)(p, x, ith, nth);
    pg_sync(t, nth);
  }
  for (int64_t e = alone ? r16_take(&all, n_matrices, -1) : 0; e >= 0 && e < n_matrices;
       e = alone ? r16_take(&all, n_matrices, e) : e + 1) {
    const int32_t start = e ? end[e - 1] : 0, n_cols = end[e] - start;
    for (int i = 0; i < n_p; i++) {
      const pg_tensor *bias = &t->src[PG_MM_BIAS + i];
      p[i].w = (const uint8_t *)t->src[i ? PG_MM_WEIGHTS_1 : PG_MM_WEIGHTS].data + e * a->nb[2];
      p[i].bias = bias->data ? (const float *)(bias->data + e * bias->nb[1]) : NULL;
      p[i].list = list + start;
      p[i].n_cols = n_cols;
    }
    if (n_cols > few_of(p)) {
      pg_sync(t, q->nth); // the previous matrix's scratch is free
      const gemm g = gemm_for(p, 1);
      g.columns(p, q, work);
      g.multiply(p, n_p, q, work, q->ith);
    } else if (n_cols) {
      R16_FN(r16_gemv)(p, n_p, x, q);
    }
  }
  return PG_OK;
}

static int multiply(const pg_task *t, int ith, int nth, int form, int fast) {
  if (t->src[PG_MM_WEIGHTS].ne[2] > 1) return multiply_stack(t, ith, nth, form, fast, 0);
  const products s = products_of(t, form, fast);
  int few[PG_MM_MAX] = {0}, n_few = 0; // each matrix is multiplied as it would be alone, without the others
  for (int i = 0; i < s.n; i++) {
    few[i] = s.p[i].n_cols <= few_of(&s.p[i]);
    n_few += few[i];
  }
  const int gated = is_gated((int)t->param[PG_MM_STORE]);
  const int n_p = gated && few[0] == few[1] && same_columns(s.p, s.p + 1) ? 2 : 1; // at a time
  const gemm g = gemm_for(s.p, s.n);
  r16_queue q = r16_queue_of(t, ith, nth);
  r16_x *x = (r16_x *)t->work;
  char *columns = t->work + (n_few ? x_bytes(t) : 0);
  for (int i = 0; i < s.n; i += n_p) {
    if (i == 0 || !same_columns(s.p + i - 1, s.p + i)) {
      if (i) pg_sync(t, nth); // nobody reads the columns before
      if (n_few) {
        R16_FN(r16_quantize)(s.p + i, x, ith, nth);
        pg_sync(t, nth);
      }
      if (n_few < s.n) g.columns(s.p + i, &q, columns);
    }
    if (few[i])
      R16_FN(r16_gemv)(s.p + i, n_p, x, &q);
    else
      g.multiply(s.p + i, n_p, &q, columns, ith);
    if (gated && n_p == 1) pg_sync(t, nth); // the gate must be complete before it is used
  }
  return PG_OK;
}

int PG_FN(mul_mat_r16_any)(const pg_task *t, int ith, int nth) { return multiply(t, ith, nth, REPACKED, 0); }
int PG_FN(mul_mat_stored_any)(const pg_task *t, int ith, int nth) { return multiply(t, ith, nth, STORED, 0); }
#if defined(PG_FAST)
int PG_FN(mul_mat_r16_fast_any)(const pg_task *t, int ith, int nth) { return multiply(t, ith, nth, REPACKED, 1); }
int PG_FN(mul_mat_stored_fast_any)(const pg_task *t, int ith, int nth) { return multiply(t, ith, nth, STORED, 1); }
#endif

#if defined(PG_HALVES)
// mul_mat_half: matrices of F16 or BF16 as they are stored. With tiles, columns are many, and rows a whole number of
// units long.
int PG_FN(mul_mat_half_any)(const pg_task *t, int ith, int nth) {
  const products s = products_of(t, HALF, IN_BF16);
  const int n_p = is_gated((int)t->param[PG_MM_STORE]) ? 2 : 1;
  r16_queue q = r16_queue_of(t, ith, nth);
#if !defined(PG_AMX)
  if (s.p[0].n_cols <= R16_FEW_HALVES) {
    PG_FN(r16_few_columns)(s.p, t->work, ith, nth);
    pg_sync(t, nth);
    for (int i = 0; i < s.n; i += n_p) PG_FN(r16_few_halves)(s.p + i, n_p, t->work, &q);
    return PG_OK;
  }
#endif
  const gemm g = gemm_for(s.p, s.n);
  g.columns(s.p, &q, t->work);
  for (int i = 0; i < s.n; i += n_p) g.multiply(s.p + i, n_p, &q, t->work, ith);
  return PG_OK;
}

PG_INLINE r16_product shape_of(const pg_task *t) {
  const pg_tensor *a = &t->src[PG_MM_WEIGHTS];
  return (r16_product){.f = {.type = (int)a->type},
                       .IN_FAST_FORM = IN_BF16,
                       .row_bytes = a->nb[1],
                       .k = whole_units(a->ne[0]),
                       .n_cols = columns_of(t)};
}

int64_t PG_FN(mul_mat_half_work)(const pg_task *t, int nth) {
  r16_product p = shape_of(t);
  const int64_t many = gemm_bytes(&p, nth);
#if defined(PG_AMX)
  return many;
#else
  p.n_cols = PG_MIN(p.n_cols, R16_FEW_HALVES); // of a Var there may be fewer
  return PG_MAX(many, PG_FN(r16_few_work)(&p));
#endif
}
#endif

int64_t PG_FN(mul_mat_id_r16_work)(const pg_task *t, int nth) { return work_by_id(t, nth, 0); }
#if defined(PG_FAST)
int64_t PG_FN(mul_mat_id_r16_fast_work)(const pg_task *t, int nth) { return work_by_id(t, nth, 1); }
#endif

int PG_FN(mul_mat_id_r16_any)(const pg_task *t, int ith, int nth) {
  return multiply_stack(t, ith, nth, REPACKED, 0, 1);
}
int PG_FN(mul_mat_id_stored_any)(const pg_task *t, int ith, int nth) {
  return multiply_stack(t, ith, nth, STORED, 0, 1);
}
#if defined(PG_FAST)
int PG_FN(mul_mat_id_r16_fast_any)(const pg_task *t, int ith, int nth) {
  return multiply_stack(t, ith, nth, REPACKED, 1, 1);
}
int PG_FN(mul_mat_id_stored_fast_any)(const pg_task *t, int ith, int nth) {
  return multiply_stack(t, ith, nth, STORED, 1, 1);
}
#endif
