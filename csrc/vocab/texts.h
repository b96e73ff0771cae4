// Finding texts by their bytes.
#pragma once
#include <string.h>

#include "vocab/hash.h"

static inline const uint8_t *text_of(const pg_texts *t, int32_t i, int64_t *n) {
  const int64_t start = i ? t->ends[i - 1] + 1 : 0;
  *n = t->ends[i] - start;
  return t->bytes + start;
}

static inline uint64_t text_slot(const pg_texts *t, uint64_t hash) {
  return (hash ^ hash >> 32) & (uint64_t)(t->n_slots - 1);
}

// The contents of a slot: the upper half of the hash, and the text's number + 1.
static inline uint64_t text_entry(uint64_t hash, int32_t i) { return (hash & ~0xffffffffull) | ((uint64_t)i + 1); }

// The text with the bytes a[0 .. n_a] b[0 .. n_b] and this hash; -1 when there is none.
static inline int32_t text_of_two(const pg_texts *t, uint64_t hash, const uint8_t *a, int64_t n_a, const uint8_t *b,
                                  int64_t n_b) {
  for (uint64_t s = text_slot(t, hash); t->slots[s]; s = (s + 1) & (uint64_t)(t->n_slots - 1)) {
    if ((t->slots[s] ^ hash) >> 32) continue;
    int64_t n;
    const int32_t i = (int32_t)(uint32_t)t->slots[s] - 1;
    const uint8_t *text = text_of(t, i, &n);
    if (n == n_a + n_b && !memcmp(text, a, n_a) && !memcmp(text + n_a, b, n_b)) return i;
  }
  return -1;
}

static inline int32_t text_at(const pg_texts *t, uint64_t hash, const uint8_t *text, int64_t n) {
  return text_of_two(t, hash, text, n, text, 0);
}
