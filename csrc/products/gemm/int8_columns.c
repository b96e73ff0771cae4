// Convert columns of b to bytes and factors, or to two planes of bytes.
#define R16_INT8
#include "products/gemm/int8_columns.h"
#include "products/gemm/columns.h"
#include "products/gemm/fixed_pairs.h"
#include "products/r16/integers.h"

// Factors as the tile multiplies with them (r16_numbers).
#if defined(__AVX512VNNI__) || VF_N == 4
#define TWICE(factor) (factor)
#else
#define TWICE(factor) ((factor) << 16 | (factor))
#endif

// q[0..16) = x * one as integers; on x86 with 128 added.
#if VF_N == 16
PG_INLINE void put_part(uint8_t *q, const float *x, float one) {
  const __m512i v = _mm512_cvtps_epi32(vf_mul(vf_load(x), vf_set1(one)));
  _mm_storeu_si128((__m128i *)q, _mm_xor_si128(_mm512_cvtepi32_epi8(v), _mm_set1_epi8((char)0x80)));
}
#elif VF_N == 4
PG_INLINE void put_part(uint8_t *q, const float *x, float one) {
  int16x4_t v[4];
  for (int i = 0; i < 4; i++) v[i] = vmovn_s32(vcvtnq_s32_f32(vf_mul(vf_load(x + 4 * i), vf_set1(one))));
  for (int i = 0; i < 2; i++) vst1_u8(q + 8 * i, (uint8x8_t)vmovn_s16(vcombine_s16(v[2 * i], v[2 * i + 1])));
}
#else
PG_INLINE void put_part(uint8_t *q, const float *x, float one) {
  const __m256i a = _mm256_cvtps_epi32(vf_mul(vf_load(x), vf_set1(one))),
                b = _mm256_cvtps_epi32(vf_mul(vf_load(x + 8), vf_set1(one)));
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i *)q, _mm_xor_si128(bytes, _mm_set1_epi8((char)0x80)));
}
#endif

int64_t R16_INT8_FN(r16_columns_bytes)(const r16_product *p) {
  const r16_columns c = r16_columns_in(NULL, p);
  const int64_t bytes = pg_plus(pg_times(pg_times(pg_times(c.n_groups, R16_WIDTH), c.k), r16_planes(p)), 63) / 64 * 64;
  return pg_plus(bytes, pg_times(pg_times(c.n_groups, c.n_strips), sizeof(r16_numbers)));
}

// A run of a column, x[0..n), to its planes and its numbers.
typedef uint8_t planes[2][KC];
PG_INLINE void put_fast(planes to, r16_numbers *of, int64_t column, float *x, int64_t n, int units) {
  r16_rounding r;
  const r16_step step = r16_round(x, n, units, &r);
  if (step.inv == 0) { // the result is 0 or NaN: the integers do not matter, as long as they are any
    memset(&r, 0, sizeof r);
    memset(x, 0, KC * sizeof *x);
  }
  of->steps[column] = step.d;
  for (int64_t h = 0; h < n / R16_PART; h++) {
    put_part(to[0] + h * R16_PART, x + h * R16_PART, r.ones[h]);
    const int32_t factor = (int32_t)r.factors[h];
    of->factors[units ? h / 2 : h][column] = units ? factor : TWICE(factor);
    if (h % 2) of->pairs[h / 2][column] = factor << 16 | (int32_t)r.factors[h - 1];
    of->sums[0][h][column] = r.sums[h] * r.factors[h];
    if (h % 2) of->sums[1][h / 2][column] = of->sums[0][h - 1][column] + of->sums[0][h][column];
  }
}

#if VF_N == 4
PG_INLINE void put_exact(planes to, r16_numbers *of, int64_t column, float *x, int64_t n) {
  const r16_step step = r16_step_of(x, n);
  if (step.inv == 0) memset(x, 0, KC * sizeof *x); // as above
  of->steps[column] = step.d;
  for (int64_t h = 0; h < n / R16_PART; h++) {
    int16x8_t q[2];
    of->sums[0][h][column] = (float)r16_integers_of(q, x + h * R16_PART, vf_set1(step.inv));
    if (h % 2) of->sums[1][h / 2][column] = of->sums[0][h - 1][column] + of->sums[0][h][column];
    for (int i = 0; i < 2; i++) {
      vst1_s8((int8_t *)to[0] + h * R16_PART + 8 * i, r16_hi(q[i]));
      vst1_s8((int8_t *)to[1] + h * R16_PART + 8 * i, r16_lo(q[i]));
    }
  }
}
#endif

void R16_INT8_FN(r16_put_columns)(const r16_columns *c, const r16_product *p, r16_share share) {
  const r16_quad g = r16_quad_of(c, p, share);
  const int n_planes = r16_planes(p);
  for (int64_t s = share.first; s < share.last && g.n; s++) {
    const int64_t k0 = s * c->strip, n = r16_strip_elements(c, s);
    const r16_byte_columns to = r16_bytes_at(c, p, share.group, s);
    _Alignas(64) planes four[R16_QUAD];
    for (int j = 0; j < R16_QUAD; j++) {
      float x[KC];
      if (j < g.n)
        r16_get(x, p, &g, j, k0, n);
      else
        memset(x, 0, sizeof x);
#if VF_N == 4
      if (n_planes == 2) {
        put_exact(four[j], to.numbers, share.column + j, x, n);
        continue;
      }
#endif
      put_fast(four[j], to.numbers, share.column + j, x, n, r16_rounds_units(p->f));
    }
    for (int plane = 0; plane < n_planes; plane++) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
      for (int64_t i = 0; i < n / R16_TOGETHER; i++)
        for (int j = 0; j < R16_QUAD; j++)
          memcpy(to.bytes[i * n_planes + plane][share.column + j], four[j][plane] + i * R16_TOGETHER, R16_TOGETHER);
#else
      put_4_columns((int16_t *)to.bytes[plane][share.column], (const int16_t(*)[KC])four[0][plane],
                    R16_WIDTH * n_planes, n / 4);
#endif
    }
  }
}
