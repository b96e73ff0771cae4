// Convert columns of b to blocks of 32 integers, each with a scale (integers.h).
#include "products/r16/integers.h"

#include "simd/rms.h"
#include "simd/rows.h"

enum { STRIP = 16 }; // blocks converted to f32 at a time

#if VF_N == 16
PG_INLINE int32_t put16(r16_x *x, int half, const float *v, vf inv) {
  const __m512i q = _mm512_cvtps_epi32(vf_mul(vf_load(v), inv));
  const __m512i hi = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
  const __m512i lo = _mm512_sub_epi32(q, _mm512_slli_epi32(hi, 8));
  _mm_storeu_si128((__m128i *)(x->hi + half * 16), _mm512_cvtepi32_epi8(hi));
  _mm_storeu_si128((__m128i *)(x->lo + half * 16), _mm512_cvtepi32_epi8(lo));
  return _mm512_reduce_add_epi32(q);
}
#else
PG_INLINE int32_t put16(r16_x *x, int half, const float *v, vf inv) {
  const __m256i a = _mm256_cvtps_epi32(vf_mul(vf_load(v), inv)), b = _mm256_cvtps_epi32(vf_mul(vf_load(v + 8), inv));
  const __m256i q = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  const __m256i order = _mm256_set_epi8(15, 14, 11, 10, 13, 12, 9, 8, 7, 6, 3, 2, 5, 4, 1, 0, 15, 14, 11, 10, 13, 12, 9,
                                        8, 7, 6, 3, 2, 5, 4, 1, 0);
  _mm256_storeu_si256((__m256i *)(x->q + half * 16), _mm256_shuffle_epi8(q, order));
  const __m256i hi = _mm256_srai_epi16(_mm256_add_epi16(q, _mm256_set1_epi16(128)), 8);
  const __m256i lo = _mm256_sub_epi16(q, _mm256_slli_epi16(hi, 8));
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(hi, lo), 0xd8);
  _mm_storeu_si128((__m128i *)(x->hi + half * 16), _mm256_castsi256_si128(bytes));
  _mm_storeu_si128((__m128i *)(x->lo + half * 16), _mm256_extracti128_si256(bytes, 1));
  const __m256i s = _mm256_add_epi32(a, b);
  __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
}
#endif

// Convert one block. With NaN or infinities the whole block is NaN. A block whose scale would not be a normal number
// counts as 0.
PG_INLINE void put_block(r16_x *x, const float *v) {
  vf top = vf_zero(), bad = vf_zero();
  for (int i = 0; i < R16_UNIT; i += VF_N) {
    const vf a = vf_load(v + i);
    top = vf_max(top, vf_abs(a));
    bad = vf_fma(a, vf_zero(), bad);
  }
  const float amax = vf_hmax(top), poison = vf_sum(bad); // 0 or NaN
  static const float zeros[R16_UNIT];
  if (poison != poison) v = zeros; // its codes do not count, and NaN has none
  const vf inv = vf_set1(amax >= R16_X_MAX * 0x1p-126f ? R16_X_MAX / amax : 0.0f);
  const int32_t first = put16(x, 0, v, inv), second = put16(x, 1, v + 16, inv),
                sums[] = {first, second, first + second};
  x->d = amax * (1.0f / R16_X_MAX) + poison;
  for (int i = 0; i < 3; i++) {
    x->less[i] = -sums[i];
    x->dsum[i] = x->d * (float)sums[i];
  }
}

int64_t PG_FN(r16_x_bytes)(int64_t k, int64_t n_cols) {
  return pg_times(k / R16_UNIT, pg_times(n_cols, sizeof(r16_x)));
}

void PG_FN(r16_quantize)(const r16_product *p, r16_x *x, int ith, int nth) {
  const pg_tensor *b = p->b;
  const int64_t n_blocks = b->ne[0] / R16_UNIT;
  const pg_range r = pg_share(n_blocks * pg_n_rows(b), ith, nth);
  double scale = 0;
  for (int64_t i = r.first; i < r.last;) {
    const int64_t block = i % n_blocks, n = PG_MIN(PG_MIN(STRIP, n_blocks - block), r.last - i);
    float strip[STRIP * R16_UNIT];
    const char *column = r16_column(b, i / n_blocks);
    pg_get_f32(strip, b, column, block * R16_UNIT, n * R16_UNIT);
    if (p->norm) {
      if (i == r.first || block == 0) scale = pg_rms_scale((const float *)column, b->ne[0], p->eps);
      pg_scale_mul(strip, strip, scale, p->norm + block * R16_UNIT, n * R16_UNIT);
    }
    for (int64_t j = 0; j < n; j++) put_block(x + i + j, strip + j * R16_UNIT);
    i += n;
  }
}
