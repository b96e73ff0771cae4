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

PG_INLINE void affine_codes(const float *x, int n, float s, float m, int top, uint8_t *q) {
  const float inv = inverse(s);
  for (int l = 0; l < n; l++) q[l] = (uint8_t)affine_code(x[l], inv, m, top);
}

PG_INLINE void sym_codes(const float *x, int n, float s, codes c, uint8_t *q) {
  const float inv = inverse(s);
  for (int l = 0; l < n; l++) q[l] = (uint8_t)(int)(nearest(x[l] * inv, c) - c.lo);
}

static void q2_k_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  side of;
  affine_block f;
  put_side(&of, x, weights, 16, 16 * n_blocks);
  affine_search(&of, 16, 3, 15, &f);
  uint8_t q[16];
  memset(b, 0, 84);
  for (int s = 0; s < 16; s++) {
    affine_codes(x + s * 16, 16, f.d[0] * f.scale[s], f.dmin[0] * f.min[s], 3, q);
    b[s] = (uint8_t)((int)f.scale[s] | (int)f.min[s] << 4);
    for (int l = 0; l < 16; l++) b[16 + s / 8 * 32 + s % 2 * 16 + l] |= q[l] << (s % 8 / 2 * 2);
  }
  store_f16(b + 80, f.d[0]);
  store_f16(b + 82, f.dmin[0]);
}

static void q3_k_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  side of;
  int scale[16];
  float d;
  const codes c = {-4, 3};
  put_side(&of, x, weights, 16, 16 * n_blocks);
  sym_blocks(&of, 16, c, -32, 31, &d, scale);
  uint8_t q[16];
  memset(b, 0, 110);
  for (int s = 0; s < 16; s++) {
    sym_codes(x + s * 16, 16, d * (float)scale[s], c, q);
    for (int l = 0; l < 16; l++) {
      b[s % 2 * 16 + l] |= (q[l] >> 2) << (s / 2);
      b[32 + s / 8 * 32 + s % 2 * 16 + l] |= (q[l] & 3) << (s % 8 / 2 * 2);
    }
    const int sc = scale[s] + 32;
    b[96 + s % 8] |= (sc & 15) << (s / 8 * 4);
    b[104 + s % 4] |= (sc >> 4) << (s / 4 * 2);
  }
  store_f16(b + 108, d);
}

// Q4_K and Q5_K up to their codes: d, dmin, scales and minima of one or two blocks, which are `bytes` long; q[256] of
// each.
PG_INLINE void encode_45(const float *x, const float *weights, int top, uint8_t *b, int bytes, int n_blocks,
                         uint8_t (*q)[256]) {
  side of;
  affine_block f;
  put_side(&of, x, weights, 32, 8 * n_blocks);
  affine_search(&of, 32, top, 63, &f);
  memset(b, 0, (size_t)(n_blocks * bytes));
  for (int i = 0; i < n_blocks; i++, b += bytes) {
    store_f16(b, f.d[i]);
    store_f16(b + 2, f.dmin[i]);
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
    for (int s = 0; s < 8; s++)
      for (int l = 0; l < 32; l++) b[16 + s / 2 * 32 + l] |= q[i][s * 32 + l] << (s % 2 * 4);
}

static void q5_k_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  uint8_t q[2][256];
  encode_45(x, weights, 31, b, 176, n_blocks, q);
  for (int i = 0; i < n_blocks; i++, b += 176)
    for (int s = 0; s < 8; s++)
      for (int l = 0; l < 32; l++) {
        b[16 + l] |= (q[i][s * 32 + l] >> 4) << s;
        b[48 + s / 2 * 32 + l] |= (q[i][s * 32 + l] & 15) << (s % 2 * 4);
      }
}

static void q6_k_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  side of;
  int scale[16];
  float d;
  const codes c = {-32, 31};
  put_side(&of, x, weights, 16, 16 * n_blocks);
  sym_blocks(&of, 16, c, -128, 127, &d, scale);
  uint8_t q[16];
  memset(b, 0, 210);
  for (int s = 0; s < 16; s++) {
    const int half = s / 8, quarter = s % 8 / 2;
    sym_codes(x + s * 16, 16, d * (float)scale[s], c, q);
    for (int l = 0; l < 16; l++) {
      b[half * 64 + quarter % 2 * 32 + s % 2 * 16 + l] |= (q[l] & 15) << (quarter / 2 * 4);
      b[128 + half * 32 + s % 2 * 16 + l] |= (q[l] >> 4) << (quarter * 2);
    }
    b[192 + s] = (uint8_t)(int8_t)scale[s];
  }
  store_f16(b + 208, d);
}

SIDE_ENCODER(q2_k, 256, 84, 1)
SIDE_ENCODER(q3_k, 256, 110, 1)
SIDE_ENCODER(q4_k, 256, 144, 2)
SIDE_ENCODER(q5_k, 256, 176, 2)
SIDE_ENCODER(q6_k, 256, 210, 1)
