// Convert columns of b to bytes and factors.
#define R16_INT8
#include "products/gemm/int8_columns.h"
#include "products/gemm/columns.h"
#include "products/gemm/fixed_pairs.h"

// q[0..16) = x * inv as integers; returns their sum.
#if VF_N == 16
PG_INLINE int32_t put_part(int8_t *q, const float *x, float inv) {
  const __m512i v = _mm512_cvtps_epi32(vf_mul(vf_load(x), vf_set1(inv)));
  _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(v));
  return _mm512_reduce_add_epi32(v);
}
#else
PG_INLINE int32_t put_part(int8_t *q, const float *x, float inv) {
  const __m256i a = _mm256_cvtps_epi32(vf_mul(vf_load(x), vf_set1(inv))),
                b = _mm256_cvtps_epi32(vf_mul(vf_load(x + 8), vf_set1(inv))), s = _mm256_add_epi32(a, b);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  _mm_storeu_si128((__m128i *)q, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
}
#endif

int64_t R16_INT8_FN(r16_columns_bytes)(const r16_product *p) {
  const r16_columns c = r16_columns_in(NULL, p);
  const int64_t bytes = pg_plus(pg_times(pg_times(c.n_groups, R16_WIDTH), c.k), 63) / 64 * 64;
  return pg_plus(bytes, pg_times(pg_times(c.n_groups, c.n_strips), sizeof(r16_numbers)));
}

void R16_INT8_FN(r16_put_columns)(const r16_columns *c, const r16_product *p, r16_share share) {
  const r16_quad g = r16_quad_of(c, p, share);
  for (int64_t s = share.first; s < share.last && g.n; s++) {
    const int64_t k0 = s * c->strip, n = r16_strip_elements(c, s);
    const r16_byte_columns to = r16_bytes_at(c, share.group, s);
    r16_numbers *of = to.numbers;
    _Alignas(64) int8_t four[R16_QUAD][2 * KC];
    for (int j = 0; j < R16_QUAD; j++) {
      const int64_t column = share.column + j;
      float x[KC], factors[R16_PARTS];
      if (j < g.n) r16_get(x, p, &g, j, k0, n);
      const r16_step step = j < g.n ? r16_round(x, n, factors) : (r16_step){0, 0};
      of->steps[column] = step.d;
      for (int64_t h = 0; h < n / R16_PART; h++) {
        const float factor = step.inv == 0 ? 0 : factors[h];
        int32_t sum = 0;
        if (factor > 0) {
          sum = put_part(four[j] + h * R16_PART, x + h * R16_PART, 1 / factor);
        } else {
          memset(four[j] + h * R16_PART, 0, R16_PART);
        }
        const int32_t whole = (int32_t)factor;
#if defined(__AVX512VNNI__)
        of->factors[h][column] = whole;
        of->less[h][column] = -sum;
#else
        of->factors[h][column] = whole << 16 | whole;
        of->less[h][column] = -sum * whole;
#endif
        of->sums[0][h][column] = (float)(sum * whole);
        if (h % 2) of->sums[1][h / 2][column] = of->sums[0][h - 1][column] + of->sums[0][h][column];
      }
    }
    put_4_columns((int16_t *)(to.bytes + share.column * 4), (const int16_t(*)[KC])four, to.width, n / 4);
  }
}
