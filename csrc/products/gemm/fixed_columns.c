// Convert columns of b, and rows of floats, to fixed point, in the layout of fixed.c's tiles.
#include "products/gemm/columns.h"
#include "products/gemm/fixed_floats.h"

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
#else
  for (int64_t i = 0; i < n; i += 16) {
    const __m256i a = _mm256_cvtps_epi32(vf_mul(vf_load(src + i), scale)),
                  b = _mm256_cvtps_epi32(vf_mul(vf_load(src + i + 8), scale));
    const __m256i q = _mm256_packs_epi32(_mm256_shuffle_epi32(a, 0xd8), _mm256_shuffle_epi32(b, 0xd8));
    _mm256_storeu_si256((__m256i *)(dst + i), _mm256_permute4x64_epi64(q, 0xd8));
  }
#endif
}

// The largest of x[0..n) in size, and the sum of the squares of x * unit. n is a multiple of 32.
typedef struct extent {
  float max, squares;
} extent;

PG_INLINE extent extent_of(const float *x, float unit, int64_t n) {
  vf max[2] = {vf_zero(), vf_zero()}, sum[2] = {vf_zero(), vf_zero()};
  for (int64_t i = 0; i < n; i += 2 * VF_N)
    for (int j = 0; j < 2; j++) {
      const vf v = vf_mul(vf_load(x + i + j * VF_N), vf_set1(unit));
      max[j] = vf_max(max[j], vf_abs(v));
      sum[j] = vf_fma(v, v, sum[j]);
    }
  return (extent){vf_hmax(vf_max(max[0], max[1])), vf_sum(vf_add(sum[0], sum[1]))};
}

float PG_FN(r16_fixed_step)(const float *x, int64_t n, float *inv) {
  extent e = extent_of(x, 1.0f, n);
  float unit = 1.0f;
  if (!(e.max > 1e-15f && e.max < 1e15f)) { // squares may overflow or vanish
    unit = e.max > 1e-30f ? 1.0f / e.max : 0.0f;
    e = extent_of(x, unit, n);
  }
  const float norm = sqrtf(e.squares);
  *inv = 0;
  if (!(norm > 0)) return norm; // 0 or NaN
  *inv = PG_MIN(R16_NORM / norm, R16_MAX / e.max) * unit;
  return 1.0f / *inv;
}

// dst[pair][column] = src[column][pair] for 4 columns; dst has `width` columns.
PG_INLINE void put_4_columns(int16_t *dst, const int16_t (*src)[KC], int width, int64_t pairs) {
  for (int64_t i = 0; i < pairs; i += 4) {
    __m128i a[4], b[4];
    for (int j = 0; j < 4; j++) a[j] = _mm_loadu_si128((const __m128i *)(src[j] + 2 * i));
    for (int j = 0; j < 2; j++) {
      b[j] = _mm_unpacklo_epi32(a[2 * j], a[2 * j + 1]);
      b[2 + j] = _mm_unpackhi_epi32(a[2 * j], a[2 * j + 1]);
    }
    for (int j = 0; j < 2; j++) {
      _mm_storeu_si128((__m128i *)(dst + (i + 2 * j) * 2 * width), _mm_unpacklo_epi64(b[2 * j], b[2 * j + 1]));
      _mm_storeu_si128((__m128i *)(dst + (i + 2 * j + 1) * 2 * width), _mm_unpackhi_epi64(b[2 * j], b[2 * j + 1]));
    }
  }
}

void PG_FN(r16_put_columns)(const r16_columns *c, const r16_product *p, r16_share share) {
  const r16_quad g = r16_quad_of(c, p, share);
  for (int64_t s = share.first; s < share.last && g.n; s++) {
    const int64_t k0 = s * c->strip, n = r16_strip_elements(c, s);
    const r16_fixed to = r16_fixed_of(c, share.group, s);
    float *steps = to.steps + share.column;
    int16_t four[R16_QUAD][KC];
    for (int j = 0; j < R16_QUAD; j++) {
      steps[j] = 0;
      if (j < g.n) {
        float x[KC];
        r16_get(x, p, &g, j, k0, n);
        float inv;
        steps[j] = PG_FN(r16_fixed_step)(x, n, &inv);
        (r16_of_floats(p) && !p->across ? r16_put_packed : put_ints)(four[j], x, inv, n);
      } else {
        memset(four[j], 0, sizeof four[j]);
      }
    }
    put_4_columns(to.ints + share.column * 2, four, to.width, n / 2);
  }
}

void PG_FN(r16_put_panel_of_floats)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip) {
  const int64_t pairs = PG_MIN(r16_strip(p), p->k - strip * r16_strip(p)) / 2;
  for (int64_t g = 0; g < TILE_ROWS; g += R16_ROWS) {
    const int64_t row = tile * TILE_ROWS + g, rows = PG_MAX(0, PG_MIN(R16_ROWS, p->m - row));
    int16_t ints[R16_ROWS][KC];
    if (rows) PG_FN(r16_put_rows)(ints, panel->steps + g, p, row, strip);
    for (int64_t r = rows; r < R16_ROWS; r++) {
      memset(ints[r], 0, 2 * pairs * sizeof ints[r][0]);
      panel->steps[g + r] = 0;
    }
    for (int64_t r = 0; r < R16_ROWS; r += 4) put_4_columns(panel->ints[0][g + r], ints + r, TILE_ROWS, pairs);
  }
}
