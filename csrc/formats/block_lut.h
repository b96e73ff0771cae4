// Formats whose 4-bit codes stand for 16 fixed values.
#pragma once
#include "formats/block.h"

// IQ4_NL, IQ4_XS: denser around zero, as gaussian weights are.
static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// MXFP4, NVFP4: E2M1 numbers, doubled to be integers (their scales are halved).
static const int8_t fp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// y[0..n) = scale * value of the low nibbles of q[0..n), y[n..2n) of the high ones. n is 8 or 16.
PG_INLINE void put_values(float *restrict y, const int8_t *restrict values, const uint8_t *restrict q, int n,
                          float scale) {
  int8_t v[32];
#if defined(__AVX2__)
  const __m128i table = _mm_loadu_si128((const __m128i *)values), mask = _mm_set1_epi8(15);
  const __m128i codes = n == 16 ? _mm_loadu_si128((const __m128i *)q) : _mm_loadl_epi64((const __m128i *)q);
  const __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(codes, mask));
  const __m128i high = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(codes, 4), mask));
  _mm_storeu_si128((__m128i *)v, n == 16 ? low : _mm_unpacklo_epi64(low, high));
  if (n == 16) _mm_storeu_si128((__m128i *)(v + n), high);
#else
  for (int j = 0; j < n; j++) {
    v[j] = values[q[j] & 15];
    v[j + n] = values[q[j] >> 4];
  }
#endif
  PUT(y, 2 * n, vf_mul(vf_set1(scale), vf_load_i8(v + i)));
}

// E8M0: a power of two, here of half the value: 2^(e - 128); the two smallest are subnormal.
PG_INLINE float e8m0_half(uint8_t e) {
  const uint32_t bits = e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23;
  float v;
  memcpy(&v, &bits, sizeof v);
  return v;
}

// UE4M3 (bias 7), here of half the value; 0x7f, its NaN, counts as 0 and the top bit is ignored.
PG_INLINE float ue4m3_half(uint8_t e) {
  const int exp = (e >> 3) & 15, man = e & 7;
  if (e == 0x7f) return 0;
  if (exp == 0) return (float)man * 0x1p-10f;
  const uint32_t bits = (uint32_t)(exp + 119) << 23 | (uint32_t)man << 20;
  float v;
  memcpy(&v, &bits, sizeof v);
  return v;
}
