// IQ4_NL, IQ4_XS, MXFP4, NVFP4: 4-bit codes for 16 fixed values.
#include "formats/block_lut.h"
#include "formats/encode/search.h"

// Bytes: d, 16 of nibbles; byte j holds elements j and j + 16 of 32.
static void iq4_nl_decode(const uint8_t *restrict b, float *restrict y) {
  put_values(y, iq4_values, b + 2, 16, load_f16(b));
}

// Bytes: d, 8 x 2 high bits of scales, 8 x 4 low bits, 8 x 16 of nibbles. Scales are 6 bits, less 32.
static void iq4_xs_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b);
  const int high = load_u16(b + 2);
  for (int s = 0; s < 8; s++) {
    const int scale = ((b[4 + s / 2] >> (s % 2 * 4)) & 15) | ((high >> (s * 2)) & 3) << 4;
    put_values(y + s * 32, iq4_values, b + 8 + s * 16, 16, d * (float)(scale - 32));
  }
}

// Bytes: an E8M0 scale, 16 of nibbles.
static void mxfp4_decode(const uint8_t *restrict b, float *restrict y) {
  put_values(y, fp4_values, b + 1, 16, e8m0_half(b[0]));
}

// 64 elements. Bytes: 4 UE4M3 scales, 4 x 8 of nibbles; byte j of 8 holds elements j and j + 8 of 16.
static void nvfp4_decode(const uint8_t *restrict b, float *restrict y) {
  for (int s = 0; s < 4; s++) put_values(y + s * 16, fp4_values, b + 4 + s * 8, 8, ue4m3_half(b[s]));
}

// -- encode: the FP4 types take the scale that their reference quantisers take, so their bytes are the same as every
// GGUF writer's

PG_INLINE int iq4_code(float t) {
  int q = 0;
  for (int k = 1; k < 16; k++) q += t > 0.5f * (float)(iq4_values[k - 1] + iq4_values[k]);
  return q;
}

// 32 codes for x / s as 16 bytes.
PG_INLINE void put_iq4(const float *restrict x, float s, uint8_t *restrict b) {
  const float inv = inverse(s);
  for (int j = 0; j < 16; j++) b[j] = (uint8_t)(iq4_code(x[j] * inv) | iq4_code(x[j + 16] * inv) << 4);
}

static void iq4_nl_encode(const float *x, const float *weights, uint8_t *b, int n_blocks) {
  side of;
  float d[SIDE];
  put_side(&of, x, weights, 32, n_blocks);
  sym_stored(&of, 32, codes_iq4, d);
  for (int i = 0; i < n_blocks; i++, b += 18) {
    store_f16(b, d[i]);
    put_iq4(x + i * 32, d[i], b + 2);
  }
}

static void iq4_xs_encode(const float *x, const float *weights, uint8_t *b, int n_blocks) {
  side of;
  sym_block f;
  put_side(&of, x, weights, 32, 8 * n_blocks);
  sym_search(&of, 32, codes_iq4, -32, 31, &f);
  for (int i = 0; i < n_blocks; i++, x += 256, b += 136) {
    int high = 0;
    memset(b, 0, 8);
    for (int s = 0; s < 8; s++) {
      const int sc = (int)f.scale[i * 8 + s] + 32;
      high |= (sc >> 4) << (s * 2);
      b[4 + s / 2] |= (sc & 15) << (s % 2 * 4);
      put_iq4(x + s * 32, f.d[i] * f.scale[i * 8 + s], b + 8 + s * 16);
    }
    store_f16(b, f.d[i]);
    store_u16(b + 2, (uint16_t)high);
  }
}

// The FP4 code whose value times d is nearest to x; of two, the one of smaller magnitude; 0 when d is 0. As d has
// few bits, the borders between codes are exact.
PG_INLINE int fp4_code(float x, float d) {
  const float a = fabsf(x), step = d > 0 ? d : INFINITY;
  int q = 0;
  for (int k = 1; k < 8; k++) q += a > step * (0.5f * (float)(fp4_values[k - 1] + fp4_values[k]));
  return q | ((x < 0) & (q != 0)) << 3;
}

PG_INLINE void put_fp4(const float *restrict x, float d, int n, uint8_t *restrict b) {
  for (int j = 0; j < n; j++) b[j] = (uint8_t)(fp4_code(x[j], d) | fp4_code(x[j + n], d) << 4);
}

static void mxfp4_encode(const float *x, const float *weights, uint8_t *b) {
  (void)weights;
  const float amax = fabsf(extreme(x, 32));
  b[0] = amax > 0 ? (uint8_t)to_int(floorf(log2f(amax)) + 125, 0, 254) : 0; // the largest value, 6, has exponent 2
  put_fp4(x, e8m0_half(b[0]), 16, b + 1);
}

// Nearest UE4M3, halves up, at most 448.
PG_INLINE uint8_t to_ue4m3(float x) {
  if (!(x > 0)) return 0;
  if (x >= 448) return 0x7e;
  if (x < 0x1p-6f) return (uint8_t)PG_MIN((int)(x * 512 + 0.5f), 7);
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t e = ((bits + (1u << 19)) >> 20) - (120u << 3);
  return (uint8_t)PG_MIN(e, 0x7eu);
}

static void nvfp4_encode(const float *x, const float *weights, uint8_t *b) {
  (void)weights;
  for (int s = 0; s < 4; s++) {
    b[s] = to_ue4m3(fabsf(extreme(x + s * 16, 16)) / 6);
    put_fp4(x + s * 16, ue4m3_half(b[s]), 8, b + 4 + s * 8);
  }
}

BLOCK_DECODER(iq4_nl)
BLOCK_DECODER(iq4_xs)
BLOCK_DECODER(mxfp4)
BLOCK_DECODER(nvfp4)
SIDE_ENCODER(iq4_nl, SIDE)
SIDE_ENCODER(iq4_xs, 2)
BLOCK_ENCODER(mxfp4)
BLOCK_ENCODER(nvfp4)
