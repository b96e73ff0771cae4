// What decoding and encoding the grid formats share.
#pragma once
#include "block.h"
#include "iq_grids.h"

#define IQ1_SHIFT 0.125f

// Eight signs stored as seven: the number of negatives is even, so bit 7 is the parity of bits 0..6.
PG_INLINE uint32_t even_signs(uint32_t bits) {
  bits &= 127;
  return bits | ((0x6996u >> ((bits ^ bits >> 4) & 15)) & 1) << 7;
}
