// Unpack repacked weights to a panel of codes in bytes, a strip of a group of 16 rows at a time.
#define R16_INT8
#include "products/gemm/int8_columns.h"
#include "products/gemm/weights.h"

typedef int8_t (*codes)[TILE_ROWS][R16_TOGETHER];

// put_codes: the codes of unit u of a part's rows, less their offset, at their place in a panel; on x86 also what makes
// up for columns that are 128 more. no_codes: zeros for the R16_ROWS rows of a group that is not there. WHOLE: an
// integer scale as a tile multiplies with it.
#if VF_N == 4
#define WHOLE(scale) (scale)

PG_INLINE void put_codes(r16_format f, const uint8_t *unit, int part, r16_panel *panel, int u, int row) {
  const codes to = (codes)panel->codes[u * R16_UNIT / R16_TOGETHER][row];
  vi two[2];
  _Pragma("GCC unroll 8") for (int p = 0; p < R16_QUARTETS; p++) {
    two[p % 2] = r16_quartet(f, unit, part, p) - (uint8_t)f.offset;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if (p % 2 == 0) continue;
    const uint32x4_t a = (uint32x4_t)two[0], b = (uint32x4_t)two[1];
    vst1q_u8((uint8_t *)to[p / 2][0], (vi)vzip1q_u32(a, b));
    vst1q_u8((uint8_t *)to[p / 2][2], (vi)vzip2q_u32(a, b));
#else
    vst1q_u8((uint8_t *)to[p][0], two[p % 2]);
#endif
  }
}

PG_INLINE void no_codes(r16_panel *panel, int row) {
  for (int i = 0; i < KC / R16_TOGETHER; i++) memset(panel->codes[i][row], 0, R16_ROWS * R16_TOGETHER);
}
#else
typedef uint8_t lane_bytes __attribute__((vector_size(4 * VF_N)));

// sum + 128 times the codes of each row; without VNNI in words, of two codes each.
#if defined(__AVX512VNNI__)
#define WHOLE(scale) (scale)
PG_INLINE vi add_128_times(vi sum, vi codes) { return _mm512_dpbusd_epi32(sum, vi_set1_i8(0x80), codes); }
PG_INLINE vi negative(vi sum) { return (vi)((rows)vi_zero() - (rows)sum); }
#else
#define WHOLE(scale) vi_twice_16(scale)
PG_INLINE vi add_128_times(vi sum, vi codes) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(vi_set1_i8(0x80), codes));
}
PG_INLINE vi negative(vi sum) { return vi_sub_16(vi_zero(), sum); }
#endif

PG_INLINE void put_codes(r16_format f, const uint8_t *unit, int part, r16_panel *panel, int u, int row) {
  const int summed = PG_MAX(1, r16_summed_quartets(f)); // formats that have none do not come here
  const codes to = (codes)panel->codes[u * R16_UNIT / R16_TOGETHER][row];
  int32_t(*less)[TILE_ROWS] = (int32_t(*)[TILE_ROWS])(panel->less[u * (R16_QUARTETS / summed)] + row);
  vi sum = vi_zero();
  _Pragma("GCC unroll 8") for (int p = 0; p < R16_QUARTETS; p++) {
    const vi q = (vi)((lane_bytes)r16_quartet(f, unit, part, p) - (uint8_t)f.offset);
    memcpy(to[p], &q, sizeof q);
    sum = add_128_times(p % summed ? sum : vi_zero(), q);
    const vi all = negative(sum);
    if (p % summed == summed - 1) memcpy(*less++, &all, sizeof all);
  }
}

PG_INLINE void no_codes(r16_panel *panel, int row) {
  for (int i = 0; i < KC / R16_TOGETHER; i++) memset(panel->codes[i][row], 0, R16_ROWS * R16_TOGETHER);
  for (int i = 0; i < 2 * R16_PARTS; i++) memset(panel->less[i] + row, 0, R16_ROWS * sizeof(int32_t));
}
#endif

// n units of a group, for the VF_N rows of a part: rows `row` .. of the panel.
PG_INLINE void put_part(r16_format f, const uint8_t *group, int n, int part, r16_panel *panel, int row) {
  const int halves = r16_halves(f), head_bytes = r16_head_bytes(f), sum_units = r16_sum_units(f);
  float(*scale)[TILE_ROWS] = (float(*)[TILE_ROWS])(panel->scales[0] + row);
  float(*shift)[TILE_ROWS] = (float(*)[TILE_ROWS])(panel->shifts[0] + row);
  int32_t(*whole)[TILE_ROWS] = (int32_t(*)[TILE_ROWS])(panel->whole[0] + row);
  const int in_words = r16_in_words(f);
  for (int u = 0; u < n; u++) {
    const uint8_t *block = group + u / f.units * r16_block_bytes(f);
    const uint8_t *unit = block + head_bytes + u % f.units * r16_unit_bytes(f);
    const r16_head h = r16_head_at(f, block, part);
    const r16_unit_scales w = r16_scales_of(f, h, unit + r16_lines(f) * R16_LINE + part * VF_N);
    const vi one = vi_set1(1), first = f.scales > R16_D_M ? w.whole[0] : one,
             second = f.scales > R16_D_M && halves == 2 ? w.whole[1] : first,
             by[2] = {in_words ? vi_words(first, second) : WHOLE(first), WHOLE(second)};
    for (int i = 0; i < halves; i++) {
      if (r16_shift_elements(f)) vf_store(*shift++, w.shift[i]);
      if (!r16_sums_units(f)) vf_store(*scale++, w.scale[i]);
    }
    for (int i = 0; r16_sums_units(f) && i < (in_words ? 1 : halves); i++) memcpy(*whole++, by + i, sizeof *by);
    if (r16_sums_units(f) && u % sum_units == 0) vf_store(*scale++, h.d);
    put_codes(f, unit, part, panel, u, row);
  }
}

R16_PUT_OF_FORMATS

void R16_INT8_FN(r16_put_panel)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip) {
  panel->next = p->row_bytes ? r16_no_fetch(panel) : r16_fetch_after(p, tile, strip);
  const int64_t n_groups = (p->m + R16_ROWS - 1) / R16_ROWS, k0 = strip * KC, nk = PG_MIN(KC, p->k - k0);
  const int64_t elements = r16_sum_elements(p->f), shift = r16_shift_elements(p->f);
  panel->kind = R16_INT8_FN(r16_kind_of)(p);
  panel->n_sums = nk / elements;
  panel->sum_units = r16_sum_units(p->f);
  panel->n_shifts = shift ? elements / shift : 0;
  uint8_t own[UNITS * R16_UNIT_MAX];
  for (int j = 0; j < TILE_GROUPS; j++) {
    const int64_t g = tile * TILE_GROUPS + j;
    const int row = j * R16_ROWS;
    if (g < n_groups) {
      put_of[p->f.type](r16_group_at(p, g, k0, nk, own), (int)(nk / R16_UNIT), panel, row);
      continue;
    }
    // nobody reads the results
    no_codes(panel, row);
    for (int i = 0; i < R16_PARTS; i++) {
      memset(panel->scales[i] + row, 0, R16_ROWS * sizeof(float));
      memset(panel->shifts[i] + row, 0, R16_ROWS * sizeof(float));
      memset(panel->whole[i] + row, 0, R16_ROWS * sizeof(int32_t));
    }
  }
}
