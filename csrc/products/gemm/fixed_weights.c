// Convert repacked weights to fixed point, a strip of a group of 16 rows at a time.
#include "products/gemm/gemm.h"
#include "products/r16/scales.h"

enum { UNITS = KC / R16_UNIT, PARTS = R16_ROWS / VF_N };

// The greatest size of a table's values.
PG_INLINE int top_of(int table) {
  switch (table) {
  case R16_IQ1:
    return 9;
  case R16_IQ2:
    return 43;
  case R16_IQ3_XXS:
    return 62;
  case R16_IQ3_S:
    return 15;
  case R16_IQ4:
    return 127;
  default:
    return 12; // R16_FP4
  }
}

PG_INLINE int has_min(r16_format f) { return r16_head_bytes(f) == 64; }

// The range of signed codes: codes less `zero` are from low to high. They lie around 0 also in formats with minima.
typedef struct span {
  int zero, low, high;
} span;

PG_INLINE span span_of(r16_format f) {
  const int all = 1 << r16_lines(f); // a line of 64 bytes holds one bit of each of a unit's 16 x 32 codes
  if (f.table) return (span){128, -top_of(f.table), top_of(f.table)};
  const int zero = has_min(f) ? all / 2 : f.offset;
  return (span){zero, -zero, all - 1 - zero};
}

PG_INLINE int bits_of(r16_format f) { // of a signed code
  const span s = span_of(f);
  return 33 - __builtin_clz((unsigned)PG_MAX(-s.low - 1, s.high));
}

// The same for a signed code.
PG_INLINE r16_line line_of(r16_format f, const uint8_t *head, const uint8_t *scales, int part, int half) {
  r16_line l = r16_line_of(f, head, scales, part, half);
  if (has_min(f)) l.shift = vf_fma(l.scale, vf_set1((float)span_of(f).zero), l.shift);
  return l;
}

// An upper bound of the magnitude of weights.
PG_INLINE vf bound_of(r16_format f, r16_line l) {
  const span s = span_of(f);
  if (!has_min(f)) return vf_mul(vf_abs(l.scale), vf_set1((float)PG_MAX(-s.low, s.high)));
  const vf low = vf_fma(l.scale, vf_set1((float)s.low), l.shift),
           high = vf_fma(l.scale, vf_set1((float)s.high), l.shift);
  return vf_max(vf_abs(low), vf_abs(high));
}

#if VF_N == 16
PG_INLINE vi mulhrs(vi a, vi b) { return _mm512_mulhrs_epi16(a, b); }
PG_INLINE vi adds(vi a, vi b) { return _mm512_adds_epi16(a, b); }
PG_INLINE vi sub16(vi a, int b) { return _mm512_sub_epi16(a, _mm512_set1_epi16((short)b)); }
PG_INLINE vi and16(vi a, int b) { return _mm512_and_si512(a, _mm512_set1_epi16((short)b)); }
PG_INLINE vi and_xor16(vi a, int b, int c) { // (a & b) ^ c
  return _mm512_ternarylogic_epi32(a, _mm512_set1_epi16((short)b), _mm512_set1_epi16((short)c), 0x6a);
}
PG_INLINE void store(int16_t *p, vi a) { _mm512_store_si512(p, a); }
PG_INLINE vi twice16(vf a) { // each lane rounded to 16 bits, in both halves
  const vi q = _mm512_cvtps_epi32(a);
  return _mm512_or_si512(_mm512_slli_epi32(q, 16), _mm512_and_si512(q, _mm512_set1_epi32(0xffff)));
}
#else
PG_INLINE vi mulhrs(vi a, vi b) { return _mm256_mulhrs_epi16(a, b); }
PG_INLINE vi adds(vi a, vi b) { return _mm256_adds_epi16(a, b); }
PG_INLINE vi sub16(vi a, int b) { return _mm256_sub_epi16(a, _mm256_set1_epi16((short)b)); }
PG_INLINE vi and16(vi a, int b) { return _mm256_and_si256(a, _mm256_set1_epi16((short)b)); }
PG_INLINE vi and_xor16(vi a, int b, int c) { return _mm256_xor_si256(and16(a, b), _mm256_set1_epi16((short)c)); }
PG_INLINE void store(int16_t *p, vi a) { _mm256_store_si256((__m256i *)p, a); }
PG_INLINE vi twice16(vf a) {
  const vi q = _mm256_cvtps_epi32(a);
  return _mm256_or_si256(_mm256_slli_epi32(q, 16), _mm256_and_si256(q, _mm256_set1_epi32(0xffff)));
}
#endif

// Quartet p of a unit: its two pairs of codes in the top bits of 16, less `zero` in the same place.
PG_INLINE void quartet_at_top(r16_format f, const uint8_t *unit, int part, int p, vi pairs[2]) {
  const int up = 8 - bits_of(f), zero = span_of(f).zero << 8 << up & 0xffff; // a table's 128 may be shifted out
  if (f.codes == R16_NIBBLES && !f.table) {
    const vi q = vi_load(unit + p / 2 * R16_LINE + part * VF_N * 4);
    pairs[0] = and_xor16(vi_shl(q, p % 2 ? 8 : 12), 0xf000, zero);
    pairs[1] = and_xor16(vi_shl(q, p % 2 ? 0 : 4), 0xf000, zero);
    return;
  }
  const vi q = r16_quartet(f, unit, part, p), a = vi_shl(q, 8 + up), b = vi_shl(q, up);
  const int mask = 0xff00 << up & 0xff00;
  pairs[0] = sub16(a, zero);
  pairs[1] = zero == 0x8000 ? and_xor16(b, mask, zero) : sub16(and16(b, mask), zero);
}

// The same, turned into weights: times scale / 2^15, plus shift.
PG_INLINE void put_quartet(r16_format f, const uint8_t *unit, int part, int p, vi scale, vi shift, int16_t *even,
                           int16_t *odd) {
  vi pairs[2];
  quartet_at_top(f, unit, part, p, pairs);
  const vi a = mulhrs(pairs[0], scale), b = mulhrs(pairs[1], scale);
  store(even, has_min(f) ? adds(a, shift) : a);
  store(odd, has_min(f) ? adds(b, shift) : b);
}

// n units of a group, for the VF_N rows of a part. `to` is the part's place in the panel.
PG_INLINE void put_part(r16_format f, const uint8_t *group, int n, int part, int16_t (*to)[TILE_ROWS][2],
                        float *steps) {
  const int halves = r16_halves(f), block_bytes = r16_block_bytes(f);
  const float middle = (float)(1 << (bits_of(f) - 1));
  const uint8_t *units[UNITS];
  r16_line lines[UNITS][2];
  // Bounds of the weights instead of the weights themselves: their norm is 4 .. sqrt(KC) times the largest, or 0. So
  // 16 bits hold inv_scale times a scale: `middle` is at most twice the largest code.
  const vf one = vf_set1(1.0f), tiny = vf_set1(1e-30f);
  vf max = vf_zero(), sum = vf_zero();
  for (int u = 0; u < n; u++) {
    const uint8_t *head = group + u / f.units * block_bytes;
    units[u] = head + r16_head_bytes(f) + u % f.units * r16_unit_bytes(f);
    for (int h = 0; h < halves; h++) {
      const r16_line l = lines[u][h] = line_of(f, head, units[u] + r16_lines(f) * R16_LINE, part, h);
      const vf bound = bound_of(f, l);
      max = vf_max(bound, max);
      sum = vf_fma(bound, bound, sum);
    }
  }
  vf unit = one;
  if (f.scales == R16_E8M0) { // squares may overflow or underflow
    unit = vf_if_lt(max, tiny, vf_zero(), vf_div(one, max));
    sum = vf_zero();
    for (int u = 0; u < n; u++) {
      const vf bound = vf_mul(bound_of(f, lines[u][0]), unit);
      sum = vf_fma(bound, bound, sum);
    }
  }
  const vf norm = vf_sqrt(vf_mul(sum, vf_set1((float)(R16_UNIT / halves))));
  const vf size = f.scales == R16_E8M0 ? vf_mul(norm, max) : norm;
  // vf_max may lose a NaN, but the norm has it
  vf_store(steps, vf_fma(norm, vf_zero(), vf_if_lt(max, tiny, vf_zero(), vf_mul(size, vf_set1(1.0f / R16_NORM)))));
  const vf inv = vf_if_lt(max, tiny, vf_zero(), vf_mul(vf_div(vf_set1(R16_NORM), norm), unit));
  const vf inv_scale = vf_mul(inv, vf_set1(middle));
  for (int u = 0; u < n; u++, to += R16_UNIT / 2) {
    vi scale[2], shift[2];
    for (int h = 0; h < halves; h++) {
      scale[h] = twice16(vf_mul(lines[u][h].scale, inv_scale));
      shift[h] = twice16(vf_mul(lines[u][h].shift, inv));
    }
    _Pragma("GCC unroll 8") for (int p = 0; p < R16_QUARTETS; p++) {
      const int h = halves == 2 ? p / 4 : 0;
      put_quartet(f, units[u], part, p, scale[h], shift[h], to[2 * p][0], to[2 * p + 1][0]);
    }
  }
}

#define X(name, ...)                                                                                                   \
  static void put_##name(const uint8_t *group, int n, int16_t(*to)[TILE_ROWS][2], float *steps) {                      \
    for (int part = 0; part < PARTS; part++)                                                                           \
      put_part(r16_##name, group, n, part, (int16_t(*)[TILE_ROWS][2])(to[0][part * VF_N]), steps + part * VF_N);       \
  }
R16_FORMATS(X)
#undef X

typedef void (*put_fn)(const uint8_t *group, int n, int16_t (*to)[TILE_ROWS][2], float *steps);

#define X(name, ...) [PG_##name] = put_##name,
static const put_fn put_of[] = {R16_FORMATS(X)};
#undef X

// The memory to prefetch: the next strip of these rows; after the last one, the first strip of the rows behind the
// chunk. `run` is even.
static r16_fetch fetch_after(const r16_product *p, int64_t tile, int64_t strip) {
  const int64_t next = (strip + 1) * r16_strip(p), k = next < p->k ? next : 0, n = PG_MIN(r16_strip(p), p->k - k);
  const int64_t t = k ? tile : tile + R16_TILES;
  if (r16_of_floats(p)) { // of two neighbouring lines, the CPU fetches the second by itself
    const int64_t run = n > 64 ? 2 : 0;
    return (r16_fetch){(const char *)p->w + t * TILE_ROWS * p->row_bytes + k * 2, 128, run, p->row_bytes - run * 128};
  }
  const char *at = (const char *)r16_group_at(p, t * TILE_GROUPS, k, n, NULL);
  const int64_t run = (n / (R16_UNIT * p->f.units) * r16_block_bytes(p->f) + 127) / 128 * 2;
  return (r16_fetch){at, 64, run, r16_group_bytes(p->f, p->k) - run * 64};
}

void PG_FN(r16_put_panel)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip) {
  panel->next = p->row_bytes && !r16_of_floats(p) ? r16_no_fetch(panel) : fetch_after(p, tile, strip);
  if (r16_of_floats(p)) {
    PG_FN(r16_put_panel_of_floats)(panel, p, tile, strip);
    return;
  }
  const int64_t n_groups = (p->m + R16_ROWS - 1) / R16_ROWS, k0 = strip * KC, nk = PG_MIN(KC, p->k - k0);
  const int n = (int)(nk / R16_UNIT);
  uint8_t own[UNITS * R16_UNIT_MAX];
  const put_fn put = put_of[p->f.type];
  for (int j = 0; j < TILE_GROUPS; j++) {
    const int64_t g = tile * TILE_GROUPS + j;
    int16_t(*to)[TILE_ROWS][2] = (int16_t(*)[TILE_ROWS][2])(panel->ints[0][j * R16_ROWS]);
    if (g < n_groups) {
      put(r16_group_at(p, g, k0, nk, own), n, to, panel->steps + j * R16_ROWS);
    } else {
      for (int i = 0; i < n * R16_UNIT / 2; i++) memset(to[i], 0, R16_ROWS * sizeof to[i][0]);
      memset(panel->steps + j * R16_ROWS, 0, R16_ROWS * sizeof(float));
    }
  }
}
