// One product of a repacked matrix with columns. The kernels of mul_mat_r16.c describe it, and gemv.c computes it for
// few columns, products/gemm/gemm.c for many. mul_mat is one product, mul_mat_id one product per expert.
#pragma once
#include "products/borders.h"
#include "products/deal.h"
#include "products/r16/r16.h"
#include "simd/vmath.h"

// The borders of this level (borders.h); and how many columns gemv.c multiplies before it takes the next ones.
#define R16_BORDER(name) ((int)PG_CAT(name, _, PG_ISA))
enum { R16_GEMV_MAX = 64 };
_Static_assert(R16_BORDER(FEW_SLOW) <= R16_BORDER(FEW) && R16_BORDER(FEW_SLOW_AMD) <= R16_BORDER(FEW_AMD),
               "the work of mul_mat_r16.c");
PG_INLINE int r16_unpacks_slowly(r16_format f) { return f.codes > R16_NIBBLES || f.table; }
PG_INLINE int r16_few(int slow) {
  if (pg_cpu_is_amd) return slow ? R16_BORDER(FEW_SLOW_AMD) : R16_BORDER(FEW_AMD);
  return slow ? R16_BORDER(FEW_SLOW) : R16_BORDER(FEW);
}
#if defined(PG_HALVES) && !defined(PG_AMX)
enum { R16_FEW_HALVES = R16_BORDER(FEW_HALVES) };
#endif
#if defined(PG_AMX)
enum {
  R16_NO_TILES = 22, // the most columns for which avx512vnni's gemm is faster than tiles
  R16_NO_BF16 = 32   // the most columns that the fast form does not round
};

// Whether tiles multiply a format: not floats; nor sums of 16 elements, which would use a quarter of a tile.
PG_INLINE int r16_suits_tiles(r16_format f) { return f.units && f.scales != R16_E4M3; }
#endif

// gemv.c, integers.c and passing.c are the same at the level with tiles as at the one below, and are compiled once.
#if defined(PG_AMX)
#define R16_FN(name) PG_CAT(name, __, avx512vnni)
#else
#define R16_FN PG_FN
#endif

typedef struct r16_product {
  r16_format f;
  const uint8_t *w;    // the matrix, repacked; or as it is stored: blocks, or F16 or BF16 (products/gemm only)
  int64_t row_bytes;   // of the matrix as it is stored; 0: repacked
  int fast;            // of matrices in blocks: columns are rounded to bytes (round.h)
  int bf16;            // many columns and the matrix are rounded to bf16, the fast form of tiles (products/gemm/bf16.h)
  int64_t k, m;        // its row length and its rows (the last group may be partly padding)
  int across;          // products/gemm without tiles: rows run across the stored ones, which have m elements; k is the
                       // number of stored rows, rounded up to whole units
  const pg_tensor *b;  // the columns: F32, F16 or BF16, any layout (simd/rows.h: pg_get_f32)
  const float *norm;   // if not NULL: columns, dense f32, are normed first: rms_norm(b) * norm
  double eps;          // of the norm
  const pg_tensor *y;  // the result: f32, dense along m
  const int32_t *list; // numbers of y's columns, or NULL: 0 .. n_cols - 1
  int64_t n_cols;
  const float *bias;      // if not NULL: of each row
  int store;              // enum r16_store (operands.h)
  float alpha, limit;     // of R16_SWIGLU_OAI
  const pg_tensor *other; // f32 and dense along m, as y; may be y
} r16_product;

// Column c (of the list): where its m results go, and its number among b's columns (b repeats along dimension 1).
static inline float *r16_result(const r16_product *p, int64_t c, int64_t *b_col) {
  const pg_idx i = pg_unravel(p->y, p->list ? p->list[c] : c);
  *b_col = i.i1 % p->b->ne[1] + p->b->ne[1] * (i.i2 + p->b->ne[2] * i.i3);
  return (float *)pg_row_at(p->y, i.i1, i.i2, i.i3);
}

// The values of `other` for column c; NULL when they are not needed.
static inline const float *r16_other(const r16_product *p, int64_t c) {
  if (p->store == R16_STORE) return NULL;
  const pg_idx i = pg_unravel(p->y, p->list ? p->list[c] : c);
  return (const float *)pg_row_at(p->other, i.i1, i.i2, i.i3);
}

// Whether the results are the products, without bias or a further step.
static inline int r16_is_plain(const r16_product *p) { return p->store == R16_STORE && !p->bias; }

PG_INLINE vf r16_stored(const r16_product *p, vf v, vf other) {
  switch (p->store) {
  case R16_ADD:
    return vf_add(other, v);
  case R16_SWIGLU:
    return vf_mul(vf_silu(other), v);
  case R16_GEGLU:
    return vf_mul(vf_gelu(other), v);
  case R16_SWIGLU_OAI:
    return vf_swiglu_oai(other, v, p->alpha, p->limit);
  default:
    return vf_mul(vf_max(vf_zero(), other), v);
  }
}

// Store results y[row..row + rows) of a column from products v, which has room for whole vectors. y may be `other`,
// which R16_STORE does not use.
PG_INLINE void r16_put(const r16_product *p, float *y, const float *v, const float *other, int64_t row, int64_t rows) {
  for (int64_t i = 0; i < rows; i += VF_N) {
    const int n = (int)PG_MIN(VF_N, rows - i);
    const int64_t at = row + i;
    vf r = vf_load(v + i);
    if (p->bias) r = vf_add(r, n < VF_N ? vf_load_n(p->bias + at, n) : vf_load(p->bias + at));
    if (p->store != R16_STORE) r = r16_stored(p, r, n < VF_N ? vf_load_n(other + at, n) : vf_load(other + at));
    if (n < VF_N) {
      float part[VF_N];
      vf_store(part, r);
      memcpy(y + at, part, n * sizeof *part);
    } else {
      vf_store(y + at, r);
    }
  }
}

// Whether the matrix is F16 or BF16: then its format is only a type.
static inline int r16_of_floats(const r16_product *p) { return !p->f.units; }

// Elements k .. k + n, whole blocks, of a group of 16 rows in repacked form: in place, or written to `to` (passing.c).
const uint8_t *R16_FN(r16_pass)(const r16_product *p, int64_t group, int64_t k, int64_t n, uint8_t *to);
static inline const uint8_t *r16_group_at(const r16_product *p, int64_t group, int64_t k, int64_t n, uint8_t *to) {
  if (p->row_bytes) return R16_FN(r16_pass)(p, group, k, n, to);
  return p->w + group * r16_group_bytes(p->f, p->k) + k / (R16_UNIT * p->f.units) * r16_block_bytes(p->f);
}

// Where column number b_col of b starts.
static inline const char *r16_column(const pg_tensor *b, int64_t b_col) {
  const pg_idx i = pg_unravel(b, b_col);
  return pg_row_at(b, i.i1, i.i2, i.i3);
}

// Chunks of shared work, dealt out by pg_next. It has one counter per op, so chunks are numbered through all products
// of the op.
typedef struct r16_queue {
  const pg_task *t;
  int ith, nth;
  int64_t next; // the chunk this thread holds, -1 for none
  int64_t base; // number of the first chunk of the current product
} r16_queue;

static inline r16_queue r16_queue_of(const pg_task *t, int ith, int nth) { return (r16_queue){t, ith, nth, -1, 0}; }

// This thread's next chunk of the n chunks of the current product (`last`: its previous one, -1 at first). -1: all are
// taken. Every thread must ask until it gets -1.
static inline int64_t r16_take(r16_queue *q, int64_t n, int64_t last) {
  if (q->nth == 1) return last + 1 < n ? last + 1 : -1;
  if (q->next < 0) q->next = pg_next(q->t);
  if (q->next >= q->base + n) {
    q->base += n;
    return -1;
  }
  const int64_t i = q->next - q->base;
  q->next = -1;
  return i;
}

// The two ways. Their results do not depend on the number of threads.

// A column in integers, a block of 32 at a time, see integers.c.
typedef struct r16_x r16_x;
int64_t R16_FN(r16_x_bytes)(int64_t k, int64_t n_cols);
void R16_FN(r16_quantize)(const r16_product *p, r16_x *x, int ith, int nth); // this thread's share of all columns of b
// x holds all columns of b. n_p: 1, or 2 products of the same shape; the second one takes the results of the first as
// `other`.
void R16_FN(r16_gemv)(const r16_product *p, int n_p, const r16_x *x, r16_queue *q);

// `work` is shared by all threads and has the bytes that r16_gemm_work asks for: enough for its n_cols or fewer. All
// threads call both functions with the same products: the first one once, for the columns, which ends in a pg_sync;
// then the second one for any products of them (n_p as above). The caller syncs before it uses `work` again.
#define R16_GEMM(fn)                                                                                                   \
  int64_t fn(r16_gemm_work)(const r16_product *p, int nth);                                                            \
  void fn(r16_gemm_columns)(const r16_product *p, r16_queue *q, char *work);                                           \
  void fn(r16_gemm)(const r16_product *p, int n_p, r16_queue *q, char *work, int ith);
R16_GEMM(PG_FN)
#if defined(PG_AMX)
R16_GEMM(R16_FN)
#endif

// F16 and BF16 in the fast form times up to R16_FEW_HALVES columns (products/gemm/halves.c): the bytes of scratch that
// all threads share; the columns, of which each thread converts its share, before a pg_sync; and the products, n_p as
// above.
#if defined(PG_HALVES) && !defined(PG_AMX)
int64_t PG_FN(r16_few_work)(const r16_product *p);
void PG_FN(r16_few_columns)(const r16_product *p, char *work, int ith, int nth);
void PG_FN(r16_few_halves)(const r16_product *p, int n_p, char *work, r16_queue *q);
#endif

// The same with columns in bytes (products/gemm/int8.h): for products in the fast form, and on Arm for all of weights
// in blocks. They give the bits of r16_gemm. Where there are tiles, the fast form is in bf16 (products/gemm/bf16.h).
#if defined(PG_AMX)
#define R16_BF16_FN(name) PG_CAT(name, _bf16__, PG_ISA)
R16_GEMM(R16_BF16_FN)
#elif defined(PG_FAST)
#define R16_INT8_FN(name) PG_CAT(name, _int8__, PG_ISA)
int R16_INT8_FN(r16_suits)(const r16_product *p); // whether it has this product
R16_GEMM(R16_INT8_FN)
#endif
