// Comparisons, maximum, minimum and where, element by element. Each source repeats to the shape of dst. dst of maximum,
// minimum and where may be a source: no restrict.
#include "simd/rows.h"
#include "simd/units.h"

enum { STRIP = 256 }; // elements at a time

// Functions that compute a strip of dst, for floats and for integers. Comparisons give 1 and 0; maximum and minimum
// give one of the two elements.
#define COMPARE(name, op)                                                                                              \
  static void name##_f32(int32_t *y, const float *a, const float *b, int64_t n) {                                      \
    for (int64_t i = 0; i < n; i++) y[i] = a[i] op b[i];                                                               \
  }                                                                                                                    \
  static void name##_i64(int32_t *y, const int64_t *a, const int64_t *b, int64_t n) {                                  \
    for (int64_t i = 0; i < n; i++) y[i] = a[i] op b[i];                                                               \
  }
COMPARE(equal, ==)
COMPARE(not_equal, !=)
COMPARE(less, <)
COMPARE(less_equal, <=)
COMPARE(greater, >)
COMPARE(greater_equal, >=)

// NaN stays, whichever it is.
#define PICK(name, op)                                                                                                 \
  static void name##_f32(float *y, const float *a, const float *b, int64_t n) {                                        \
    for (int64_t i = 0; i < n; i++) y[i] = a[i] op b[i] || a[i] != a[i] ? a[i] : b[i];                                 \
  }                                                                                                                    \
  static void name##_i64(int64_t *y, const int64_t *a, const int64_t *b, int64_t n) {                                  \
    for (int64_t i = 0; i < n; i++) y[i] = a[i] op b[i] ? a[i] : b[i];                                                 \
  }
PICK(maximum, >)
PICK(minimum, <)

typedef struct {
  void (*f32)(int32_t *y, const float *a, const float *b, int64_t n);
  void (*i64)(int32_t *y, const int64_t *a, const int64_t *b, int64_t n);
} compare_fn;

typedef struct {
  void (*f32)(float *y, const float *a, const float *b, int64_t n);
  void (*i64)(int64_t *y, const int64_t *a, const int64_t *b, int64_t n);
} pick_fn;

static int is_integer(const pg_tensor *t) { return t->type == PG_I32 || t->type == PG_I64; }

static const char *repeated_row(const pg_tensor *t, pg_idx i) {
  return pg_row_at(t, i.i1 % t->ne[1], i.i2 % t->ne[2], i.i3 % t->ne[3]);
}

// Elements k.. of a row of integers, which may be shorter than n: it repeats.
static void get_i64(int64_t *to, const pg_tensor *t, const char *row, int64_t k, int64_t n) {
  for (int64_t j = 0, at = k % t->ne[0]; j < n; j++, at = at + 1 == t->ne[0] ? 0 : at + 1) {
    const char *p = row + at * t->nb[0];
    to[j] = t->type == PG_I32 ? *(const int32_t *)p : *(const int64_t *)p;
  }
}

static void put_i64(const pg_tensor *t, char *row, int64_t k, const int64_t *from, int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    char *p = row + (k + j) * t->nb[0];
    if (t->type == PG_I32)
      *(int32_t *)p = (int32_t)from[j];
    else
      *(int64_t *)p = from[j];
  }
}

// A strip of both sources, as floats or as integers.
typedef struct {
  union {
    float f32[2][STRIP];
    int64_t i64[2][STRIP];
  };
} strips;

static void get_both(strips *s, const pg_task *t, pg_idx i, int64_t k, int64_t n) {
  for (int j = 0; j < 2; j++) {
    const pg_tensor *x = &t->src[j];
    if (is_integer(x))
      get_i64(s->i64[j], x, repeated_row(x, i), k, n);
    else
      pg_get_repeated_f32(s->f32[j], x, repeated_row(x, i), k, n);
  }
}

static int compared(const pg_task *t, int ith, int nth, compare_fn f) {
  const pg_tensor *y = &t->dst;
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    int32_t *py = (int32_t *)pg_row_at(y, i.i1, i.i2, i.i3); // dense: never a source
    for (int64_t k = 0; k < y->ne[0]; k += STRIP) {
      strips s;
      const int64_t n = PG_MIN(STRIP, y->ne[0] - k);
      get_both(&s, t, i, k, n);
      if (is_integer(&t->src[0]))
        f.i64(py + k, s.i64[0], s.i64[1], n);
      else
        f.f32(py + k, s.f32[0], s.f32[1], n);
    }
  }
  return PG_OK;
}

static int picked(const pg_task *t, int ith, int nth, pick_fn f) {
  const pg_tensor *y = &t->dst;
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    for (int64_t k = 0; k < y->ne[0]; k += STRIP) {
      strips s;
      const int64_t n = PG_MIN(STRIP, y->ne[0] - k);
      get_both(&s, t, i, k, n);
      if (is_integer(y)) {
        f.i64(s.i64[0], s.i64[0], s.i64[1], n);
        put_i64(y, py, k, s.i64[0], n);
      } else {
        f.f32(s.f32[0], s.f32[0], s.f32[1], n);
        pg_put_f32(y, py, k, s.f32[0], n);
      }
    }
  }
  return PG_OK;
}

#define OP(how, type, name)                                                                                            \
  int PG_FN(name##_any)(const pg_task *t, int ith, int nth) { return how(t, ith, nth, (type){name##_f32, name##_i64}); }
OP(compared, compare_fn, equal)
OP(compared, compare_fn, not_equal)
OP(compared, compare_fn, less)
OP(compared, compare_fn, less_equal)
OP(compared, compare_fn, greater)
OP(compared, compare_fn, greater_equal)
OP(picked, pick_fn, maximum)
OP(picked, pick_fn, minimum)

// src[1] where the I32 src[0] is not 0, else src[2]: bytes, of any type but blocks.
int PG_FN(where_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *c = &t->src[0];
  const int64_t unit = pg_unit_size(y);
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    const char *pc = repeated_row(c, i);
    for (int64_t k = 0; k < y->ne[0]; k++) {
      const pg_tensor *x = &t->src[*(const int32_t *)(pc + k % c->ne[0] * c->nb[0]) ? 1 : 2];
      const char *px = repeated_row(x, i) + k % x->ne[0] * x->nb[0];
      char *to = py + k * y->nb[0];
      switch (unit) {
      case 1:
        *to = *px;
        break;
      case 2:
        memmove(to, px, 2);
        break;
      case 4:
        memmove(to, px, 4);
        break;
      default:
        memmove(to, px, 8);
      }
    }
  }
  return PG_OK;
}
