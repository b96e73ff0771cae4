// Unpack repacked weights to a panel of bytes, a strip of a group of 16 rows at a time.
#define R16_INT8
#include "products/gemm/gemm.h"
#include "products/gemm/next.h"
#include "products/r16/vec.h"

enum { PARTS = R16_ROWS / VF_N };

typedef uint8_t lane_bytes __attribute__((vector_size(4 * VF_N)));

// n units of a group, for the VF_N rows of a part: rows `row` .. of the panel. Meanwhile as many bytes from `ahead` on
// are prefetched (NULL: none).
PG_INLINE void put_part(r16_format f, const uint8_t *group, int n, int part, r16_panel *panel, int row,
                        const uint8_t *ahead) {
  const int halves = r16_halves(f), head = r16_head_bytes(f), less = r16_bytes_of(f).less;
  uint8_t(*to)[TILE_ROWS][4] = (uint8_t(*)[TILE_ROWS][4])panel->codes[0][row];
  float(*scale)[TILE_ROWS] = (float(*)[TILE_ROWS])(panel->scales[0] + row);
  float(*shift)[TILE_ROWS] = (float(*)[TILE_ROWS])(panel->shifts[0] + row);
  for (int u = 0; u < n; u++, to += R16_QUARTETS) {
    const uint8_t *block = group + u / f.units * r16_block_bytes(f);
    const uint8_t *unit = block + head + u % f.units * r16_unit_bytes(f);
    for (int i = 0; ahead && i < r16_unit_bytes(f) + head; i += 64) __builtin_prefetch(ahead + (unit - group) + i);
    for (int h = 0; h < halves; h++) {
      const r16_line l = r16_line_of(f, block, unit + r16_lines(f) * R16_LINE, part, h);
      vf_store(*scale++, l.scale);
      vf_store(*shift++, l.shift);
    }
    _Pragma("GCC unroll 8") for (int p = 0; p < R16_QUARTETS; p++) {
      vi q = r16_quartet(f, unit, part, p);
      if (less) q = (vi)((lane_bytes)q - (uint8_t)less);
      memcpy(to[p], &q, sizeof q);
    }
  }
}

#define X(name, ...)                                                                                                   \
  static void put_##name(const uint8_t *group, int n, r16_panel *panel, int row, const uint8_t *ahead) {               \
    for (int part = 0; part < PARTS; part++)                                                                           \
      put_part(r16_##name, group, n, part, panel, row + part * VF_N, part ? NULL : ahead);                             \
  }
R16_FORMATS(X)
#undef X

typedef void (*put_fn)(const uint8_t *group, int n, r16_panel *panel, int row, const uint8_t *ahead);

#define X(name, ...) [PG_##name] = put_##name,
static const put_fn put_of[] = {R16_FORMATS(X)};
#undef X

void R16_INT8_FN(r16_put_panel)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip) {
  // Few columns do not take long enough for prefetch: it begins while the panel before is made.
  const r16_fetch next = p->row_bytes ? r16_no_fetch(panel) : r16_fetch_after(p, tile, strip);
  const int few = p->n_cols <= NT;
  panel->next = few ? r16_no_fetch(panel) : next;
  const int64_t n_groups = (p->m + R16_ROWS - 1) / R16_ROWS, k0 = strip * KC, nk = PG_MIN(KC, p->k - k0);
  panel->n_units = nk / R16_UNIT;
  uint8_t own[KC_UNITS * R16_UNIT_MAX];
  for (int j = 0; j < TILE_GROUPS; j++) {
    const int64_t g = tile * TILE_GROUPS + j;
    if (g < n_groups) {
      const uint8_t *ahead = (const uint8_t *)next.at + j * r16_group_bytes(p->f, p->k);
      put_of[p->f.type](r16_group_at(p, g, k0, nk, own), (int)panel->n_units, panel, j * R16_ROWS,
                        few && !p->row_bytes ? ahead : NULL);
    } else { // nobody reads the results
      for (int i = 0; i < nk / 4; i++) memset(panel->codes[i][j * R16_ROWS], 0, R16_ROWS * 4);
      for (int i = 0; i < R16_HALVES; i++) {
        memset(panel->scales[i] + j * R16_ROWS, 0, R16_ROWS * sizeof(float));
        memset(panel->shifts[i] + j * R16_ROWS, 0, R16_ROWS * sizeof(float));
      }
    }
  }
}
