// add, sub, mul, div: b repeats to the shape of a. dst may be a or b: no restrict.
#include "kernel.h"
#include "rows.h"

// One row: y[i] = a[i] (op) b[i], all dense f32.
#define ROW(name, vop, sop)                                                                                            \
  static void row_##name(float *y, const float *a, const float *b, int64_t n) {                                        \
    int64_t i = 0;                                                                                                     \
    for (; i + VF_N <= n; i += VF_N) vf_store(y + i, vop(vf_load(a + i), vf_load(b + i)));                             \
    for (; i < n; i++) y[i] = a[i] sop b[i];                                                                           \
  }
ROW(add, vf_add, +)
ROW(sub, vf_sub, -)
ROW(mul, vf_mul, *)
ROW(div, vf_div, /)
#undef ROW

typedef void (*row_fn)(float *y, const float *a, const float *b, int64_t n);

enum { STRIP = 256 }; // elements at a time where a row is not dense f32

static int rows(const pg_task *t, int ith, int nth, row_fn f) {
  const pg_tensor *y = &t->dst, *a = &t->src[0], *b = &t->src[1];
  const int64_t n = y->ne[0];
  const int dense = pg_is_f32_row(y) && pg_is_f32_row(a) && pg_is_f32_row(b) && b->ne[0] == n;
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    const char *pa = pg_row_at(a, i.i1, i.i2, i.i3);
    const char *pb = pg_row_at(b, i.i1 % b->ne[1], i.i2 % b->ne[2], i.i3 % b->ne[3]);
    if (dense) {
      f((float *)py, (const float *)pa, (const float *)pb, n);
      continue;
    }
    for (int64_t k = 0; k < n; k += STRIP) {
      float fa[STRIP], fb[STRIP];
      const int64_t m = PG_MIN(STRIP, n - k);
      pg_get_f32(fa, a, pa, k, m);
      for (int64_t j = 0; j < m;) { // b's row may be shorter: it repeats
        const int64_t kb = (k + j) % b->ne[0], mb = PG_MIN(m - j, b->ne[0] - kb);
        pg_get_f32(fb + j, b, pb, kb, mb);
        j += mb;
      }
      f(fa, fa, fb, m);
      pg_put_f32(y, py, k, fa, m);
    }
  }
  return PG_OK;
}

int PG_FN(add_any)(const pg_task *t, int ith, int nth) { return rows(t, ith, nth, row_add); }
int PG_FN(sub_any)(const pg_task *t, int ith, int nth) { return rows(t, ith, nth, row_sub); }
int PG_FN(mul_any)(const pg_task *t, int ith, int nth) { return rows(t, ith, nth, row_mul); }
int PG_FN(div_any)(const pg_task *t, int ith, int nth) { return rows(t, ith, nth, row_div); }
