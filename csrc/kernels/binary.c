// add, sub, mul, div: b repeats to the shape of a. Floats are computed in f32. Integers of one type wrap around;
// quotients are truncated, and 0 when b is 0. dst may be a or b: no restrict.
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

#define WRAPPED(T, U)                                                                                                  \
  static T T##_add(T a, T b) { return (T)((U)a + (U)b); }                                                              \
  static T T##_sub(T a, T b) { return (T)((U)a - (U)b); }                                                              \
  static T T##_mul(T a, T b) { return (T)((U)a * (U)b); }                                                              \
  static T T##_div(T a, T b) { return b == 0 ? 0 : b == -1 ? T##_sub(0, a) : a / b; }                                  \
  typedef T (*T##_fn)(T a, T b);                                                                                       \
                                                                                                                       \
  PG_INLINE int T##_rows(const pg_task *t, int ith, int nth, T##_fn f) {                                               \
    const pg_tensor *y = &t->dst, *a = &t->src[0], *b = &t->src[1];                                                    \
    const pg_range r = pg_share(pg_n_rows(y), ith, nth);                                                               \
    for (int64_t ir = r.first; ir < r.last; ir++) {                                                                    \
      const pg_idx i = pg_unravel(y, ir);                                                                              \
      char *py = pg_row_at(y, i.i1, i.i2, i.i3);                                                                       \
      const char *pa = pg_row_at(a, i.i1, i.i2, i.i3);                                                                 \
      const char *pb = pg_row_at(b, i.i1 % b->ne[1], i.i2 % b->ne[2], i.i3 % b->ne[3]);                                \
      for (int64_t k = 0, kb = 0; k < y->ne[0]; k++, kb = kb + 1 == b->ne[0] ? 0 : kb + 1)                             \
        *(T *)(py + k * y->nb[0]) = f(*(const T *)(pa + k * a->nb[0]), *(const T *)(pb + kb * b->nb[0]));              \
    }                                                                                                                  \
    return PG_OK;                                                                                                      \
  }
WRAPPED(int32_t, uint32_t)
WRAPPED(int64_t, uint64_t)

typedef void (*row_fn)(float *y, const float *a, const float *b, int64_t n, int one);

enum { STRIP = 256 }; // elements at a time, for rows that are not dense f32

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
      pg_get_repeated_f32(fb, b, pb, k, m);
      f(fa, fa, fb, m, 0);
      pg_put_f32(y, py, k, fa, m);
    }
  }
  return PG_OK;
}

#define OP(name)                                                                                                       \
  int PG_FN(name##_any)(const pg_task *t, int ith, int nth) {                                                          \
    if (t->dst.type == PG_I32) return int32_t_rows(t, ith, nth, int32_t_##name);                                       \
    if (t->dst.type == PG_I64) return int64_t_rows(t, ith, nth, int64_t_##name);                                       \
    return rows(t, ith, nth, row_##name);                                                                              \
  }
OP(add)
OP(sub)
OP(mul)
OP(div)
