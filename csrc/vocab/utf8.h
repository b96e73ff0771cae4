// Characters of UTF-8.
#pragma once
#include <stdint.h>

// The number of bytes of the character that text[0 .. n], n > 0, begins with. A byte that is not UTF-8 counts as a
// character.
static inline int64_t utf8_length(const uint8_t *text, int64_t n) {
  const uint8_t lead = text[0];
  const int64_t length = lead < 0xC2 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 1;
  if (length == 1 || length > n) return 1;
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;  // otherwise a shorter form exists
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF; // a surrogate, or beyond U+10FFFF
  if (text[1] < low || text[1] > high) return 1;
  for (int64_t i = 2; i < length; i++) {
    if ((text[i] & 0xC0) != 0x80) return 1;
  }
  return length;
}
