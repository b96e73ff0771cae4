// Find the pairs of symbols that merge: from a list of merges, or from texts with scores.
#include "vocab/texts.h"
#include "vocab/utf8.h"

void pg_pairs_of_merges(const pg_texts *t, const uint8_t *merges, const int64_t *ends, int64_t n, int32_t *left,
                        int32_t *right, int32_t *merged) {
  for (int64_t i = 0, start = 0; i < n; start = ends[i++] + 1) {
    const uint8_t *a = merges + start;
    const int64_t length = ends[i] - start;
    left[i] = right[i] = merged[i] = -1;
    if (!length) continue;
    const uint8_t *space = memchr(a + 1, ' ', length - 1); // a side is never empty
    if (!space) continue;
    const uint8_t *b = space + 1;
    const int64_t n_a = space - a, n_b = length - n_a - 1;
    const uint64_t hash = text_hash_of(&t->seed, 0, a, n_a);
    left[i] = text_at(t, hash, a, n_a);
    right[i] = text_at(t, text_hash_of(&t->seed, 0, b, n_b), b, n_b);
    merged[i] = text_of_two(t, text_hash_of(&t->seed, hash, b, n_b), a, n_a, b, n_b);
  }
}

// The code point of the one character that n bytes of UTF-8 are.
static int32_t code_point(const uint8_t *text, int64_t n) {
  int32_t c = n == 1 ? text[0] : text[0] & (0x7F >> n);
  for (int64_t i = 1; i < n; i++) c = c << 6 | (text[i] & 0x3F);
  return c;
}

// Whether there is a symbol for these bytes, and which one.
static int symbol_of(const pg_texts *t, uint64_t hash, const uint8_t *text, int64_t n, int32_t *symbol) {
  *symbol = text_at(t, hash, text, n);
  if (*symbol >= 0) return 1;
  const int64_t first = utf8_length(text, n);
  *symbol = -1 - code_point(text, first);
  return first == n;
}

int64_t pg_pairs_of_texts(const pg_texts *t, int64_t n, int32_t *left, int32_t *right, int32_t *merged) {
  int64_t n_pairs = 0;
  for (int32_t i = 0; i < n; i++) {
    int64_t length, cut = 0;
    const uint8_t *text = text_of(t, i, &length);
    uint64_t power = 1, before = 0; // base to the number of bytes that follow; the hashes of both sides
    for (int64_t j = 0; j < length; j++) power = text_times(power, t->seed.base);
    uint64_t behind = text_hash_of(&t->seed, 0, text, length);
    while (cut < length) {
      for (const int64_t end = cut + utf8_length(text + cut, length - cut); cut < end; cut++) {
        before = text_hash(&t->seed, before, text[cut]);
        behind = text_hash_behind(behind, text[cut], power);
        power = text_times(power, t->seed.inverse);
      }
      if (cut == length || !symbol_of(t, before, text, cut, &left[n_pairs])) continue;
      if (symbol_of(t, behind, text + cut, length - cut, &right[n_pairs])) merged[n_pairs++] = i;
    }
  }
  return n_pairs;
}
