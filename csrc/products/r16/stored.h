// Blocks as they are stored: shared by the code that unpacks and assembles them.
#pragma once
#include "formats/formats.h"
#include "products/r16/r16.h"

#define BYTES(x) (0x01010101u * (x)) // x in each byte

// A unit of one row: its quartets of codes, and its two (or fewer) bytes of scales, as r16_scales defines them.
typedef struct row_unit {
  uint32_t q[R16_QUARTETS];
  uint8_t scale[2];
} row_unit;

typedef struct stored {
  int bytes, d, m; // of a block, and where in it the f16 d and m are (d < 0: iq1_m_d)
} stored;

enum { R16_MAX_STORED = 256 }; // no block has more bytes

#define X(name, symbol, elements, bytes, d, m)                                                                         \
  static const stored stored_##name __attribute__((unused)) = {bytes, d, m};
BLOCK_FORMATS(X)
#undef X

PG_INLINE stored stored_of(int64_t type) {
  switch (type) {
#define X(name, ...)                                                                                                   \
  case PG_##name:                                                                                                      \
    return stored_##name;
    BLOCK_FORMATS(X)
#undef X
  default:
    return (stored){0, 0, 0};
  }
}
