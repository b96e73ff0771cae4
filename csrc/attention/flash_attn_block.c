// Convert a block of K or V to f32.
#include "attention/flash_attn.h"

PG_INLINE vf float_load_n(const char *p, int64_t i, int n, int64_t type) {
  if (type == PG_F32) return vf_load_n((const float *)p + i, n);
  if (type == PG_F16) return vf_load_f16_n((const uint16_t *)p + i, n);
  return vf_load_bf16_n((const uint16_t *)p + i, n);
}

// Convert n floats of a type; pad with zeros to whole registers.
PG_INLINE void floats(const char *p, float *to, int64_t n, int64_t type) {
  int64_t i = 0;
  for (; i + 4 * VF_N <= n; i += 4 * VF_N)
    for (int v = 0; v < 4; v++) vf_store(to + i + v * VF_N, float_load(p, i + v * VF_N, type));
  for (; i + VF_N <= n; i += VF_N) vf_store(to + i, float_load(p, i, type));
  if (i < n) vf_store(to + i, float_load_n(p, i, (int)(n - i), type));
}

PG_INLINE void float_rows(const pg_tensor *x, const char *first, const block *b, float *to, int64_t ld, int64_t type) {
  for (int i = 0; i < b->n; i++) floats(first + b->keys[i] * x->nb[1], to + i * ld, x->ne[0], type);
}

void PG_FN(attention_rows)(const pg_tensor *x, const char *head, const block *b, float *to, int64_t ld) {
  const char *first = head + b->first * x->nb[1];
  if (x->type == PG_F32) {
    float_rows(x, first, b, to, ld, PG_F32);
  } else if (x->type == PG_F16) {
    float_rows(x, first, b, to, ld, PG_F16);
  } else if (x->type == PG_BF16) {
    float_rows(x, first, b, to, ld, PG_BF16);
  } else {
    const pg_to_f32 to_f32 = PG_FN(to_f32)(x->type);
    for (int i = 0; i < b->n; i++) {
      to_f32(first + b->keys[i] * x->nb[1], to + i * ld, x->ne[0]);
      for (int64_t c = x->ne[0]; c < ld; c++) to[i * ld + c] = 0;
    }
  }
}

PG_INLINE void float_columns(const pg_tensor *x, const char *first, const block *b, float *to, int64_t type) {
  const int64_t size = type == PG_F32 ? 4 : 2;
  for (int64_t c = 0; c < x->ne[1]; c++, first += x->nb[1], to += KEYS) {
    const int from = b->keys[0], n = b->keys[b->n - 1] + 1 - from;
    if (b->run) {
      floats(first + from * size, to, n, type);
      continue;
    }
    float all[KEYS];
    floats(first + from * size, all, n, type);
    for (int i = 0; i < b->n; i++) to[i] = all[b->keys[i] - from];
    for (int i = b->n; i % VF_N; i++) to[i] = 0;
  }
}

void PG_FN(attention_columns)(const pg_tensor *x, const char *head, const block *b, float *to) {
  if (x->type == PG_F32) {
    float_columns(x, head + b->first * 4, b, to, PG_F32);
  } else if (x->type == PG_F16) {
    float_columns(x, head + b->first * 2, b, to, PG_F16);
  } else {
    float_columns(x, head + b->first * 2, b, to, PG_BF16);
  }
}
