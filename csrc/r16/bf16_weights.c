// Rows to bf16, laid out as tile registers want them.
#include "r16/gemm.h"
#include "r16/scales.h"
#include "rows.h"

enum { UNITS = KC / R16_UNIT, AHEAD = 4096, UNIT_STEP = TILE_ROWS * R16_UNIT };

// Byte i of each lane, as a float.
PG_INLINE vf element(vi q, int i) {
  const __m512i one = _mm512_set1_epi32((int)(0xffffff00u | (unsigned)i)); // to a lane's lowest byte; 0xff: 0
  switch (i) {
  case 0:
    return _mm512_cvtepi32_ps(_mm512_and_si512(q, _mm512_set1_epi32(255)));
  case 3:
    return _mm512_cvtepi32_ps(_mm512_srli_epi32(q, 24));
  default: {
    const __m512i lanes = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 4, 8, 12));
    return _mm512_cvtepi32_ps(_mm512_shuffle_epi8(q, _mm512_add_epi32(one, lanes)));
  }
  }
}

// Units first .. first + n of a group of 16 rows. A code less its offset is exact, so are zeros.
PG_INLINE void put_units(r16_format f, const uint8_t *group, int64_t first, int n, uint16_t *to) {
  const int halves = r16_halves(f), block_bytes = r16_block_bytes(f);
  for (int u = 0; u < n; u++, to += UNIT_STEP) {
    const uint8_t *head = group + (first + u) / f.units * block_bytes;
    const uint8_t *unit = head + r16_head_bytes(f) + (first + u) % f.units * r16_unit_bytes(f);
    vf scale[2], shift[2];
    for (int h = 0; h < halves; h++) {
      const r16_line l = r16_line_of(f, head, unit + r16_lines(f) * R16_LINE, 0, h);
      scale[h] = l.scale;
      shift[h] = vf_fma(l.scale, vf_set1((float)-f.offset), l.shift);
    }
    _Pragma("GCC unroll 8") for (int p = 0; p < R16_QUARTETS; p++) {
      const int h = halves == 2 ? p / 4 : 0;
      const vi q = r16_quartet(f, unit, 0, p);
      vf w[4];
      _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) w[i] = vf_fma(element(q, i), scale[h], shift[h]);
      __builtin_prefetch(unit + p * R16_LINE + AHEAD);
      _mm512_store_si512(to + p * 64, bf16_pairs(w[0], w[2]));
      _mm512_store_si512(to + p * 64 + 32, bf16_pairs(w[1], w[3]));
    }
  }
}

#define X(name, ...)                                                                                                   \
  static void put_##name(const uint8_t *group, int64_t first, int n, uint16_t *to) {                                   \
    put_units(r16_##name, group, first, n, to);                                                                        \
  }
R16_FORMATS(X)
#undef X

typedef void (*put_fn)(const uint8_t *group, int64_t first, int n, uint16_t *to);

static put_fn put_of(int type) {
  switch (type) {
#define X(name, ...)                                                                                                   \
  case PG_##name:                                                                                                      \
    return put_##name;
    R16_FORMATS(X)
#undef X
  default:
    return NULL;
  }
}

// The 16 rows from `row` on, which are F16 or BF16 as they are stored.
static void put_floats(const r16_product *p, int64_t row, int64_t k0, int64_t n, uint16_t *to) {
  const pg_tensor as = {.ne = {p->k, 1, 1, 1}, .nb = {2}, .type = p->f.type};
  const int parts = r16_weight_parts(p);
  __m512i lines[2][UNITS / 2][R16_HALF];
  for (int r = 0; r < R16_HALF; r++) {
    float x[KC] = {0};
    if (row + r < p->m) pg_get_f32(x, &as, (const char *)p->w + (row + r) * p->row_bytes, k0, n);
    for (int part = 0; part < parts; part++) {
      if (part) r16_rest(x, n);
      for (int64_t u = 0; u < n / R16_UNIT; u++) lines[part][u][r] = r16_bf16(x + u * R16_UNIT);
    }
  }
  for (int part = 0; part < parts; part++)
    for (int64_t u = 0; u < n / R16_UNIT; u++)
      bf16_turn(to + part * n * TILE_ROWS + u * UNIT_STEP, R16_LINE, lines[part][u]);
}

void PG_FN(r16_put_panel)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip) {
  const int64_t k0 = strip * r16_strip(p), n = PG_MIN(r16_strip(p), p->k - k0);
  for (int j = 0; j < TILE_ROWS / R16_HALF; j++) {
    const int64_t row = tile * TILE_ROWS + j * R16_HALF, units = n / R16_UNIT;
    uint16_t *to = panel->values + j * R16_TILE;
    if (p->row_bytes) {
      put_floats(p, row, k0, n, to);
    } else if (row < p->m) {
      const uint8_t *group = p->w + row / R16_ROWS * r16_group_bytes(p->f, p->k);
      put_of(p->f.type)(group, k0 / R16_UNIT, (int)units, to);
    } else {
      for (int64_t u = 0; u < units; u++) memset(to + u * UNIT_STEP, 0, R16_TILE * sizeof *to);
    }
  }
}
