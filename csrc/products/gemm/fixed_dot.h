// Products of pairs of 16-bit integers, for the tiles of fixed.c and fixed_blocks.c.
#pragma once
#include "products/r16/vec.h"

#define UNROLL _Pragma("GCC unroll 16")

#if VF_N == 16
PG_INLINE vi pair(const int16_t *p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return _mm512_set1_epi32(v);
}
PG_INLINE vi dot_pairs(vi sum, vi a, vi b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
#else
PG_INLINE vi pair(const int16_t *p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return _mm256_set1_epi32(v);
}
PG_INLINE vi dot_pairs(vi sum, vi a, vi b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
#endif

// Keep sums in their registers and additions in their order: gcc's own order does not fit the registers.
#if defined(PG_EMULATE)
#define STAYS(sum)
#else
#define STAYS(sum) __asm__("" : "+v"(sum))
#endif

// A function for each number of columns, so that missing columns cost nothing.
#if VF_N == 16
#define EACH_NT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#else
#define EACH_NT(X) X(1) X(2) X(3) X(4)
#endif
