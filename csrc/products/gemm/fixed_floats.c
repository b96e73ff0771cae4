// Convert rows of F16 and BF16 to the integers of fixed.h.
#include "products/gemm/fixed_floats.h"

#include "products/r16/vec.h"

#define UNROLL _Pragma("GCC unroll 16")

enum {
  STRIP = KC / 2, // of floats, r16_strip
  PAIR = 2 * VF_N // elements of a vector of integers
};

#if VF_N == 16
PG_INLINE vi pack(vf a, vf b) { return _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b)); }
PG_INLINE void store(int16_t *p, vi a) { _mm512_storeu_si512(p, a); }
PG_INLINE void max4(float *s, vf a, vf b, vf c, vf d) { // the largest of a, b, c, d
  const vf ab = vf_max(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)),
           cd = vf_max(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const vf q = vf_max(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(q), _mm512_extractf32x8_ps(q, 1));
  _mm_storeu_ps(s, _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
#else
PG_INLINE vi pack(vf a, vf b) { return _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b)); }
PG_INLINE void store(int16_t *p, vi a) { _mm256_storeu_si256((__m256i *)p, a); }
PG_INLINE void max4(float *s, vf a, vf b, vf c, vf d) {
  const vf ab = vf_max(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)),
           cd = vf_max(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const vf q = vf_max(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  _mm_storeu_ps(s, _mm_max_ps(_mm256_castps256_ps128(q), _mm256_extractf128_ps(q, 1)));
}
#endif

PG_INLINE vf load(int type, const uint16_t *p) { return type == PG_F16 ? vf_load_f16(p) : vf_load_bf16(p); }

// Steps and their inverses. One norm is enough when no element has most of it: else, and when squares overflow or
// vanish, as columns are converted. n is STRIP, or less.
PG_INLINE void put_steps(int type, float *steps, float *invs, const uint16_t *const *w, int64_t n) {
  float squares[R16_ROWS], most[R16_ROWS]; // of a row, and an upper bound of the largest one
  for (int r = 0; r < R16_ROWS; r += 4) {
    vf sum[4], max[4];
    UNROLL for (int j = 0; j < 4; j++) {
      const uint16_t *x = w[r + j];
      vf s[2] = {vf_zero(), vf_zero()};
      UNROLL for (int64_t i = 0; i < n; i += PAIR) {
        const vf a = load(type, x + i), b = load(type, x + i + VF_N);
        s[0] = vf_fma(a, a, s[0]);
        s[1] = vf_fma(b, b, s[1]);
      }
      sum[j] = vf_add(s[0], s[1]);
      max[j] = vf_max(s[0], s[1]);
    }
    vf_sum4(squares + r, sum[0], sum[1], sum[2], sum[3]);
    max4(most + r, max[0], max[1], max[2], max[3]);
  }
  const vf zeros = vf_zero(), one = vf_set1(1.0f);
  vf usual = one;
  for (int i = 0; i < R16_ROWS; i += VF_N) {
    const vf all = vf_load(squares + i), norm = vf_sqrt(all);
    vf_store(steps + i, vf_mul(norm, vf_set1(1.0f / R16_NORM)));
    vf_store(invs + i, vf_div(vf_set1(R16_NORM), norm));
    usual = vf_if_lt(vf_set1(1e-28f), all, usual, zeros);
    usual = vf_if_lt(all, vf_set1(1e30f), usual, zeros);
    usual = vf_if_lt(vf_load(most + i), vf_mul(all, vf_set1(0.5f)), usual, zeros); // NaN is unusual, too
  }
  if (!vf_any_lt(usual, one)) return;
  for (int r = 0; r < R16_ROWS; r++) {
    if (squares[r] > 1e-28f && squares[r] < 1e30f && most[r] < squares[r] * 0.5f) continue;
    float x[STRIP];
    for (int64_t i = 0; i < n; i += VF_N) vf_store(x + i, load(type, w[r] + i));
    steps[r] = PG_FN(r16_fixed_step)(x, n, &invs[r]);
  }
}

PG_INLINE void put_rows(int type, int16_t (*ints)[KC], float *steps, const uint16_t *const *w, int64_t n) {
  float invs[R16_ROWS];
  put_steps(type, steps, invs, w, n);
  for (int r = 0; r < R16_ROWS; r++) {
    const vf inv = vf_set1(invs[r]);
    UNROLL for (int64_t i = 0; i < n; i += PAIR) {
      store(ints[r] + i, pack(vf_mul(load(type, w[r] + i), inv), vf_mul(load(type, w[r] + i + VF_N), inv)));
    }
  }
}

void PG_FN(r16_put_rows)(int16_t (*ints)[KC], float *steps, const r16_product *p, int64_t row, int64_t strip) {
  const int64_t k0 = strip * STRIP, n = PG_MIN(STRIP, p->k - k0);
  const uint16_t *w[R16_ROWS];
  for (int64_t r = 0; r < R16_ROWS; r++)
    w[r] = (const uint16_t *)(p->w + PG_MIN(row + r, p->m - 1) * p->row_bytes) + k0;
  if (n == STRIP && p->f.type == PG_F16)
    put_rows(PG_F16, ints, steps, w, STRIP);
  else if (n == STRIP)
    put_rows(PG_BF16, ints, steps, w, STRIP);
  else
    put_rows(p->f.type, ints, steps, w, n);
}
