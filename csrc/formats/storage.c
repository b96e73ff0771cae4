// The table of storage types, and the plain float types.
#include "formats/block.h"
#include "formats/formats.h"

static void f32_to_f32(const void *row, float *dst, int64_t n) { memcpy(dst, row, n * sizeof *dst); }
static void f32_from_f32(const float *src, void *row, int64_t n) { memcpy(row, src, n * sizeof *src); }

static void f16_to_f32(const void *row, float *dst, int64_t n) {
  const uint16_t *p = row;
  int64_t i = 0;
  for (; i + VF_N <= n; i += VF_N) vf_store(dst + i, vf_load_f16(p + i));
  for (; i < n; i++) dst[i] = load_f16(p + i);
}
static void f16_from_f32(const float *src, void *row, int64_t n) {
  uint16_t *p = row;
  int64_t i = 0;
  for (; i + VF_N <= n; i += VF_N) vf_store_f16(p + i, vf_load(src + i));
  for (; i < n; i++) store_f16(p + i, src[i]);
}

static void bf16_to_f32(const void *row, float *dst, int64_t n) {
  const uint16_t *p = row;
  int64_t i = 0;
  for (; i + VF_N <= n; i += VF_N) vf_store(dst + i, vf_load_bf16(p + i));
  for (; i < n; i++) dst[i] = pg_bf16_to_f32(load_u16(p + i));
}
static void bf16_from_f32(const float *src, void *row, int64_t n) {
  uint16_t *p = row;
  for (int64_t i = 0; i < n; i++) store_u16(p + i, pg_f32_to_bf16(src[i]));
}

static void f32_from_f32_weighted(const float *src, const float *w, void *row, int64_t n) { f32_from_f32(src, row, n); }
static void f16_from_f32_weighted(const float *src, const float *w, void *row, int64_t n) { f16_from_f32(src, row, n); }
static void bf16_from_f32_weighted(const float *src, const float *w, void *row, int64_t n) {
  bf16_from_f32(src, row, n);
}

#define X(type, name, ...)                                                                                             \
  void PG_FN(name##_to_f32)(const void *row, float *dst, int64_t n);                                                   \
  void PG_FN(name##_from_f32)(const float *src, void *row, int64_t n);                                                 \
  void PG_FN(name##_from_f32_weighted)(const float *src, const float *weights, void *row, int64_t n);
BLOCK_FORMATS(X)
#undef X

#define FIND(fn, suffix)                                                                                               \
  fn PG_FN(suffix)(int64_t type) {                                                                                     \
    switch (type) {                                                                                                    \
    case PG_F32:                                                                                                       \
      return f32_##suffix;                                                                                             \
    case PG_F16:                                                                                                       \
      return f16_##suffix;                                                                                             \
    case PG_BF16:                                                                                                      \
      return bf16_##suffix;                                                                                            \
      BLOCK_FORMATS(X)                                                                                                 \
    default:                                                                                                           \
      return NULL;                                                                                                     \
    }                                                                                                                  \
  }
#define X(type, name, ...)                                                                                             \
  case PG_##type:                                                                                                      \
    return PG_FN(name##_to_f32);
FIND(pg_to_f32, to_f32)
#undef X
#define X(type, name, ...)                                                                                             \
  case PG_##type:                                                                                                      \
    return PG_FN(name##_from_f32);
FIND(pg_from_f32, from_f32)
#undef X
#define X(type, name, ...)                                                                                             \
  case PG_##type:                                                                                                      \
    return PG_FN(name##_from_f32_weighted);
FIND(pg_from_f32_weighted, from_f32_weighted)
#undef X
