// Shared by mul_mat and mul_mat_id: products of the rows of one matrix with columns that lie anywhere in b.
#pragma once
#include "products/f32_order.h"

// A product. Column c is element (c % n[0], c / n[0] % n[1], c / n[0] / n[1]) of a grid, with byte strides in b and y;
// b repeats along the first dimension after n_b. With `list`, the columns are those with the numbers in it.
//
// Element i of row r of the matrix is element i of row r of a; or, `across`, element r of row i.
typedef struct pg_product {
  const pg_tensor *a, *b; // for their types and rows
  int across;
  int64_t k, m;        // elements of a sum, and rows
  const char *a_rows;  // row 0 of a
  const char *b_first; // column 0
  char *y_first;       // its result: rows are f32, dense
  const int32_t *list;
  int64_t n_cols;
  int64_t n[2], n_b;
  int64_t nb_b[3], nb_y[3];
} pg_product;

// A part of the rows and columns of a product: what one thread does at a time.
typedef struct pg_part {
  pg_range rows, cols;
} pg_part;

// How a product is cut into about `wanted` parts. Neither this nor the number of threads changes any result bit.
typedef struct pg_cut {
  int64_t rows, cols;     // per part
  int64_t n_rows, n_cols; // parts
} pg_cut;

// Column c of `p` in b, and where its results go.
static inline const char *pg_column(const pg_product *p, int64_t c, float **y) {
  if (p->list) c = p->list[c];
  int64_t i0 = c, i1 = 0, i2 = 0;
  if (c >= p->n[0]) {
    i0 = c % p->n[0];
    i1 = c / p->n[0];
    i2 = i1 / p->n[1];
    i1 %= p->n[1];
  }
  *y = (float *)(p->y_first + i0 * p->nb_y[0] + i1 * p->nb_y[1] + i2 * p->nb_y[2]);
  return p->b_first + i0 % p->n_b * p->nb_b[0] + i1 * p->nb_b[1] + i2 * p->nb_b[2];
}

int64_t PG_FN(product_work)(void); // bytes of scratch per thread
void PG_FN(product)(const pg_product *p, pg_part part, float *work);
pg_cut PG_FN(product_cut)(const pg_product *p, int64_t wanted);

enum {
  PG_MANY_ROWS = 16 * VF_N, // rows of a part with many columns, which are converted once for all these rows
  PG_MOST_BLOCK = 256       // elements of the largest blocks; all others are parts of it
};
int64_t PG_FN(product_many_work)(void); // product_many.c: the product of many columns
void PG_FN(product_many)(const pg_product *p, pg_part part, float *work);

// product_short.c: the product of short rows of floats
void PG_FN(product_short)(const pg_product *p, pg_part part, float *work);

// The i-th part of the cut.
static inline pg_part pg_part_of(const pg_product *p, const pg_cut *c, int64_t i) {
  const int64_t r = i / c->n_cols * c->rows, j = i % c->n_cols * c->cols;
  return (pg_part){{r, PG_MIN(r + c->rows, p->m)}, {j, PG_MIN(j + c->cols, p->n_cols)}};
}

// The chunk after `last` (-1: the first one) for this thread. A single thread gets all of them.
static inline int64_t pg_next_chunk(const pg_task *t, int nth, int64_t last) {
  return nth == 1 ? last + 1 : pg_next(t);
}
