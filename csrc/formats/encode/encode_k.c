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

PG_INLINE void affine_codes(const float *x, int n, affine a, int top, uint8_t *q) {
  const float inv = inverse(a.s);
  for (int l = 0; l < n; l++) q[l] = (uint8_t)affine_code(x[l], inv, a.m, top);
}

PG_INLINE void sym_codes(const float *x, int n, float s, codes c, uint8_t *q) {
  const float inv = inverse(s);
  for (int l = 0; l < n; l++) q[l] = (uint8_t)(int)(nearest(x[l] * inv, c) - c.lo);
}

static void q2_k_encode(const float *x, const float *weights, uint8_t *restrict b) {
  float ones[256];
  const affine_block f = affine_search(x, weights_or_ones(weights, ones, 256), 16, 3, 15);
  uint8_t q[16];
  memset(b, 0, 84);
  for (int s = 0; s < 16; s++) {
    affine_codes(x + s * 16, 16, (affine){f.d * (float)f.scale[s], f.dmin * (float)f.min[s]}, 3, q);
    b[s] = f.scale[s] | f.min[s] << 4;
    for (int l = 0; l < 16; l++) b[16 + s / 8 * 32 + s % 2 * 16 + l] |= q[l] << (s % 8 / 2 * 2);
  }
  store_f16(b + 80, f.d);
  store_f16(b + 82, f.dmin);
}

static void q3_k_encode(const float *x, const float *weights, uint8_t *restrict b) {
  float ones[256];
  int scale[16];
  const codes c = {-4, 3};
  const float d = sym_block(x, weights_or_ones(weights, ones, 256), 16, c, -32, 31, scale);
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

// Q4_K and Q5_K up to their codes: d, dmin, scales and minima; q[256].
PG_INLINE void encode_45(const float *x, const float *weights, int top, uint8_t *b, uint8_t *q) {
  float ones[256];
  const affine_block f = affine_search(x, weights_or_ones(weights, ones, 256), 32, top, 63);
  store_f16(b, f.d);
  store_f16(b + 2, f.dmin);
  for (int s = 0; s < 8; s++) {
    put_scale_min(b + 4, s, f.scale[s], f.min[s]);
    affine_codes(x + s * 32, 32, (affine){f.d * (float)f.scale[s], f.dmin * (float)f.min[s]}, top, q + s * 32);
  }
}

static void q4_k_encode(const float *x, const float *weights, uint8_t *restrict b) {
  uint8_t q[256];
  memset(b, 0, 144);
  encode_45(x, weights, 15, b, q);
  for (int s = 0; s < 8; s++)
    for (int l = 0; l < 32; l++) b[16 + s / 2 * 32 + l] |= q[s * 32 + l] << (s % 2 * 4);
}

static void q5_k_encode(const float *x, const float *weights, uint8_t *restrict b) {
  uint8_t q[256];
  memset(b, 0, 176);
  encode_45(x, weights, 31, b, q);
  for (int s = 0; s < 8; s++)
    for (int l = 0; l < 32; l++) {
      b[16 + l] |= (q[s * 32 + l] >> 4) << s;
      b[48 + s / 2 * 32 + l] |= (q[s * 32 + l] & 15) << (s % 2 * 4);
    }
}

static void q6_k_encode(const float *x, const float *weights, uint8_t *restrict b) {
  float ones[256];
  int scale[16];
  const codes c = {-32, 31};
  const float d = sym_block(x, weights_or_ones(weights, ones, 256), 16, c, -128, 127, scale);
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

BLOCK_ENCODER(q2_k, 256, 84)
BLOCK_ENCODER(q3_k, 256, 110)
BLOCK_ENCODER(q4_k, 256, 144)
BLOCK_ENCODER(q5_k, 256, 176)
BLOCK_ENCODER(q6_k, 256, 210)
