// out_prod: y[m, n, b2, b3] = sum over k of column k of a[m, k, a2, a3] times row k of b[n, k, b2, b3]; a repeats along
// dimensions 2, 3. A patch of y stays in the L1 cache while k runs.
#include "formats/storage.h"
#include "products/product.h"
#include "simd/units.h"

enum { STRIP = 256, ROWS = 8 }; // elements (a multiple of every block size) and rows of the patch

static void add_scaled(float *restrict y, const float *restrict x, float f, int64_t n) {
  const vf v = vf_set1(f);
  int64_t i = 0;
  for (; i + VF_N <= n; i += VF_N) vf_store(y + i, vf_fma(vf_load(x + i), v, vf_load(y + i)));
  for (; i < n; i++) y[i] += x[i] * f;
}

// y[rows][0..n) from the elements i0.. of a's rows at pa and the elements j0.. of b's rows at pb.
static void patch(const pg_task *t, char *py, const char *pa, const char *pb, int64_t i0, int64_t n, int64_t j0,
                  int64_t rows) {
  const pg_tensor *y = &t->dst, *a = &t->src[0], *b = &t->src[1];
  const pg_to_f32 to_f32 = PG_FN(to_f32)(a->type);
  float sum[ROWS][STRIP] = {{0}}, x[STRIP];
  for (int64_t k = 0; k < a->ne[1]; k++) {
    to_f32(pa + k * a->nb[1] + i0 / pg_block_size(a->type) * a->nb[0], x, n);
    for (int64_t j = 0; j < rows; j++)
      add_scaled(sum[j], x, *(const float *)(pb + (j0 + j) * b->nb[0] + k * b->nb[1]), n);
  }
  for (int64_t j = 0; j < rows; j++) memcpy(py + (j0 + j) * y->nb[1] + i0 * 4, sum[j], n * 4);
}

int PG_FN(out_prod_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0], *b = &t->src[1];
  const int64_t r2 = y->ne[2] / a->ne[2], r3 = y->ne[3] / a->ne[3];
  const int64_t strips = (y->ne[0] + STRIP - 1) / STRIP, groups = (y->ne[1] + ROWS - 1) / ROWS;
  const pg_range share = pg_share(strips * groups * y->ne[2] * y->ne[3], ith, nth);
  for (int64_t c = share.first; c < share.last; c++) {
    const int64_t i0 = c % strips * STRIP, j0 = c / strips % groups * ROWS, i23 = c / strips / groups;
    const int64_t i2 = i23 % y->ne[2], i3 = i23 / y->ne[2];
    patch(t, pg_row_at(y, 0, i2, i3), pg_row_at(a, 0, i2 / r2, i3 / r3), pg_row_at(b, 0, i2, i3), i0,
          PG_MIN(STRIP, y->ne[0] - i0), j0, PG_MIN(ROWS, y->ne[1] - j0));
  }
  return PG_OK;
}
