// Lists of texts: read them from a GGUF file, and build the table that finds them.
#include "vocab/texts.h"

int64_t pg_gguf_strings(const uint8_t *data, int64_t size, int64_t *at, int64_t n, uint8_t *packed) {
  for (int64_t i = 0; i < n; i++) {
    uint64_t length;
    if (size - *at < 8) return i;
    memcpy(&length, data + *at, 8);
    if (length > (uint64_t)(size - *at - 8)) return i;
    if (packed) {
      memcpy(packed, data + *at + 8, length);
      packed[length] = 0;
      packed += length + 1;
    }
    *at += 8 + (int64_t)length;
  }
  return n;
}

void pg_texts_index(const pg_texts *t, int64_t n) {
  for (int32_t i = 0; i < n; i++) {
    int64_t length;
    const uint8_t *text = text_of(t, i, &length);
    const uint64_t hash = text_hash_of(&t->seed, 0, text, length);
    if (text_at(t, hash, text, length) >= 0) continue; // among equal texts the first counts
    uint64_t s = text_slot(t, hash);
    while (t->slots[s]) s = (s + 1) & (uint64_t)(t->n_slots - 1);
    t->slots[s] = text_entry(hash, i);
  }
}
