// Convert columns of b to bytes, with the least error.
#define R16_INT8
#include "products/gemm/int8_columns.h"
#include "products/gemm/columns.h"
#include "products/gemm/fixed_pairs.h"
#include "products/r16/vec.h"

#define EACH(n, i) _Pragma("GCC unroll 32") for (int i = 0; i < (n); i++)

// What the largest element of a unit becomes, in each way that is tried. Where the others then fall between two
// integers is chance, and the best of many ways loses less than the first.
#define LARGEST(i) (127.45f - (float)(i) * (VF_N == 16 ? 0.55f : 1.1f))

PG_INLINE vf rounded(vf a, vf b) {        // a * b
  const vf middle = vf_set1(12582912.0f); // floats of this size are whole
  return vf_sub(vf_fma(a, b, middle), middle);
}

#if VF_N == 16
PG_INLINE void put_rounded(int8_t *q, vf a) {
  _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
#else
PG_INLINE void put_rounded(int8_t *q, vf a) {
  const __m256i v = _mm256_cvtps_epi32(a);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64((__m128i *)q, _mm_packs_epi16(words, words));
}
#endif

typedef struct unit {
  float d;      // the step: NaN for NaN and infinities
  float sum[2]; // of the integers of each half
} unit;

// Convert a unit, with the least error for the integers that it gets. Values so small that their step would not be a
// normal number count as 0.
PG_INLINE unit put_unit(int8_t *q, const float *x) {
  enum { N = R16_UNIT / VF_N };
  vf max = vf_zero(), sum = vf_zero();
  EACH(N, i) {
    const vf a = vf_abs(vf_load(x + i * VF_N));
    max = vf_max(max, a);
    sum = vf_fma(a, vf_set1(0x1p-8f), sum); // finite for finite values
  }
  const float top = vf_hmax(max);
  const int finite = vf_sum(sum) < INFINITY;
  if (!finite || top < 0x1p-118f) {
    memset(q, 0, R16_UNIT);
    return (unit){finite ? 0 : NAN, {0, 0}};
  }
  _Alignas(64) float y[R16_UNIT], ways[VF_N]; // y: x, the largest as 1, so that squares are finite
  EACH(N, i) vf_store(y + i * VF_N, vf_mul(vf_load(x + i * VF_N), vf_set1(1.0f / top)));
  EACH(VF_N, i) ways[i] = LARGEST(i);
  const vf all = vf_load(ways);
  vf yq[2] = {vf_zero(), vf_zero()}, qq[2] = {vf_zero(), vf_zero()};
  EACH(R16_UNIT, e) {
    const vf v = vf_set1(y[e]), r = rounded(v, all);
    yq[e % 2] = vf_fma(v, r, yq[e % 2]);
    qq[e % 2] = vf_fma(r, r, qq[e % 2]);
  }
  const vf of_yq = vf_add(yq[0], yq[1]);
  const vf kept = vf_div(vf_mul(of_yq, of_yq), vf_add(qq[0], qq[1])); // the squares of x that are not lost
  const float way = vf_hmax(vf_if_lt(kept, vf_set1(vf_hmax(kept)), vf_zero(), all));
  vf best_yq = vf_zero(), best_qq = vf_zero();
  unit u;
  EACH(2, h) {
    vf half = vf_zero();
    EACH(N / 2, i) {
      const int at = (h * (N / 2) + i) * VF_N;
      const vf v = vf_load(y + at), r = rounded(v, vf_set1(way));
      put_rounded(q + at, r);
      best_yq = vf_fma(v, r, best_yq);
      best_qq = vf_fma(r, r, best_qq);
      half = vf_add(half, r);
    }
    u.sum[h] = vf_sum(half);
  }
  u.d = top * (vf_sum(best_yq) / vf_sum(best_qq));
  return u;
}

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
      float x[KC];
      if (j < g.n) r16_get(x, p, &g, j, k0, n);
      for (int64_t u = 0; u < n / R16_UNIT; u++) {
        int8_t *q = four[j] + u * R16_UNIT;
        unit one = {0, {0, 0}};
        if (j < g.n)
          one = put_unit(q, x + u * R16_UNIT);
        else
          memset(q, 0, R16_UNIT);
        const float all = one.sum[0] + one.sum[1];
        of->steps[u][column] = one.d;
        for (int h = 0; h < 2; h++) {
          of->sums[0][2 * u + h][column] = -(int32_t)one.sum[h];
          of->moments[0][2 * u + h][column] = one.d * one.sum[h];
        }
        of->sums[1][u][column] = -(int32_t)all;
        of->moments[1][u][column] = one.d * all;
      }
    }
    put_4_columns((int16_t *)(to.bytes + share.column * 4), (const int16_t(*)[KC])four, to.width, n / 4);
  }
}
