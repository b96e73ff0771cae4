// Shared by the files that define block formats. A format is a pair of functions for one block; BLOCK_ROWS makes the
// row functions of storage.h from them.
#pragma once
#include "formats/formats.h"
#include "formats/storage.h"

// The sizes of a block, as constants: q4_0_elements, q4_0_bytes.
#define X(type, name, elements, bytes, d, m) enum { name##_elements = elements, name##_bytes = bytes };
BLOCK_FORMATS(X)
#undef X

#define BLOCK_DECODER(name)                                                                                            \
  void PG_FN(name##_to_f32)(const void *row, float *dst, int64_t n) {                                                  \
    const uint8_t *b = row;                                                                                            \
    for (int64_t i = 0; i < n; i += name##_elements, b += name##_bytes) name##_decode(b, dst + i);                     \
  }
#define BLOCK_ENCODER(name)                                                                                            \
  void PG_FN(name##_from_f32_weighted)(const float *src, const float *weights, void *row, int64_t n) {                 \
    uint8_t *b = row;                                                                                                  \
    for (int64_t i = 0; i < n; i += name##_elements, b += name##_bytes)                                                \
      name##_encode(src + i, weights ? weights + i : NULL, b);                                                         \
  }                                                                                                                    \
  void PG_FN(name##_from_f32)(const float *src, void *row, int64_t n) {                                                \
    PG_FN(name##_from_f32_weighted)(src, NULL, row, n);                                                                \
  }

PG_INLINE uint16_t load_u16(const void *p) {
  uint16_t v;
  memcpy(&v, p, sizeof v);
  return v;
}
PG_INLINE uint32_t load_u32(const void *p) {
  uint32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}
PG_INLINE uint64_t load_u64(const void *p) {
  uint64_t v;
  memcpy(&v, p, sizeof v);
  return v;
}
PG_INLINE void store_u16(void *p, uint16_t v) { memcpy(p, &v, sizeof v); }
PG_INLINE void store_u32(void *p, uint32_t v) { memcpy(p, &v, sizeof v); }

PG_INLINE float load_f16(const void *p) {
#if defined(__F16C__)
  return _cvtsh_ss(load_u16(p));
#else
  return pg_f16_to_f32(load_u16(p));
#endif
}
PG_INLINE void store_f16(void *p, float x) { store_u16(p, pg_f32_to_f16(x)); }

PG_INLINE float clampf(float x, float lo, float hi) { // NaN gives lo
  x = x > lo ? x : lo;
  return x < hi ? x : hi;
}
// Truncate to an integer in [lo, hi]; NaN gives lo. So no float reaches a conversion that C leaves undefined.
PG_INLINE int to_int(float x, float lo, float hi) { return (int)clampf(x, lo, hi); }

// The nearest scale that f16 can store: an infinite one would turn the block's zeros into NaN.
PG_INLINE float f16_rounded(float x) { return pg_f16_to_f32(pg_f32_to_f16(clampf(x, -65504, 65504))); }
PG_INLINE void store_scale(void *p, float x) { store_f16(p, clampf(x, -65504, 65504)); }

// y[0..n) = expression of i, VF_N elements at a time from i on; n is a multiple of 16.
#define PUT(y, n, expression)                                                                                          \
  for (int i = 0; i < (n); i += VF_N) vf_store((y) + i, expression)

// Round halves away from zero, like roundf, for |x| < 2^22; compilers can vectorise this form.
PG_INLINE float round_away(float x) { return x + copysignf(0x1.fffffep-2f, x); }
