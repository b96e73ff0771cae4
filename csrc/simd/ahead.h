// Prefetch memory in the order of its addresses. A product reads several rows side by side, which not every CPU's
// prefetchers follow. So each step requests its share of the rows that come next, into the L2 cache, because the L1
// cache would lose most of it again (docs/products.md has measurements).
#pragma once
#include "simd/simd.h"

enum { PG_AHEAD = 1 << 14 }; // least distance in bytes: short rows are read before the next ones have arrived

// Request `bytes`, a constant, from `at` on. Returns where the next request begins.
PG_INLINE const void *pg_ask(const void *at, int bytes) {
  _Pragma("GCC unroll 64") for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)at + i, 0, 2);
  return (const char *)at + bytes;
}
