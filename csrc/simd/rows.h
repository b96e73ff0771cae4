// Read and write rows of any float type and stride as f32, for kernels whose rows are not dense f32.
#pragma once
#include "kernel.h"

static inline int pg_is_f32_row(const pg_tensor *t) { return t->type == PG_F32 && (t->nb[0] == 4 || t->ne[0] == 1); }

// dst[0..n) = elements k.. of the row that starts at `row` (F32, F16, BF16 or I32, any stride).
static inline void pg_get_f32(float *dst, const pg_tensor *t, const char *row, int64_t k, int64_t n) {
  const int64_t nb = t->nb[0];
  const char *p = row + k * nb;
  int64_t i = 0;
  switch (t->type) {
  case PG_F32:
    if (nb == 4) {
      memcpy(dst, p, n * 4);
    } else {
      for (; i < n; i++) dst[i] = *(const float *)(p + i * nb);
    }
    break;
  case PG_F16:
    if (nb == 2)
      for (; i + VF_N <= n; i += VF_N) vf_store(dst + i, vf_load_f16(p + i * 2));
    for (; i < n; i++) dst[i] = pg_f16_to_f32(*(const uint16_t *)(p + i * nb));
    break;
  case PG_I32:
    for (; i < n; i++) dst[i] = (float)*(const int32_t *)(p + i * nb);
    break;
  default: // PG_BF16
    if (nb == 2)
      for (; i + VF_N <= n; i += VF_N) vf_store(dst + i, vf_load_bf16(p + i * 2));
    for (; i < n; i++) dst[i] = pg_bf16_to_f32(*(const uint16_t *)(p + i * nb));
  }
}

// dst[0..n) = elements k.. of a row that may be shorter: it repeats.
static inline void pg_get_repeated_f32(float *dst, const pg_tensor *t, const char *row, int64_t k, int64_t n) {
  if (t->ne[0] == 1) {
    pg_get_f32(dst, t, row, 0, 1);
    for (int64_t j = 1; j < n; j++) dst[j] = dst[0];
    return;
  }
  for (int64_t j = 0; j < n;) {
    const int64_t at = (k + j) % t->ne[0], m = PG_MIN(n - j, t->ne[0] - at);
    pg_get_f32(dst + j, t, row, at, m);
    j += m;
  }
}

// Elements k.. of the row = src[0..n), rounded to the row's type.
static inline void pg_put_f32(const pg_tensor *t, char *row, int64_t k, const float *src, int64_t n) {
  const int64_t nb = t->nb[0];
  char *p = row + k * nb;
  int64_t i = 0;
  switch (t->type) {
  case PG_F32:
    if (nb == 4) {
      memcpy(p, src, n * 4);
    } else {
      for (; i < n; i++) *(float *)(p + i * nb) = src[i];
    }
    break;
  case PG_F16:
    if (nb == 2)
      for (; i + VF_N <= n; i += VF_N) vf_store_f16(p + i * 2, vf_load(src + i));
    for (; i < n; i++) *(uint16_t *)(p + i * nb) = pg_f32_to_f16(src[i]);
    break;
  default: // PG_BF16
    for (; i < n; i++) *(uint16_t *)(p + i * nb) = pg_f32_to_bf16(src[i]);
  }
}

// Sum of n dense floats, in eight double accumulators (the inner loop becomes vector code).
static inline double pg_sum_f32(const float *x, int64_t n) {
  double acc[8] = {0};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; j++) acc[j] += (double)x[i + j];
  for (; i < n; i++) acc[0] += (double)x[i];
  return ((acc[0] + acc[4]) + (acc[1] + acc[5])) + ((acc[2] + acc[6]) + (acc[3] + acc[7]));
}
