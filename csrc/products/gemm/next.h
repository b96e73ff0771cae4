// What is prefetched while a panel is multiplied.
#pragma once
#include "products/gemm/gemm.h"

// The memory to prefetch: the next strip of these rows; after the last one, the first strip of the rows behind the
// chunk. `run` is even.
static inline r16_fetch r16_fetch_after(const r16_product *p, int64_t tile, int64_t strip) {
  const int64_t next = (strip + 1) * r16_strip(p), k = next < p->k ? next : 0, n = PG_MIN(r16_strip(p), p->k - k);
  const int64_t t = k ? tile : tile + R16_TILES;
  const char *at = (const char *)r16_group_at(p, t * TILE_GROUPS, k, n, NULL);
  const int64_t run = (n / (R16_UNIT * p->f.units) * r16_block_bytes(p->f) + 127) / 128 * 2;
  return (r16_fetch){at, 64, run, r16_group_bytes(p->f, p->k) - run * 64};
}
