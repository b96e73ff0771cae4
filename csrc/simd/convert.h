// Convert plain elements (floats and integers) from one type to another. They go through a type that holds the values
// of both: F32, or F64 when that is too narrow, or I64 between integers. Conversion to an integer truncates and clamps
// to the type's range; NaN becomes 0.
#pragma once
#include "simd/rows.h"

static inline int pg_is_integer(int64_t type) { return type >= PG_I8 && type <= PG_I64; }

static inline int64_t pg_type_between(int64_t src, int64_t dst) {
  if (src == PG_F64 || dst == PG_F64) return PG_F64;
  return pg_is_integer(src) && pg_is_integer(dst) ? PG_I64 : PG_F32;
}

static inline int64_t pg_truncated(double x, int bits) {
  const double end = 2.0 * (double)((uint64_t)1 << (bits - 2));
  const int64_t most = (int64_t)(((uint64_t)1 << (bits - 1)) - 1);
  if (x >= end) return most;
  if (x <= -end) return -most - 1;
  return x == x ? (int64_t)x : 0;
}

static inline int64_t pg_narrowed(int64_t x, int bits) {
  const int64_t most = (int64_t)(((uint64_t)1 << (bits - 1)) - 1);
  return x > most ? most : x < -most - 1 ? -most - 1 : x;
}

// x as f32, with the last bit set when that is not exact. Rounding it again to F16 then gives the same as rounding
// once.
static inline float pg_to_odd(double x) {
  union {
    float f;
    uint32_t u;
  } v = {.f = (float)x};
  if ((double)v.f != x && x == x && !(v.u & 1)) v.u += fabs((double)v.f) > fabs(x) ? -1 : 1;
  return v.f;
}

#define PG_AT(type) (*(type *)(p + i * stride))
#define PG_EACH(statement)                                                                                             \
  for (int64_t i = 0; i < n; i++) statement;                                                                           \
  break
#define PG_LOAD_INTEGERS(x, type)                                                                                      \
  case PG_I8:                                                                                                          \
    PG_EACH((x)[i] = (type)PG_AT(const int8_t));                                                                       \
  case PG_I16:                                                                                                         \
    PG_EACH((x)[i] = (type)PG_AT(const int16_t));                                                                      \
  case PG_I32:                                                                                                         \
    PG_EACH((x)[i] = (type)PG_AT(const int32_t));                                                                      \
  case PG_I64:                                                                                                         \
    PG_EACH((x)[i] = (type)PG_AT(const int64_t))
#define PG_STORE_INTEGERS(x, fit)                                                                                      \
  case PG_I8:                                                                                                          \
    PG_EACH(PG_AT(int8_t) = (int8_t)fit((x)[i], 8));                                                                   \
  case PG_I16:                                                                                                         \
    PG_EACH(PG_AT(int16_t) = (int16_t)fit((x)[i], 16));                                                                \
  case PG_I32:                                                                                                         \
    PG_EACH(PG_AT(int32_t) = (int32_t)fit((x)[i], 32));                                                                \
  case PG_I64:                                                                                                         \
    PG_EACH(PG_AT(int64_t) = fit((x)[i], 64))

// n elements of `type`, `stride` bytes apart, as f32 ...
static inline void pg_load_f32(float *x, int64_t type, const char *p, int64_t stride, int64_t n) {
  switch (type) {
    PG_LOAD_INTEGERS(x, float);
  default:
    pg_get_f32(x, &(pg_tensor){.nb = {stride}, .type = type}, p, 0, n);
  }
}

// ... and back,
static inline void pg_store_f32(const float *x, int64_t type, char *p, int64_t stride, int64_t n) {
  switch (type) {
    PG_STORE_INTEGERS(x, pg_truncated);
  default:
    pg_put_f32(&(pg_tensor){.nb = {stride}, .type = type}, p, 0, x, n);
  }
}

// as doubles,
static inline void pg_load_f64(double *x, int64_t type, const char *p, int64_t stride, int64_t n) {
  switch (type) {
    PG_LOAD_INTEGERS(x, double);
  case PG_F64:
    PG_EACH(x[i] = PG_AT(const double));
  case PG_F32:
    PG_EACH(x[i] = (double)PG_AT(const float));
  case PG_F16:
    PG_EACH(x[i] = (double)pg_f16_to_f32(PG_AT(const uint16_t)));
  default: // PG_BF16
    PG_EACH(x[i] = (double)pg_bf16_to_f32(PG_AT(const uint16_t)));
  }
}

static inline void pg_store_f64(const double *x, int64_t type, char *p, int64_t stride, int64_t n) {
  switch (type) {
    PG_STORE_INTEGERS(x, pg_truncated);
  case PG_F64:
    PG_EACH(PG_AT(double) = x[i]);
  case PG_F32:
    PG_EACH(PG_AT(float) = (float)x[i]);
  case PG_F16:
    PG_EACH(PG_AT(uint16_t) = pg_f32_to_f16(pg_to_odd(x[i])));
  default: // PG_BF16: through F32, as the reference
    PG_EACH(PG_AT(uint16_t) = pg_f32_to_bf16((float)x[i]));
  }
}

// and integers as the widest.
static inline void pg_load_i64(int64_t *x, int64_t type, const char *p, int64_t stride, int64_t n) {
  switch (type) { PG_LOAD_INTEGERS(x, int64_t); }
}

static inline void pg_store_i64(const int64_t *x, int64_t type, char *p, int64_t stride, int64_t n) {
  switch (type) { PG_STORE_INTEGERS(x, pg_narrowed); }
}
#undef PG_AT
#undef PG_EACH
#undef PG_LOAD_INTEGERS
#undef PG_STORE_INTEGERS

// n elements to `between`, one of the three, side by side ...
static inline void pg_load_plain(void *x, int64_t between, int64_t type, const char *p, int64_t stride, int64_t n) {
  if (between == PG_F32)
    pg_load_f32(x, type, p, stride, n);
  else if (between == PG_F64)
    pg_load_f64(x, type, p, stride, n);
  else
    pg_load_i64(x, type, p, stride, n);
}

// ... and from there.
static inline void pg_store_plain(const void *x, int64_t between, int64_t type, char *p, int64_t stride, int64_t n) {
  if (between == PG_F32)
    pg_store_f32(x, type, p, stride, n);
  else if (between == PG_F64)
    pg_store_f64(x, type, p, stride, n);
  else
    pg_store_i64(x, type, p, stride, n);
}
