// Floats as numbers to sort by.
#pragma once
#include "kernel.h"

// A number that orders like x: -0 equals 0, NaN of either sign is above +inf.
static inline uint32_t order_of(float x) {
  union {
    float f;
    uint32_t u;
  } v = {.f = x + 0.0f};
  if (x != x) return UINT32_MAX;
  return v.u & 0x80000000 ? ~v.u : v.u | 0x80000000;
}
