// What fixed_weights.c and int8_weights.c share: they unpack repacked weights to panels.
#pragma once
#include "products/gemm/gemm.h"

enum { UNITS = KC / R16_UNIT, PARTS = R16_ROWS / VF_N }; // units of a strip; parts of a group's rows

// A function for each format that unpacks n units of a group to the rows `row` .. of a panel, a part after the other by
// the file's own put_part; and put_of, these functions by type.
typedef void (*put_fn)(const uint8_t *group, int n, r16_panel *panel, int row);
#define R16_PUT_GROUP(name, ...)                                                                                       \
  static void put_##name(const uint8_t *group, int n, r16_panel *panel, int row) {                                     \
    for (int part = 0; part < PARTS; part++) put_part(r16_##name, group, n, part, panel, row + part * VF_N);           \
  }
#define R16_PUT_AT(name, ...) [PG_##name] = put_##name,
#define R16_PUT_OF_FORMATS                                                                                             \
  R16_FORMATS(R16_PUT_GROUP)                                                                                           \
  static const put_fn put_of[] = {R16_FORMATS(R16_PUT_AT)};

// The memory to prefetch while a panel is multiplied: the next strip of these rows; after the last one, the first strip
// of the rows behind the chunk. `run` is even.
static inline r16_fetch r16_fetch_after(const r16_product *p, int64_t tile, int64_t strip) {
  const int64_t next = (strip + 1) * r16_strip(p), k = next < p->k ? next : 0, n = PG_MIN(r16_strip(p), p->k - k);
  const int64_t t = k ? tile : tile + R16_TILES;
  const char *at = (const char *)r16_group_at(p, t * TILE_GROUPS, k, n, NULL);
  const int64_t run = (n / (R16_UNIT * p->f.units) * r16_block_bytes(p->f) + 127) / 128 * 2;
  return (r16_fetch){at, 64, run, r16_group_bytes(p->f, p->k) - run * 64};
}
