// F16 and BF16 rows as they are stored, in the fixed point of fixed.h. The integers of a
// strip lie in the order that packs leave, in rows and in columns alike: their sums are exact, so only the pairs must
// fit.
#pragma once
#include "products/gemm/fixed_columns.h"

// dst[0..n) = src[0..n) * inv as integers; n is a multiple of 32.
PG_INLINE void r16_put_packed(int16_t *dst, const float *src, float inv, int64_t n) {
  const vf scale = vf_set1(inv);
  for (int64_t i = 0; i < n; i += 2 * VF_N) {
    const vf a = vf_mul(vf_load(src + i), scale), b = vf_mul(vf_load(src + i + VF_N), scale);
#if VF_N == 16
    _mm512_storeu_si512(dst + i, _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b)));
#else
    _mm256_storeu_si256((__m256i *)(dst + i), _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b)));
#endif
  }
}

// The step of x[0..n), and by what its integers are multiples of x. With NaN or an infinity anywhere, the step is NaN.
// When all values are below 1e-30, they count as 0. fixed_columns.c
float PG_FN(r16_fixed_step)(const float *x, int64_t n, float *inv);

// Strip `strip` of the R16_ROWS rows from `row` on: ints[r] has the integers of row r, of which n are used. Rows beyond
// the matrix are as the last one.
void PG_FN(r16_put_rows)(int16_t (*ints)[KC], float *steps, const r16_product *p, int64_t row, int64_t strip);
