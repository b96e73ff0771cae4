// Q2_K ... Q6_K: super-blocks of 256 in sub-blocks of 16 or 32, whose small integer scales (and minima) are
// themselves multiples of the super-block's f16 d (and dmin).
#include "formats/block_k.h"
#include "formats/encode/search_affine.h"

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

// -- encode: for each sub-block the best real scale (and minimum), by least squares over candidate ranges; then the
// super-block's d (and dmin) for which their integers, tried with their neighbours, do best

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

BLOCK_DECODER(q2_k)
BLOCK_DECODER(q3_k)
BLOCK_DECODER(q4_k)
BLOCK_DECODER(q5_k)
BLOCK_DECODER(q6_k)
SIDE_ENCODER(q2_k, 1)
SIDE_ENCODER(q3_k, 1)
SIDE_ENCODER(q4_k, 2)
SIDE_ENCODER(q5_k, 2)
SIDE_ENCODER(q6_k, 1)
