// Integers in the order of pairs (fixed.h).
#pragma once
#include "products/gemm/gemm.h"

// dst[0..n) = src[0..n) * inv as integers, in the order of pairs; n is a multiple of 32.
PG_INLINE void put_ints(int16_t *dst, const float *src, float inv, int64_t n) {
  const vf scale = vf_set1(inv);
#if VF_N == 16
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7); // undoes the interleaving of packs
  for (int64_t i = 0; i < n; i += 32) {
    const __m512i a = _mm512_cvtps_epi32(vf_mul(vf_load(src + i), scale)),
                  b = _mm512_cvtps_epi32(vf_mul(vf_load(src + i + 16), scale));
    const __m512i q = _mm512_packs_epi32(_mm512_shuffle_epi32(a, 0xd8), _mm512_shuffle_epi32(b, 0xd8));
    _mm512_storeu_si512(dst + i, _mm512_permutexvar_epi64(order, q));
  }
#elif VF_N == 8
  for (int64_t i = 0; i < n; i += 16) {
    const __m256i a = _mm256_cvtps_epi32(vf_mul(vf_load(src + i), scale)),
                  b = _mm256_cvtps_epi32(vf_mul(vf_load(src + i + 8), scale));
    const __m256i q = _mm256_packs_epi32(_mm256_shuffle_epi32(a, 0xd8), _mm256_shuffle_epi32(b, 0xd8));
    _mm256_storeu_si256((__m256i *)(dst + i), _mm256_permute4x64_epi64(q, 0xd8));
  }
#else
  for (int64_t i = 0; i < n; i += 4) {
    const int32x4_t q = vcvtnq_s32_f32(vf_mul(vf_load(src + i), scale));
    vst1_s16(dst + i, vmovn_s32(PG_SHUFFLE(q, q, 0, 2, 1, 3)));
  }
#endif
}

// dst[pair][column] = src[column][pair] for 4 columns; dst has `width` columns.
PG_INLINE void put_4_columns(int16_t *dst, const int16_t (*src)[KC], int width, int64_t pairs) {
  typedef int32_t four __attribute__((vector_size(16)));
  for (int64_t i = 0; i < pairs; i += 4) {
    four a[4], b[4];
    for (int j = 0; j < 4; j++) memcpy(a + j, src[j] + 2 * i, sizeof *a);
    for (int j = 0; j < 2; j++) {
      b[j] = PG_SHUFFLE(a[2 * j], a[2 * j + 1], 0, 4, 1, 5);
      b[2 + j] = PG_SHUFFLE(a[2 * j], a[2 * j + 1], 2, 6, 3, 7);
    }
    for (int j = 0; j < 2; j++) {
      const four low = PG_SHUFFLE(b[2 * j], b[2 * j + 1], 0, 1, 4, 5),
                 high = PG_SHUFFLE(b[2 * j], b[2 * j + 1], 2, 3, 6, 7);
      memcpy(dst + (i + 2 * j) * 2 * width, &low, sizeof low);
      memcpy(dst + (i + 2 * j + 1) * 2 * width, &high, sizeof high);
    }
  }
}
