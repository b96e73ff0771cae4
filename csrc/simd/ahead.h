// Memory that is wanted soon, asked for in the order of its addresses. A product reads several rows side by side, which
// not every prefetcher follows (Zen 4's does not where rows are short); each step asks for its share of what comes
// after them, into the L2 cache: the L1 cache would lose most of it again. F16, four rows at a time, GB/s from DRAM,
// one thread, without, into L1 and into L2: rows of 1.5 KiB 10, 22, 22; 4 KiB 17, 13, 23; 11 KiB 15, 13, 18; one stream
// 24. What is in the L2 cache already loses up to 16 % with eight rows and one column (AVX2), else nothing.
#pragma once
#include "simd/simd.h"

enum { PG_AHEAD = 1 << 14 }; // bytes ahead at least: short rows are read before what comes after them is there

// Asks for `bytes`, a constant, from `at` on; where to go on.
PG_INLINE const void *pg_ask(const void *at, int bytes) {
  _Pragma("GCC unroll 64") for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)at + i, 0, 2);
  return (const char *)at + bytes;
}
