// Q2_K ... Q6_K, encoded (layouts: formats/decode_k.c). Per sub-block the best real scale (and minimum) by least
// squares over candidate ranges; then the super-block's d (and dmin) for which their integers, tried with their
// neighbours, do best.
#include "formats/encode/search_affine.h"

PG_INLINE void put_scale_min(uint8_t *p, int i, int scale, int min) { // into zeroed bytes; see get_scale_min
  if (i < 4) {
    p[i] |= scale;
    p[i + 4] |= min;
  } else {
    p[i + 4] |= (scale & 15) | (min & 15) << 4;
    p[i - 4] |= (scale >> 4) << 6;
    p[i] |= (min >> 4) << 6;
  }
}

// The codes of n elements, a multiple of 16, as bytes.
PG_INLINE void affine_codes(const float *x, int n, float s, float m, int top, uint8_t *q) {
  const vf inv = vf_set1(inverse(s)), ms = vf_set1(m);
  for (int l = 0; l < n; l += VF_N) put_bytes(q + l, affine_codes_of(vf_load(x + l), inv, ms, top));
}

PG_INLINE void sym_codes(const float *x, int n, float s, codes c, uint8_t *q) { // less c.lo
  const vf inv = vf_set1(inverse(s)), lo = vf_set1(c.lo);
  for (int l = 0; l < n; l += VF_N) put_bytes(q + l, vf_sub(nearest_codes(vf_mul(vf_load(x + l), inv), c), lo));
}

// `bits` bits, from bit `from` on, of n * 8 / bits codes, n apart, as n bytes: the first n codes lowest.
PG_INLINE void pack(const uint8_t *restrict q, int from, int bits, int n, uint8_t *restrict b) {
  for (int l = 0; l < n; l++) {
    int byte = 0;
#pragma GCC unroll 8
    for (int i = 0; i < 8 / bits; i++) byte |= (q[i * n + l] >> from & ((1 << bits) - 1)) << (i * bits);
    b[l] = (uint8_t)byte;
  }
}

static void q2_k_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  side of;
  affine_block f;
  put_side(&of, x, weights, 16, 16 * n_blocks);
  affine_search(&of, 16, 3, 15, &f);
  uint8_t q[256];
  for (int s = 0; s < 16; s++) {
    affine_codes(x + s * 16, 16, f.d[0] * f.scale[s], f.dmin[0] * f.min[s], 3, q + s * 16);
    b[s] = (uint8_t)((int)f.scale[s] | (int)f.min[s] << 4);
  }
  for (int half = 0; half < 2; half++) pack(q + half * 128, 0, 2, 32, b + 16 + half * 32);
  store_f16(b + 80, f.d[0]);
  store_f16(b + 82, f.dmin[0]);
}

static void q3_k_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  side of;
  sym_block f;
  const codes c = codes_3bit;
  put_side(&of, x, weights, 16, 16 * n_blocks);
  sym_search(&of, 16, c, -32, 31, &f);
  uint8_t q[256];
  memset(b + 96, 0, 12);
  for (int s = 0; s < 16; s++) {
    sym_codes(x + s * 16, 16, f.d[0] * f.scale[s], c, q + s * 16);
    const int sc = (int)f.scale[s] + 32;
    b[96 + s % 8] |= (sc & 15) << (s / 8 * 4);
    b[104 + s % 4] |= (sc >> 4) << (s / 4 * 2);
  }
  pack(q, 2, 1, 32, b);
  for (int half = 0; half < 2; half++) pack(q + half * 128, 0, 2, 32, b + 32 + half * 32);
  store_f16(b + 108, f.d[0]);
}

// Q4_K and Q5_K up to their codes: d, dmin, scales and minima of one or two blocks, which are `bytes` long; q[256] of
// each.
PG_INLINE void encode_45(const float *x, const float *weights, int top, uint8_t *b, int bytes, int n_blocks,
                         uint8_t (*q)[256]) {
  side of;
  affine_block f;
  put_side(&of, x, weights, 32, 8 * n_blocks);
  affine_search(&of, 32, top, 63, &f);
  for (int i = 0; i < n_blocks; i++, b += bytes) {
    store_f16(b, f.d[i]);
    store_f16(b + 2, f.dmin[i]);
    memset(b + 4, 0, 12);
    for (int s = 0; s < 8; s++) {
      const float scale = f.scale[i * 8 + s], min = f.min[i * 8 + s];
      put_scale_min(b + 4, s, (int)scale, (int)min);
      affine_codes(x + i * 256 + s * 32, 32, f.d[i] * scale, f.dmin[i] * min, top, q[i] + s * 32);
    }
  }
}

static void q4_k_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  uint8_t q[2][256];
  encode_45(x, weights, 15, b, 144, n_blocks, q);
  for (int i = 0; i < n_blocks; i++, b += 144)
    for (int s = 0; s < 4; s++) pack(q[i] + s * 64, 0, 4, 32, b + 16 + s * 32);
}

static void q5_k_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  uint8_t q[2][256];
  encode_45(x, weights, 31, b, 176, n_blocks, q);
  for (int i = 0; i < n_blocks; i++, b += 176) {
    pack(q[i], 4, 1, 32, b + 16);
    for (int s = 0; s < 4; s++) pack(q[i] + s * 64, 0, 4, 32, b + 48 + s * 32);
  }
}

static void q6_k_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  side of;
  sym_block f;
  const codes c = codes_6bit;
  put_side(&of, x, weights, 16, 16 * n_blocks);
  sym_search(&of, 16, c, -128, 127, &f);
  uint8_t q[256];
  for (int s = 0; s < 16; s++) {
    sym_codes(x + s * 16, 16, f.d[0] * f.scale[s], c, q + s * 16);
    b[192 + s] = (uint8_t)(int8_t)f.scale[s];
  }
  for (int half = 0; half < 2; half++) {
    pack(q + half * 128, 0, 4, 64, b + half * 64);
    pack(q + half * 128, 4, 2, 32, b + 128 + half * 32);
  }
  store_f16(b + 208, f.d[0]);
}

SIDE_ENCODER(q2_k, 256, 84, 1)
SIDE_ENCODER(q3_k, 256, 110, 1)
SIDE_ENCODER(q4_k, 256, 144, 2)
SIDE_ENCODER(q5_k, 256, 176, 2)
SIDE_ENCODER(q6_k, 256, 210, 1)
