// Convert columns of b to blocks of integers (integers.h).
#include "products/r16/integers.h"

#include "products/r16/round.h"
#include "simd/rms.h"
#include "simd/rows.h"

#if VF_N == 16
PG_INLINE int32_t put16(r16_x *x, int half, const float *v, vf inv) {
  const __m512i q = _mm512_cvtps_epi32(vf_mul(vf_load(v), inv));
  const __m512i hi = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
  const __m512i lo = _mm512_sub_epi32(q, _mm512_slli_epi32(hi, 8));
  _mm_storeu_si128((__m128i *)(x->hi + half * 16), _mm512_cvtepi32_epi8(hi));
  _mm_storeu_si128((__m128i *)(x->lo + half * 16), _mm512_cvtepi32_epi8(lo));
  return _mm512_reduce_add_epi32(q);
}
#elif VF_N == 8
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
#else
PG_INLINE int32_t put16(r16_x *x, int half, const float *v, vf inv) {
  int16x8_t q[2];
  const int32_t sum = r16_integers_of(q, v, inv);
  for (int i = 0; i < 2; i++) {
#if R16_WORDS
    vst1q_s16(x->q + half * 16 + 8 * i, q[i]);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    int8_t(*to)[8] = x->both[2 * half + i];
    vst1_s8(to[0], r16_hi(q[i]));
    vst1_s8(to[1], r16_lo(q[i]));
#else
    vst1_s8(x->hi + half * 16 + 8 * i, r16_hi(q[i]));
    vst1_s8(x->lo + half * 16 + 8 * i, r16_lo(q[i]));
#endif
  }
  return sum;
}
#endif

PG_INLINE void put_block(r16_x *x, const float *v, r16_step step) {
  const vf inv = vf_set1(step.inv);
  const int32_t first = put16(x, 0, v, inv), second = put16(x, 1, v + 16, inv),
                sums[] = {first, second, first + second};
  x->d = step.d;
  for (int i = 0; i < 3; i++) {
    x->less[i] = -sums[i];
    x->sums[i] = (float)sums[i];
  }
}

// Convert a run of n elements or fewer for a product; v has room for R16_RUN.
static void put_run(const r16_product *p, r16_x *x, float *v, int64_t n) {
  const r16_step step = p->fast ? r16_rounded(v, n, r16_rounds_units(p->f)) : r16_step_of(v, n);
  static const float zeros[R16_RUN];
  const float *of = step.d == step.d ? v : zeros; // NaN has no integers
  for (int64_t i = 0; i < n; i += R16_UNIT) put_block(x++, of + i, step);
}

int64_t PG_FN(r16_x_bytes)(int64_t k, int64_t n_cols) {
  return pg_times(k / R16_UNIT, pg_times(n_cols, sizeof(r16_x)));
}

void PG_FN(r16_quantize)(const r16_product *p, r16_x *x, int ith, int nth) {
  const pg_tensor *b = p->b;
  const int64_t k = b->ne[0], n_runs = (k + R16_RUN - 1) / R16_RUN;
  const pg_range r = pg_share(n_runs * pg_n_rows(b), ith, nth);
  double scale = 0;
  for (int64_t i = r.first; i < r.last; i++) {
    const int64_t first = i % n_runs * R16_RUN, n = PG_MIN(R16_RUN, k - first);
    float run[R16_RUN];
    const char *column = r16_column(b, i / n_runs);
    pg_get_f32(run, b, column, first, n);
    if (p->norm) {
      if (i == r.first || first == 0) scale = pg_rms_scale((const float *)column, k, p->eps);
      pg_scale_mul(run, run, scale, p->norm + first, n);
    }
    put_run(p, x + (i / n_runs * k + first) / R16_UNIT, run, n);
  }
}
