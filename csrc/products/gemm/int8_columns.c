// Convert columns of b to bytes, with the least error.
#define R16_INT8
#include "products/gemm/int8_columns.h"
#include "products/gemm/columns.h"
#include "products/gemm/fixed_pairs.h"
#include "products/r16/vec.h"

#define EACH(n, i) _Pragma("GCC unroll 32") for (int i = 0; i < (n); i++)

// What the largest element of a unit becomes, in each way that is tried. Where the others then fall between two integers
// is chance, and the best of many is better than the first by 3 dB or so.
#define LARGEST(i) (127.45f - (float)(i) * (VF_N == 16 ? 0.55f : 1.1f))

// Convert a unit. Returns its step: that with the least error for these integers. NaN for NaN and infinities; values so
// small that their step would not be a normal number count as 0.
PG_INLINE float put_unit(int8_t *q, const float *x) {
  vf max = vf_zero(), sum = vf_zero();
  EACH(R16_UNIT / VF_N, i) {
    const vf a = vf_abs(vf_load(x + i * VF_N));
    max = vf_max(max, a);
    sum = vf_fma(a, vf_set1(0x1p-8f), sum); // finite for finite values
  }
  const float top = vf_hmax(max);
  memset(q, 0, R16_UNIT);
  if (!(vf_sum(sum) < INFINITY)) return NAN;
  if (top < 0x1p-118f) return 0;
  const float unit = 1.0f / top;
  float largest[VF_N], of_q[VF_N], of_qq[VF_N];
  EACH(VF_N, i) largest[i] = LARGEST(i);
  const vf ways = vf_load(largest);
  vf xq = vf_zero(), qq = vf_zero();
  EACH(R16_UNIT, e) {
    const vf v = vf_set1(x[e] * unit), r = vf_round(vf_mul(v, ways));
    xq = vf_fma(v, r, xq);
    qq = vf_fma(r, r, qq);
  }
  vf_store(of_q, xq);
  vf_store(of_qq, qq);
  int best = 0; // that with the largest (sum of x q)^2 / (sum of q^2)
  for (int i = 1; i < VF_N; i++)
    if (of_q[i] * of_q[i] * of_qq[best] > of_q[best] * of_q[best] * of_qq[i]) best = i;
  for (int e = 0; e < R16_UNIT; e++) q[e] = (int8_t)rintf(x[e] * unit * largest[best]);
  return top * (of_q[best] / of_qq[best]);
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
        float d = 0;
        if (j < g.n)
          d = put_unit(q, x + u * R16_UNIT);
        else
          memset(q, 0, R16_UNIT);
        int32_t sum[2] = {0, 0};
        for (int e = 0; e < R16_UNIT / 2; e++) sum[0] += q[e], sum[1] += q[e + R16_UNIT / 2];
        of->steps[u][column] = d;
        for (int h = 0; h < 2; h++) {
          of->sums[0][2 * u + h][column] = -sum[h];
          of->moments[0][2 * u + h][column] = d * (float)sum[h];
        }
        of->sums[1][u][column] = -sum[0] - sum[1];
        of->moments[1][u][column] = d * (float)(sum[0] + sum[1]);
      }
    }
    put_4_columns((int16_t *)(to.bytes + share.column * 4), (const int16_t(*)[KC])four, to.width, n / 4);
  }
}
