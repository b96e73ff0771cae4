// Convert rows to bf16, in the layout of tile registers.
#define R16_BF16
#include "products/gemm/gemm.h"
#include "products/r16/scales.h"

enum {
  AHEAD = 4096,
  AHEAD_FLOATS = 512,
  UNIT_STEP = TILE_ROWS * R16_UNIT,
  PIECE = 256 // elements of rows as they are stored that are repacked at a time
};

// Byte i of each lane, as a float.
PG_INLINE vf element(vi q, int i) {
  switch (i) {
  case 0:
    return _mm512_cvtepi32_ps(_mm512_and_si512(q, _mm512_set1_epi32(255)));
  case 3:
    return _mm512_cvtepi32_ps(_mm512_srli_epi32(q, 24));
  default: {
    const __m512i lanes = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 4, 8, 12)),
                  byte = _mm512_set1_epi32((int)(0xffffff00u | (unsigned)i)); // 0xff: 0
    return _mm512_cvtepi32_ps(_mm512_shuffle_epi8(q, _mm512_add_epi32(byte, lanes)));
  }
  }
}

// Convert n units of a group of 16 rows. Codes are exact after their offset is subtracted, and zeros stay zeros.
PG_INLINE void put_units(r16_format f, const uint8_t *group, int n, uint16_t *to) {
  const int halves = r16_halves(f), block_bytes = r16_block_bytes(f);
  for (int u = 0; u < n; u++, to += UNIT_STEP) {
    const uint8_t *head = group + u / f.units * block_bytes;
    const uint8_t *unit = head + r16_head_bytes(f) + u % f.units * r16_unit_bytes(f);
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
  static void put_##name(const uint8_t *group, int n, uint16_t *to) { put_units(r16_##name, group, n, to); }
R16_FORMATS(X)
#undef X

typedef void (*put_fn)(const uint8_t *group, int n, uint16_t *to);

#define X(name, ...) [PG_##name] = put_##name,
static const put_fn put_of[] = {R16_FORMATS(X)};
#undef X

// 32 elements of a row, in the order of pairs.
PG_INLINE __m512i bf16_unit(const uint16_t *row) { return r16_pairs(_mm512_loadu_si512(row)); }
PG_INLINE void f16_unit(const uint16_t *row, __m512i *number, __m512i *rest) {
  const vf low = vf_load_f16(row), high = vf_load_f16(row + 16);
  *number = r16_pairs(bf16_of(low, high));
  *rest = r16_pairs(bf16_of(bf16_rest(low), bf16_rest(high)));
}

// The 16 rows from `row` on, which are F16 or BF16 as they are stored.
PG_INLINE void put_floats(const r16_product *p, int64_t row, int64_t k0, int64_t n, uint16_t *to, int f16) {
  const int64_t rows = PG_MAX(0, PG_MIN(R16_HALF, p->m - row));
  const char *from = (const char *)p->w + row * p->row_bytes + k0 * sizeof(uint16_t);
  __m512i numbers[R16_HALF], rests[R16_HALF];
  for (int r = 0; r < R16_HALF; r++) numbers[r] = rests[r] = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += R16_UNIT, to += UNIT_STEP) {
    for (int r = 0; r < rows; r++) {
      const uint16_t *unit = (const uint16_t *)(from + r * p->row_bytes) + i;
      __builtin_prefetch((const char *)unit + AHEAD_FLOATS);
      if (f16) {
        f16_unit(unit, &numbers[r], &rests[r]);
      } else {
        numbers[r] = bf16_unit(unit);
      }
    }
    bf16_turn(to, R16_LINE, numbers);
    if (f16) bf16_turn(to + n * TILE_ROWS, R16_LINE, rests);
  }
}

void R16_BF16_FN(r16_put_panel)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip) {
  const int64_t k0 = strip * r16_strip(p), n = PG_MIN(r16_strip(p), p->k - k0);
  for (int j = 0; j < TILE_ROWS / R16_HALF; j++) {
    const int64_t row = tile * TILE_ROWS + j * R16_HALF, units = n / R16_UNIT;
    uint16_t *to = panel->values + j * R16_TILE;
    uint8_t own[PIECE / R16_UNIT * R16_UNIT_MAX];
    if (r16_of_floats(p)) {
      if (p->f.type == PG_F16) {
        put_floats(p, row, k0, n, to, 1);
      } else {
        put_floats(p, row, k0, n, to, 0);
      }
    } else if (row < p->m) {
      const put_fn put = put_of[p->f.type];
      for (int64_t k = 0, nk; k < n; k += nk) {
        nk = p->row_bytes ? PG_MIN(PIECE, n - k) : n;
        put(r16_group_at(p, row / R16_ROWS, k0 + k, nk, own), (int)(nk / R16_UNIT), to + k * TILE_ROWS);
      }
    } else {
      for (int64_t u = 0; u < units; u++) memset(to + u * UNIT_STEP, 0, R16_TILE * sizeof *to);
    }
  }
}
