// Repacked weights to fixed point: a strip of a group of 16 rows at a time.
#include "r16/gemm.h"
#include "r16/vec.h"

enum { UNITS = KC / R16_UNIT, PARTS = R16_ROWS / VF_N, AHEAD = 4096 };

// Bits of a code as gemm uses it, signed. FP4's values end at 12.
PG_INLINE int bits_of(r16_format f) {
  if (f.table) return f.table == R16_FP4 ? 5 : 8;
  return r16_lines(f); // a line of 64 bytes holds one bit of each of a block's 16 x 32 codes
}

// w = scale * signed code + shift, for the VF_N rows of a part, and one half of a unit (the formats with scales per 16)
// or all
typedef struct line {
  vf scale, shift;
} line;

PG_INLINE line line_of(r16_format f, const uint8_t *head, const uint8_t *scales, int part, int half) {
  const vf d = r16_head_bytes(f) ? vf_load_f16(head + part * VF_N * 2) : vf_zero();
  const vf m = r16_head_bytes(f) == 64 ? vf_load_f16(head + 32 + part * VF_N * 2) : vf_zero();
  const uint8_t *u = scales + part * VF_N, *h = u + half * R16_ROWS;
  line l;
  l.shift = vf_zero();
  switch (f.scales) {
  case R16_D:
    l.scale = d;
    break;
  case R16_D_M:
    l.scale = d;
    l.shift = m;
    break;
  case R16_E8M0:
    l.scale = vf_scale2(vf_set1(1.0f), vf_load_i8((const int8_t *)u));
    break;
  case R16_D_S32:
    l.scale = vf_mul(d, vf_load_i8((const int8_t *)u));
    break;
  case R16_D_S16:
    l.scale = vf_mul(d, vf_load_i8((const int8_t *)h));
    break;
  case R16_DM_SM32:
    l.scale = vf_mul(d, vf_load_i8((const int8_t *)u));
    l.shift = vf_sub(vf_zero(), vf_mul(m, vf_load_i8((const int8_t *)u + R16_ROWS)));
    break;
  default:
    l.scale = vf_mul(d, vf_load_u4(h, 0));
    l.shift = vf_sub(vf_zero(), vf_mul(m, vf_load_u4(h, 1)));
  }
  const int middle = 1 << (bits_of(f) - 1); // unsigned codes less this are signed ones
  if (!f.table) l.shift = vf_fma(l.scale, vf_set1((float)(middle - f.offset)), l.shift);
  return l;
}

#if VF_N == 16
PG_INLINE vi mulhrs(vi a, vi b) { return _mm512_mulhrs_epi16(a, b); }
PG_INLINE vi adds(vi a, vi b) { return _mm512_adds_epi16(a, b); }
PG_INLINE vi xor16(vi a, int b) { return _mm512_xor_si512(a, _mm512_set1_epi16((short)b)); }
PG_INLINE vi and16(vi a, int b) { return _mm512_and_si512(a, _mm512_set1_epi16((short)b)); }
PG_INLINE void store(int16_t *p, vi a) { _mm512_store_si512(p, a); }
PG_INLINE vi twice16(vf a) { // each lane rounded to 16 bits, in both halves
  const vi q = _mm512_cvtps_epi32(a);
  return _mm512_or_si512(_mm512_slli_epi32(q, 16), _mm512_and_si512(q, _mm512_set1_epi32(0xffff)));
}
#else
PG_INLINE vi mulhrs(vi a, vi b) { return _mm256_mulhrs_epi16(a, b); }
PG_INLINE vi adds(vi a, vi b) { return _mm256_adds_epi16(a, b); }
PG_INLINE vi xor16(vi a, int b) { return _mm256_xor_si256(a, _mm256_set1_epi16((short)b)); }
PG_INLINE vi and16(vi a, int b) { return _mm256_and_si256(a, _mm256_set1_epi16((short)b)); }
PG_INLINE void store(int16_t *p, vi a) { _mm256_store_si256((__m256i *)p, a); }
PG_INLINE vi twice16(vf a) {
  const vi q = _mm256_cvtps_epi32(a);
  return _mm256_or_si256(_mm256_slli_epi32(q, 16), _mm256_and_si256(q, _mm256_set1_epi32(0xffff)));
}
#endif

// Quartet p of a unit: its two pairs of signed codes at the top of 16 bits, times scale / 2^15, plus shift.
PG_INLINE void put_quartet(r16_format f, const uint8_t *unit, int part, int p, vi scale, vi shift, int16_t *even,
                           int16_t *odd) {
  const int up = 8 - bits_of(f), sign = f.table == R16_FP4 ? 0 : 0x8000,
            moves = !f.table && f.offset != 1 << (bits_of(f) - 1);
  const vi q = r16_quartet(f, unit, part, p);
  vi a = vi_shl(q, 8 + up), b = and16(vi_shl(q, up), 0xff00 << up & 0xff00);
  a = mulhrs(xor16(a, sign), scale);
  b = mulhrs(xor16(b, sign), scale);
  store(even, moves ? adds(a, shift) : a);
  store(odd, moves ? adds(b, shift) : b);
}

// Units first .. first + n of a group, for the VF_N rows of a part. `to` is the part's place in the panel.
PG_INLINE void put_part(r16_format f, const uint8_t *group, int64_t first, int n, int part, int16_t (*to)[TILE_ROWS][2],
                        float *steps) {
  const int halves = f.scales == R16_D_S16 || f.scales == R16_DM_SM16 ? 2 : 1, block_bytes = r16_block_bytes(f);
  const float middle = (float)(1 << (bits_of(f) - 1));
  const uint8_t *units[UNITS];
  line lines[UNITS][2];
  vf max = vf_zero();
  for (int u = 0; u < n; u++) {
    const uint8_t *head = group + (first + u) / f.units * block_bytes;
    units[u] = head + r16_head_bytes(f) + (first + u) % f.units * r16_unit_bytes(f);
    for (int h = 0; h < halves; h++) {
      const line l = lines[u][h] = line_of(f, head, units[u] + r16_lines(f) * R16_LINE, part, h);
      max = vf_max(vf_fma(vf_abs(l.scale), vf_set1(middle), vf_abs(l.shift)), max);
    }
  }
  // Bounds of the weights instead of the weights themselves: their norm in units of max is 1 .. sqrt(KC), or 0.
  const vf one = vf_set1(1.0f), tiny = vf_set1(1e-30f);
  const vf unit = vf_if_lt(max, tiny, vf_zero(), vf_div(one, max));
  vf sum = vf_zero();
  for (int u = 0; u < n; u++)
    for (int h = 0; h < halves; h++) {
      const line l = lines[u][h];
      const vf bound = vf_mul(vf_fma(vf_abs(l.scale), vf_set1(middle), vf_abs(l.shift)), unit);
      sum = vf_fma(bound, bound, sum);
    }
  const vf norm = vf_sqrt(vf_mul(sum, vf_set1((float)(R16_UNIT / halves))));
  const vf per_max = vf_min(vf_div(vf_set1(R16_NORM), norm), vf_set1(R16_MAX)); // steps
  // vf_max may lose a NaN, but the norm has it
  vf_store(steps, vf_fma(norm, vf_zero(), vf_if_lt(max, tiny, vf_zero(), vf_div(max, per_max))));
  const vf inv = vf_mul(per_max, unit), inv_scale = vf_mul(inv, vf_set1(middle));
  for (int u = 0; u < n; u++, to += R16_UNIT / 2) {
    vi scale[2], shift[2];
    for (int h = 0; h < halves; h++) {
      scale[h] = twice16(vf_mul(lines[u][h].scale, inv_scale));
      shift[h] = twice16(vf_mul(lines[u][h].shift, inv));
    }
    _Pragma("GCC unroll 8") for (int p = 0; p < R16_QUARTETS; p++) {
      const int h = halves == 2 ? p / 4 : 0;
      __builtin_prefetch(units[u] + p * R16_LINE + AHEAD);
      put_quartet(f, units[u], part, p, scale[h], shift[h], to[2 * p][0], to[2 * p + 1][0]);
    }
  }
}

#define X(name, ...)                                                                                                   \
  static void put_##name(const uint8_t *group, int64_t first, int n, int16_t(*to)[TILE_ROWS][2], float *steps) {       \
    for (int part = 0; part < PARTS; part++)                                                                           \
      put_part(r16_##name, group, first, n, part, (int16_t(*)[TILE_ROWS][2])(to[0][part * VF_N]),                      \
               steps + part * VF_N);                                                                                   \
  }
R16_FORMATS(X)
#undef X

typedef void (*put_fn)(const uint8_t *group, int64_t first, int n, int16_t (*to)[TILE_ROWS][2], float *steps);

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

void PG_FN(r16_put_panel)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip) {
  const int64_t n_groups = (p->m + R16_ROWS - 1) / R16_ROWS, first = strip * UNITS;
  const int n = (int)PG_MIN(UNITS, p->k / R16_UNIT - first);
  const put_fn put = put_of(p->f.type);
  for (int j = 0; j < TILE_GROUPS; j++) {
    const int64_t g = tile * TILE_GROUPS + j;
    int16_t(*to)[TILE_ROWS][2] = (int16_t(*)[TILE_ROWS][2])(panel->ints[0][j * R16_ROWS]);
    if (g < n_groups) {
      put(p->w + g * r16_group_bytes(p->f, p->k), first, n, to, panel->steps + j * R16_ROWS);
    } else {
      for (int i = 0; i < n * R16_UNIT / 2; i++) memset(to[i], 0, R16_ROWS * sizeof to[i][0]);
      memset(panel->steps + j * R16_ROWS, 0, R16_ROWS * sizeof(float));
    }
  }
}
