// Convert columns to bf16. All groups of a strip lie together, so that a chunk reads one piece of memory at a time:
// [strip][group][part][unit][column][32].
#define R16_BF16
#include "products/gemm/bf16_columns.h"
#include "products/gemm/columns.h"

int64_t R16_BF16_FN(r16_columns_bytes)(const r16_product *p) {
  const r16_columns c = r16_columns_in(NULL, p);
  return pg_times(pg_times(c.n_groups, NT * (int64_t)sizeof(uint16_t)), pg_times(c.k, r16_column_parts(p)));
}

void R16_BF16_FN(r16_put_columns)(const r16_columns *c, const r16_product *p, r16_share share) {
  const r16_quad g = r16_quad_of(c, p, share);
  for (int64_t s = share.first; s < share.last; s++) {
    const int64_t n = r16_strip_elements(c, s);
    for (int64_t j = 0; j < R16_QUAD; j++) {
      float x[KC];
      if (j < g.n) {
        r16_get(x, p, &g, j, s * c->strip, n);
      } else {
        memset(x, 0, sizeof x);
      }
      for (int part = 0; part < r16_column_parts(p); part++) {
        uint16_t *to = r16_columns_of(c, p, share.group, s, part) + (share.column + j) * R16_UNIT;
        if (part) r16_rest(x, n);
        for (int64_t i = 0; i < n; i += R16_UNIT) _mm512_storeu_si512(to + i * NT, r16_bf16(x + i));
      }
    }
  }
}
