// Convert repacked weights to the bytes of integers (sums.h), in the layout of tile registers.
#include "products/gemm/gemm.h"
#include "products/gemm/weights.h"
#include "products/r16/sums.h"

typedef uint8_t (*lines)[R16_PLANES][R16_BYTES_TILE];
typedef uint8_t bytes __attribute__((vector_size(64)));

// n units of a group, whose rows are `row` .. of the panel.
PG_INLINE void put_part(r16_format f, const uint8_t *group, int n, int part, r16_panel *panel, int row) {
  const int halves = r16_halves(f), head_bytes = r16_head_bytes(f), sum_units = r16_sum_units(f);
  lines to = panel->bytes[row / R16_ROWS];
  float(*scale)[TILE_ROWS] = (float(*)[TILE_ROWS])(panel->scales[0] + row);
  float(*shift)[TILE_ROWS] = (float(*)[TILE_ROWS])(panel->shifts[0] + row);
  const vi offset = vi_twice_16(vi_set1(f.offset)), even = vi_set1(0x00ff00ff), odd = vi_set1((int32_t)0xff00ff00);
  for (int u = 0; u < n; u++) {
    const uint8_t *block = group + u / f.units * r16_block_bytes(f);
    const uint8_t *unit = block + head_bytes + u % f.units * r16_unit_bytes(f);
    const r16_head h = r16_head_at(f, block, part);
    const r16_unit_scales w = r16_scales_of(f, h, unit + r16_lines(f) * R16_LINE);
    for (int i = 0; i < halves; i++) {
      if (r16_shift_elements(f)) vf_store(*shift++, w.shift[i]);
      if (!r16_sums_units(f)) vf_store(*scale++, w.scale[i]);
    }
    if (r16_sums_units(f) && u % sum_units == 0) vf_store(*scale++, h.d);
    const vi whole[2] = {vi_twice_16(w.whole[0]), vi_twice_16(w.whole[1])};
    uint8_t(*planes)[R16_BYTES_TILE] = to[u / 2];
    const int line = u % 2 * R16_QUARTETS;
    _Pragma("GCC unroll 8") for (int p = 0; p < R16_QUARTETS; p++) {
      const vi q = r16_quartet(f, unit, part, p);
      const int at = (line + p) * R16_LINE;
      if (!r16_has_whole(f)) {
        _mm512_store_si512(planes[R16_HIGH] + at, (vi)((bytes)q - (uint8_t)f.offset));
        continue;
      }
      vi pairs[2] = {vi_and(q, even), vi_shr(q, 8)}; // elements 0 and 2, 1 and 3
      _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {
        if (f.offset) pairs[i] = vi_sub_16(pairs[i], offset);
        pairs[i] = vi_mul_16(pairs[i], whole[halves == 2 ? p / 4 : 0]);
      }
      const rows low = (rows)vi_and(pairs[0], even) | (rows)vi_shl(pairs[1], 8);
      const rows high = (rows)vi_shr(pairs[0], 8) | (rows)vi_and(pairs[1], odd);
      const int two = r16_kind_of(f).planes == 2;
      _mm512_store_si512(planes[two ? R16_LOW : R16_HIGH] + at, (vi)low);
      if (two) _mm512_store_si512(planes[R16_HIGH] + at, (vi)high);
    }
  }
}

R16_PUT_OF_FORMATS

void PG_FN(r16_put_panel)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip) {
  panel->next = p->row_bytes ? r16_no_fetch(panel) : r16_fetch_after(p, tile, strip);
  const int64_t n_groups = (p->m + R16_ROWS - 1) / R16_ROWS, k0 = strip * KC, nk = PG_MIN(KC, p->k - k0);
  const int64_t n_sums = panel->n_sums = nk / r16_sum_elements(p->f);
  uint8_t own[UNITS * R16_UNIT_MAX];
  for (int j = 0; j < TILE_GROUPS; j++) {
    const int64_t g = tile * TILE_GROUPS + j;
    if (g < n_groups) {
      put_of[p->f.type](r16_group_at(p, g, k0, nk, own), (int)(nk / R16_UNIT), panel, j * R16_ROWS);
      if (n_sums % 2 && r16_kind_of(p->f).units == 1) { // the other half of a step adds nothing
        vf_store(panel->scales[n_sums] + j * R16_ROWS, vf_zero());
        vf_store(panel->shifts[n_sums] + j * R16_ROWS, vf_zero());
      }
    } else { // nobody reads the results
      memset(panel->bytes[j], 0, sizeof panel->bytes[j]);
      for (int i = 0; i < R16_HALVES; i++) {
        memset(panel->scales[i] + j * R16_ROWS, 0, R16_ROWS * sizeof(float));
        memset(panel->shifts[i] + j * R16_ROWS, 0, R16_ROWS * sizeof(float));
      }
    }
  }
}
