// Convert columns to integers of 16 bits, as fixed_blocks.c does, in the layout of tile registers.
#include "products/gemm/columns.h"
#include "products/gemm/tiles_columns.h"
#include "products/r16/sums.h"

int64_t PG_FN(r16_columns_bytes)(const r16_product *p) {
  const int64_t sides = (p->n_cols + R16_SIDE - 1) / R16_SIDE, strips = (p->k + KC - 1) / KC;
  return pg_times(pg_times(sides, strips), sizeof(r16_tile_columns));
}

// The integers x[0..n) * inv of column `at`, and the sums of them. Elements behind n, up to a whole line, are zeros,
// and so is the sum of a last unit that is half of a line.
PG_INLINE void put_column(r16_tile_columns *to, int64_t at, const float *x, float inv, int64_t n) {
  for (int64_t i = 0; i < n; i += R16_LONG)
    for (int p = 0; p < R16_PLANES; p++) _mm512_storeu_si512(to->bytes[i / R16_LONG][p][at], _mm512_setzero_si512());
  if (n % R16_LONG) to->units[n / R16_UNIT][at] = 0;
  int32_t before = 0;
  for (int64_t h = 0; h < n / R16_SIDE; h++) {
    const __m512i q = _mm512_cvtps_epi32(vf_mul(vf_load(x + h * R16_SIDE), vf_set1(inv)));
    uint8_t(*planes)[R16_SIDE][R16_LONG] = to->bytes[h * R16_SIDE / R16_LONG];
    const int64_t place = h * R16_SIDE % R16_LONG;
    _mm_storeu_si128((__m128i *)(planes[R16_HIGH][at] + place), _mm512_cvtepi32_epi8(_mm512_srai_epi32(q, 8)));
    _mm_storeu_si128((__m128i *)(planes[R16_LOW][at] + place), _mm512_cvtepi32_epi8(q));
    const int32_t sum = _mm512_reduce_add_epi32(q);
    to->halves[h][at] = (float)sum;
    if (h % 2) to->units[h / 2][at] = (float)(before + sum);
    before = sum;
  }
}

void PG_FN(r16_put_columns)(const r16_columns *c, const r16_product *p, r16_share share) {
  const r16_quad g = r16_quad_of(c, p, share);
  const int64_t whole = (r16_group_columns(c, share.group) + R16_SIDE - 1) / R16_SIDE * R16_SIDE;
  if (share.column >= whole) return;
  for (int64_t s = share.first; s < share.last; s++) {
    const int64_t k0 = s * KC, n = r16_strip_elements(c, s);
    r16_tile_columns *to = r16_tiles_of(c, share.group, s) + share.column / R16_SIDE;
    for (int j = 0; j < R16_QUAD; j++) {
      const int64_t at = share.column % R16_SIDE + j;
      float x[KC];
      r16_step step = {0, 0};
      if (j < g.n) {
        r16_get(x, p, &g, j, k0, n);
        step = r16_step_of(x, n);
      }
      if (step.inv == 0) memset(x, 0, sizeof x);
      to->steps[at] = step.d;
      put_column(to, at, x, step.inv, n);
    }
  }
}
