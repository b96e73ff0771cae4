// add, sub, mul, div: b repeats to the shape of a. Floats are computed in f32. I32 with I32 wraps around; quotients are
// truncated, and 0 when b is 0. dst may be a or b: no restrict.
#include "kernel.h"
#include "simd/rows.h"

// One row: y[i] = a[i] (op) b[i], or with `one` b[0], all dense f32.
#define ROW(name, vop, sop)                                                                                            \
  static void row_##name(float *y, const float *a, const float *b, int64_t n, int one) {                               \
    int64_t i = 0;                                                                                                     \
    for (; one && i + VF_N <= n; i += VF_N) vf_store(y + i, vop(vf_load(a + i), vf_set1(*b)));                         \
    for (; i + VF_N <= n; i += VF_N) vf_store(y + i, vop(vf_load(a + i), vf_load(b + i)));                             \
    for (; i < n; i++) y[i] = a[i] sop b[one ? 0 : i];                                                                 \
  }
ROW(add, vf_add, +)
ROW(sub, vf_sub, -)
ROW(mul, vf_mul, *)
ROW(div, vf_div, /)
#undef ROW

static int32_t wrapped_add(int32_t a, int32_t b) { return (int32_t)((uint32_t)a + (uint32_t)b); }
static int32_t wrapped_sub(int32_t a, int32_t b) { return (int32_t)((uint32_t)a - (uint32_t)b); }
static int32_t wrapped_mul(int32_t a, int32_t b) { return (int32_t)((uint32_t)a * (uint32_t)b); }
static int32_t wrapped_div(int32_t a, int32_t b) { return b == 0 ? 0 : b == -1 ? wrapped_sub(0, a) : a / b; }

typedef void (*row_fn)(float *y, const float *a, const float *b, int64_t n, int one);

typedef int32_t (*integer_fn)(int32_t a, int32_t b);

PG_INLINE int integer_rows(const pg_task *t, int ith, int nth, integer_fn f) {
  const pg_tensor *y = &t->dst, *a = &t->src[0], *b = &t->src[1];
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    const char *pa = pg_row_at(a, i.i1, i.i2, i.i3);
    const char *pb = pg_row_at(b, i.i1 % b->ne[1], i.i2 % b->ne[2], i.i3 % b->ne[3]);
    for (int64_t k = 0, kb = 0; k < y->ne[0]; k++, kb = kb + 1 == b->ne[0] ? 0 : kb + 1)
      *(int32_t *)(py + k * y->nb[0]) =
          f(*(const int32_t *)(pa + k * a->nb[0]), *(const int32_t *)(pb + kb * b->nb[0]));
  }
  return PG_OK;
}

enum { STRIP = 256 }; // elements at a time, for rows that are not dense f32

// Elements k.. of b's row, which may be shorter than n: it repeats.
static void get_repeated(float *to, const pg_tensor *b, const char *row, int64_t k, int64_t n) {
  if (b->ne[0] == 1) {
    pg_get_f32(to, b, row, 0, 1);
    for (int64_t j = 1; j < n; j++) to[j] = to[0];
    return;
  }
  for (int64_t j = 0; j < n;) {
    const int64_t kb = (k + j) % b->ne[0], m = PG_MIN(n - j, b->ne[0] - kb);
    pg_get_f32(to + j, b, row, kb, m);
    j += m;
  }
}

// Advance to the next row of y, and to the row of b that repeats to it.
PG_INLINE void next_row(const pg_tensor *y, const pg_tensor *b, pg_idx *i, pg_idx *j) {
  j->i1 = ++i->i1 == y->ne[1] || j->i1 + 1 == b->ne[1] ? 0 : j->i1 + 1;
  if (i->i1 < y->ne[1]) return;
  i->i1 = 0;
  j->i2 = ++i->i2 == y->ne[2] || j->i2 + 1 == b->ne[2] ? 0 : j->i2 + 1;
  if (i->i2 < y->ne[2]) return;
  i->i2 = 0;
  i->i3++;
  j->i3 = j->i3 + 1 == b->ne[3] ? 0 : j->i3 + 1;
}

static int rows(const pg_task *t, int ith, int nth, row_fn f) {
  const pg_tensor *y = &t->dst, *a = &t->src[0], *b = &t->src[1];
  const int64_t n = y->ne[0];
  const int dense = pg_is_f32_row(y) && pg_is_f32_row(a) && pg_is_f32_row(b) && (b->ne[0] == n || b->ne[0] == 1);
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  pg_idx i = pg_unravel(y, r.first), j = {i.i1 % b->ne[1], i.i2 % b->ne[2], i.i3 % b->ne[3]};
  for (int64_t ir = r.first; ir < r.last; ir++, next_row(y, b, &i, &j)) {
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    const char *pa = pg_row_at(a, i.i1, i.i2, i.i3), *pb = pg_row_at(b, j.i1, j.i2, j.i3);
    if (dense) {
      f((float *)py, (const float *)pa, (const float *)pb, n, b->ne[0] == 1);
      continue;
    }
    for (int64_t k = 0; k < n; k += STRIP) {
      float fa[STRIP], fb[STRIP];
      const int64_t m = PG_MIN(STRIP, n - k);
      pg_get_f32(fa, a, pa, k, m);
      get_repeated(fb, b, pb, k, m);
      f(fa, fa, fb, m, 0);
      pg_put_f32(y, py, k, fa, m);
    }
  }
  return PG_OK;
}

#define OP(name)                                                                                                       \
  int PG_FN(name##_any)(const pg_task *t, int ith, int nth) {                                                          \
    return t->dst.type == PG_I32 ? integer_rows(t, ith, nth, wrapped_##name) : rows(t, ith, nth, row_##name);          \
  }
OP(add)
OP(sub)
OP(mul)
OP(div)
