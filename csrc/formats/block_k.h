// The packed scales of Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima in 12 bytes.
#pragma once
#include "formats/block.h"

typedef struct scale_min {
  int scale, min;
} scale_min;

// Pairs 0..3: the low 6 bits of bytes i and i + 4. Pairs 4..7: the nibbles of byte i + 4 under the top bits of i - 4
// and i.
PG_INLINE scale_min get_scale_min(const uint8_t *p, int i) {
  if (i < 4) return (scale_min){p[i] & 63, p[i + 4] & 63};
  return (scale_min){(p[i + 4] & 15) | (p[i - 4] >> 6) << 4, (p[i + 4] >> 4) | (p[i] >> 6) << 4};
}

// The inverse, into bytes that are zero before.
PG_INLINE void put_scale_min(uint8_t *restrict p, int i, int scale, int min) {
  if (i < 4) {
    p[i] |= (uint8_t)scale;
    p[i + 4] |= (uint8_t)min;
    return;
  }
  p[i + 4] |= (uint8_t)((scale & 15) | (min & 15) << 4);
  p[i - 4] |= (uint8_t)(scale >> 4 << 6);
  p[i] |= (uint8_t)(min >> 4 << 6);
}
