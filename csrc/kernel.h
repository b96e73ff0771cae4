// The header of all kernels: names per instruction set, rows of tensors, SIMD vectors.
#pragma once
#include <math.h>
#include <string.h>

#include "operands.h"
#include "pg.h"
#include "simd/shuffle.h"
#include "simd/simd.h"

#define PG_CAT_(a, b, c) pg_##a##b##c
#define PG_CAT(a, b, c) PG_CAT_(a, b, c)
#define PG_FN(name) PG_CAT(name, __, PG_ISA) // PG_FN(add_f32) -> pg_add_f32__avx2

#define PG_MIN(a, b) ((a) < (b) ? (a) : (b))
#define PG_MAX(a, b) ((a) > (b) ? (a) : (b))

// A row of a tensor: dimension 0 at (i1, i2, i3).
static inline char *pg_row_at(const pg_tensor *t, int64_t i1, int64_t i2, int64_t i3) {
  return t->data + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
}

static inline int64_t pg_n_rows(const pg_tensor *t) { return t->ne[1] * t->ne[2] * t->ne[3]; }

// Convert the number r of a row to its indices in dimensions 1, 2, 3.
typedef struct pg_idx {
  int64_t i1, i2, i3;
} pg_idx;

static inline pg_idx pg_unravel(const pg_tensor *t, int64_t r) {
  const int64_t i1 = r % t->ne[1], q = r / t->ne[1];
  return (pg_idx){i1, q % t->ne[2], q / t->ne[2]};
}

// Multiply and add sizes of scratch memory, which are never negative. On overflow the result is INT64_MAX: no memory is
// that large, so the request is refused.
static inline int64_t pg_times(int64_t a, int64_t b) {
  int64_t c;
  return __builtin_mul_overflow(a, b, &c) ? INT64_MAX : c;
}

static inline int64_t pg_plus(int64_t a, int64_t b) {
  int64_t c;
  return __builtin_add_overflow(a, b, &c) ? INT64_MAX : c;
}

// The scratch memory of a kernel that keeps numbers from 0 to n in 32 bits: `bytes`, or INT64_MAX when n is too large.
static inline int64_t pg_in_32_bits(int64_t n, int64_t bytes) { return n > INT32_MAX ? INT64_MAX : bytes; }

// Thread ith's share [first, last) of n things.
typedef struct pg_range {
  int64_t first, last;
} pg_range;

static inline pg_range pg_share(int64_t n, int ith, int nth) { return (pg_range){n * ith / nth, n * (ith + 1) / nth}; }

// Whether n floats are all finite.
static inline int pg_all_finite(const float *x, int64_t n) {
  int32_t most = 0; // as bits, an infinity is greater than any number, and NaN is greater still
  for (int64_t i = 0; i < n; i++) {
    int32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    most = PG_MAX(most, bits & INT32_MAX);
  }
  return most < 0x7f800000;
}

// Conversions of single numbers: exact when the target has the digits, else rounded to nearest even.
static inline float pg_f16_to_f32(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fff;
  union {
    uint32_t u;
    float f;
  } v;
  if (mag >= 0x7c00) {
    v.u = sign | 0x7f800000 | ((mag & 0x3ff) << 13); // inf, NaN
  } else if (mag >= 0x0400) {
    v.u = sign | ((mag + 0x1c000) << 13);
  } else { // subnormal: mag * 2^-24 is exact
    v.f = (float)mag * 0x1p-24f;
    v.u |= sign;
  }
  return v.f;
}

static inline uint16_t pg_f32_to_f16(float x) {
  union {
    float f;
    uint32_t u;
  } v = {.f = x};
  const uint32_t sign = (v.u >> 16) & 0x8000, mag = v.u & 0x7fffffff;
  if (mag > 0x7f800000) return sign | 0x7e00;  // NaN
  if (mag >= 0x477ff000) return sign | 0x7c00; // rounds to infinity
  if (mag < 0x38800000) {                      // subnormal result: let the adder round
    union {
      uint32_t u;
      float f;
    } m = {.u = mag};
    m.f += 0.5f; // ulp of 0.5 is 2^-24
    return sign | (uint16_t)(m.u - 0x3f000000);
  }
  return sign | (uint16_t)((mag + 0xfff + ((mag >> 13) & 1) - 0x38000000) >> 13);
}

static inline float pg_bf16_to_f32(uint16_t b) {
  union {
    uint32_t u;
    float f;
  } v = {.u = (uint32_t)b << 16};
  return v.f;
}

static inline uint16_t pg_f32_to_bf16(float x) {
  union {
    float f;
    uint32_t u;
  } v = {.f = x};
  if ((v.u & 0x7fffffff) > 0x7f800000) return (v.u >> 16) | 0x40; // NaN stays one
  return (v.u + 0x7fff + ((v.u >> 16) & 1)) >> 16;
}
