// Shared by decoding and encoding of the grid formats.
#pragma once
#include "formats/block.h"
#include "formats/iq_grids.h"

#define IQ1_SHIFT 0.125f

// Eight signs stored as seven: the number of negatives is even, so bit 7 is the parity of bits 0..6.
PG_INLINE uint32_t even_signs(uint32_t bits) {
  bits &= 127;
  return bits | ((0x6996u >> ((bits ^ bits >> 4) & 15)) & 1) << 7;
}

// IQ1_M keeps d in the top nibbles of its four words of scales.
PG_INLINE uint16_t iq1_m_d(const uint8_t *b) {
  uint16_t bits = 0;
  for (int i = 0; i < 4; i++) bits |= (load_u16(b + 48 + i * 2) >> 12) << (i * 4);
  return bits;
}
