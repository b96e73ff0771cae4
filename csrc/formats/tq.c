// TQ1_0, TQ2_0: weights of -1, 0, 1 times an f16 scale, super-blocks of 256.
#include "formats/block.h"

// Bytes: 32 with 5 trits for 32 elements each, 16 with 5 for 16 each, 4 with 4 for 4 each; d. A byte is the fraction
// of 256 whose base-3 digits are the trits: times 3, the carry is the first of them.
static void put_trits(float *restrict y, const uint8_t *restrict q, int n, int trits, float d) {
  for (int t = 0, power = 1; t < trits; t++, power *= 3)
    for (int j = 0; j < n; j++) y[t * n + j] = (float)(((uint8_t)(q[j] * power) * 3 >> 8) - 1) * d;
}

static void tq1_0_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b + 52);
  put_trits(y, b, 32, 5, d);
  put_trits(y + 160, b + 32, 16, 5, d);
  put_trits(y + 240, b + 48, 4, 4, d);
}

// Bytes: 2 x 32 with bit pairs of elements l, l + 32, l + 64, l + 96 of a half; d.
static void tq2_0_decode(const uint8_t *restrict b, float *restrict y) {
  const vf d = vf_set1_f16(b + 64), one = vf_set1(1);
  for (int s = 0; s < 8; s++)
    PUT(y + s * 32, 32, vf_mul(vf_sub(vf_load_bits(b + s / 4 * 32 + i, s % 4 * 2, 3), one), d));
}

BLOCK_DECODER(tq1_0)
BLOCK_DECODER(tq2_0)

// -- encode: rounded against the greatest magnitude, as every GGUF writer does

// q = 0, 1, 2 for -1, 0, 1; returns d.
static float trits(const float *restrict x, uint8_t *restrict q) {
  float amax = 0;
  for (int i = 0; i < 256; i++) amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
  const float inv = amax != 0 ? 1 / amax : 0;
  for (int i = 0; i < 256; i++) q[i] = (uint8_t)(to_int(round_away(x[i] * inv), -1, 1) + 1);
  return amax;
}

static void pack_trits(const uint8_t *restrict q, int n, int count, uint8_t *restrict b) {
  for (int j = 0; j < n; j++) {
    int v = 0;
    for (int t = 0; t < 5; t++) v = v * 3 + (t < count ? q[t * n + j] : 0);
    b[j] = (uint8_t)((v * 256 + 242) / 243); // rounded up, so that the carries come out right
  }
}

static void tq1_0_encode(const float *x, const float *weights, uint8_t *b) {
  (void)weights;
  uint8_t q[256];
  store_scale(b + 52, trits(x, q));
  pack_trits(q, 32, 5, b);
  pack_trits(q + 160, 16, 5, b + 32);
  pack_trits(q + 240, 4, 4, b + 48);
}

static void tq2_0_encode(const float *x, const float *weights, uint8_t *b) {
  (void)weights;
  uint8_t q[256];
  store_scale(b + 64, trits(x, q));
  for (int i = 0; i < 64; i++) {
    const uint8_t *p = q + i / 32 * 128 + i % 32;
    b[i] = (uint8_t)(p[0] | p[32] << 2 | p[64] << 4 | p[96] << 6);
  }
}

BLOCK_ENCODER(tq1_0)
BLOCK_ENCODER(tq2_0)
