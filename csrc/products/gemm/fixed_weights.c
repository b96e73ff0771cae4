// Convert repacked weights to integers (sums.h), a strip of a group of 16 rows at a time.
#include "products/gemm/fixed_columns.h"
#include "products/gemm/halves.h"
#include "products/gemm/weights.h"
#include "products/r16/sums.h"

// n units of a group, for the VF_N rows of a part. `to` is the part's place in the panel, `row` its first row there.
PG_INLINE void put_part(r16_format f, const uint8_t *group, int n, int part, r16_panel *panel, int row) {
  const int halves = r16_halves(f), head_bytes = r16_head_bytes(f), sum_units = r16_sum_units(f);
  int16_t(*to)[TILE_ROWS][2] = (int16_t(*)[TILE_ROWS][2])panel->ints[0][row];
  float(*scale)[TILE_ROWS] = (float(*)[TILE_ROWS])(panel->scales[0] + row);
  float(*shift)[TILE_ROWS] = (float(*)[TILE_ROWS])(panel->shifts[0] + row);
  const vi offset = vi_twice_16(vi_set1(f.offset)), low = vi_set1(0x00ff00ff);
  for (int u = 0; u < n; u++, to += R16_UNIT / 2) {
    const uint8_t *block = group + u / f.units * r16_block_bytes(f);
    const uint8_t *unit = block + head_bytes + u % f.units * r16_unit_bytes(f);
    const r16_head h = r16_head_at(f, block, part);
    const r16_unit_scales w = r16_scales_of(f, h, unit + r16_lines(f) * R16_LINE + part * VF_N);
    for (int i = 0; i < halves; i++) {
      if (r16_shift_elements(f)) vf_store(*shift++, w.shift[i]);
      if (!r16_sums_units(f)) vf_store(*scale++, w.scale[i]);
    }
    if (r16_sums_units(f) && u % sum_units == 0) vf_store(*scale++, h.d);
    const vi whole[2] = {vi_twice_16(w.whole[0]), vi_twice_16(w.whole[1])};
    _Pragma("GCC unroll 8") for (int p = 0; p < R16_QUARTETS; p++) {
      const vi q = r16_quartet(f, unit, part, p);
      vi pairs[2] = {vi_and(q, low), vi_shr(q, 8)};
      _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {
        if (f.offset) pairs[i] = vi_sub_16(pairs[i], offset);
        if (r16_sums_units(f) && f.scales > R16_D_M) pairs[i] = vi_mul_16(pairs[i], whole[halves == 2 ? p / 4 : 0]);
        vi_store(to[2 * p + i][0], pairs[i]);
      }
    }
  }
}

R16_PUT_OF_FORMATS

void PG_FN(r16_put_panel)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip) {
  panel->next = p->row_bytes ? r16_no_fetch(panel) : r16_fetch_after(p, tile, strip);
#if defined(PG_HALVES)
  if (r16_of_floats(p)) {
    PG_FN(r16_put_halves)(panel, p, tile, strip);
    return;
  }
#endif
  const int64_t n_groups = (p->m + R16_ROWS - 1) / R16_ROWS, k0 = strip * KC, nk = PG_MIN(KC, p->k - k0);
  const int n = (int)(nk / R16_UNIT);
  const int64_t elements = r16_sum_elements(p->f), shift = r16_shift_elements(p->f);
  panel->n_sums = nk / elements;
  panel->pairs = elements / 2;
  panel->n_shifts = shift ? elements / shift : 0;
  panel->shift_elements = shift;
  uint8_t own[UNITS * R16_UNIT_MAX];
  const put_fn put = put_of[p->f.type];
  for (int j = 0; j < TILE_GROUPS; j++) {
    const int64_t g = tile * TILE_GROUPS + j;
    if (g < n_groups) {
      put(r16_group_at(p, g, k0, nk, own), n, panel, j * R16_ROWS);
    } else { // nobody reads the results
      for (int i = 0; i < n * R16_UNIT / 2; i++) memset(panel->ints[i][j * R16_ROWS], 0, R16_ROWS * sizeof(int16_t[2]));
      for (int i = 0; i < R16_HALVES; i++) {
        memset(panel->scales[i] + j * R16_ROWS, 0, R16_ROWS * sizeof(float));
        memset(panel->shifts[i] + j * R16_ROWS, 0, R16_ROWS * sizeof(float));
      }
    }
  }
}
