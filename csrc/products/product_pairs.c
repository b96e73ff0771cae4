// mul_mat_pairs: matrices of BF16 times columns that are rounded to bf16, two elements of a sum in one instruction
// (AVX512-BF16). It is the product of f32, compiled once more (f32_order.h): a pair of elements stands in the place of
// one float, so a column has the same bits in any company here, too. Rows must be longer than PG_SHORT pairs.
#include "products/multiply.h"
#include "simd/rows.h"
#include "simd/to_bf16.h"

enum {
  OWN = 1 << 16,   // bytes of columns so few that each thread converts all of them, and none waits for others
  STEP = 2 * VF_N, // elements of a register
  SOME = 16 * STEP // elements that are converted at a time
};

static int64_t columns_bytes(const pg_tensor *b) {
  return pg_times(pg_times(b->ne[0], 2), pg_times(b->ne[1], pg_times(b->ne[2], b->ne[3])));
}

static int is_own(const pg_tensor *b) { return columns_bytes(b) <= OWN; }

int64_t PG_FN(mul_mat_pairs_work)(const pg_task *t, int nth) {
  const pg_tensor *b = &t->src[1];
  return pg_plus(pg_times(nth, PG_PRODUCT(product_work)()), pg_times(is_own(b) ? nth : 1, columns_bytes(b)));
}

// Round a column to bf16. Its length is a multiple of STEP.
static void put_column(const pg_tensor *b, const char *column, uint16_t *to) {
  float x[SOME];
  for (int64_t k = 0, n; k < b->ne[0]; k += n) {
    n = PG_MIN(SOME, b->ne[0] - k);
    pg_get_f32(x, b, column, k, n);
    for (int64_t i = 0; i < n; i += STEP)
      _mm512_storeu_si512(to + k + i, bf16_of(vf_load(x + i), vf_load(x + i + VF_N)));
  }
}

int PG_FN(mul_mat_pairs_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *b = &t->src[1];
  const int64_t k = b->ne[0], n = b->ne[1] * b->ne[2] * b->ne[3], own = is_own(b);
  char *memory = t->work + nth * PG_PRODUCT(product_work)();
  uint16_t *columns = (uint16_t *)(memory + (own ? ith * columns_bytes(b) : 0));
  for (int64_t c = own ? 0 : ith; c < n; c += own ? 1 : nth)
    put_column(b, pg_row_at(b, c % b->ne[1], c / b->ne[1] % b->ne[2], c / b->ne[1] / b->ne[2]), columns + c * k);
  if (!own) pg_sync(t, nth);
  // Both as floats, each of which is a pair.
  pg_tensor a = t->src[0], x = {.type = PG_F32, .data = (char *)columns, .ne = {k / 2, b->ne[1], b->ne[2], b->ne[3]}};
  a.type = PG_F32;
  a.ne[0] /= 2;
  a.nb[0] = x.nb[0] = 4;
  for (int i = 1; i < 4; i++) x.nb[i] = x.nb[i - 1] * x.ne[i - 1];
  return multiply_all(t, &a, x, 0, t->work, ith, nth);
}
