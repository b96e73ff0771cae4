// IQ4_NL, IQ4_XS, MXFP4, NVFP4, decoded: 4-bit codes for 16 fixed values. formats/encode/encode_lut.c writes them.
#include "formats/block_lut.h"

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

BLOCK_DECODER(iq4_nl, 32, 18)
BLOCK_DECODER(iq4_xs, 256, 136)
BLOCK_DECODER(mxfp4, 32, 17)
BLOCK_DECODER(nvfp4, 64, 36)
