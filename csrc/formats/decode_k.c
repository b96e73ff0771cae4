// Q2_K ... Q6_K, decoded: super-blocks of 256 in sub-blocks of 16 or 32, whose small integer scales (and minima) are
// themselves multiples of the super-block's f16 d (and dmin). formats/encode/encode_k.c writes them.
#include "formats/block_k.h"

// Bytes: 16 of scale (low nibble) and minimum (high), 64 of 2-bit codes, d, dmin. x = d * scale * q - dmin * min.
// Byte l of a half's 32 holds elements l, l + 32, l + 64, l + 96 of that half in rising bit pairs; so too in Q3_K.
static void q2_k_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b + 80), dmin = load_f16(b + 82);
  _Pragma("GCC unroll 16") for (int s = 0; s < 16; s++) { // sub-block s: 16 elements
    const uint8_t *q = b + 16 + s / 8 * 32 + s % 2 * 16;
    const int shift = s % 8 / 2 * 2;
    const vf dl = vf_set1(d * (float)(b[s] & 15)), ml = vf_set1(dmin * (float)(b[s] >> 4));
    PUT(y + s * 16, 16, vf_sub(vf_mul(dl, vf_load_bits(q + i, shift, 3)), ml));
  }
}

// Bytes: 32 of high bits, 64 of low 2 bits, 12 of scales (6 bits, less 32), d. x = d * scale * (q - 4).
static void q3_k_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b + 108);
  _Pragma("GCC unroll 16") for (int s = 0; s < 16; s++) {
    const uint8_t *q = b + 32 + s / 8 * 32 + s % 2 * 16, *h = b + s % 2 * 16;
    const int shift = s % 8 / 2 * 2, bit = s / 2;
    const int sc = ((b[96 + s % 8] >> (s / 8 * 4)) & 15) | ((b[104 + s % 4] >> (s / 4 * 2)) & 3) << 4;
    const vf dl = vf_set1(d * (float)(sc - 32)), four = vf_set1(4);
    PUT(y + s * 16, 16,
        vf_mul(dl, vf_fma(vf_load_bits(h + i, bit, 1), four, vf_sub(vf_load_bits(q + i, shift, 3), four))));
  }
}

// Bytes: d, dmin, 12 of scales and minima (6 bits), 128 of nibbles. Byte l of a quarter's 32 holds elements l and l
// + 32.
static void q4_k_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b), dmin = load_f16(b + 2);
  _Pragma("GCC unroll 16") for (int s = 0; s < 8; s++) { // sub-block s: 32 elements
    const scale_min sm = get_scale_min(b + 4, s);
    const uint8_t *q = b + 16 + s / 2 * 32;
    const vf dl = vf_set1(d * (float)sm.scale), ml = vf_set1(dmin * (float)sm.min);
    PUT(y + s * 32, 32, vf_sub(vf_mul(dl, vf_load_u4(q + i, s % 2)), ml));
  }
}

// As Q4_K, with 32 bytes of fifth bits before the nibbles: bit s of byte l belongs to element l of sub-block s.
static void q5_k_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b), dmin = load_f16(b + 2);
  _Pragma("GCC unroll 16") for (int s = 0; s < 8; s++) {
    const scale_min sm = get_scale_min(b + 4, s);
    const uint8_t *h = b + 16, *q = b + 48 + s / 2 * 32;
    const vf dl = vf_set1(d * (float)sm.scale), ml = vf_set1(dmin * (float)sm.min), fifth = vf_set1(16);
    PUT(y + s * 32, 32, vf_sub(vf_mul(dl, vf_fma(vf_load_bits(h + i, s, 1), fifth, vf_load_u4(q + i, s % 2))), ml));
  }
}

// Bytes: 128 of low nibbles, 64 of high bit pairs, 16 signed scales, d. x = d * scale * (q - 32).
// Of a half, byte l of 64 holds the nibbles of elements l and l + 64; byte l of 32 the pairs of l, l + 32, l + 64, l
// + 96.
static void q6_k_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b + 208);
  _Pragma("GCC unroll 16") for (int s = 0; s < 16; s++) {
    const int half = s / 8, quarter = s % 8 / 2;
    const uint8_t *q = b + half * 64 + quarter % 2 * 32 + s % 2 * 16, *h = b + 128 + half * 32 + s % 2 * 16;
    const vf dl = vf_set1(d * (float)(int8_t)b[192 + s]), high = vf_set1(16), middle = vf_set1(32);
    PUT(y + s * 16, 16,
        vf_mul(dl, vf_fma(vf_load_bits(h + i, quarter * 2, 3), high, vf_sub(vf_load_u4(q + i, quarter / 2), middle))));
  }
}

BLOCK_DECODER(q2_k, 256, 84)
BLOCK_DECODER(q3_k, 256, 110)
BLOCK_DECODER(q4_k, 256, 144)
BLOCK_DECODER(q5_k, 256, 176)
BLOCK_DECODER(q6_k, 256, 210)
