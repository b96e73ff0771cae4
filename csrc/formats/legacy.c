// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: blocks of 32 with an f16 scale d, in the _1 types also an f16 minimum m.
// Nibbles: byte j holds element j (low) and j + 16 (high). The fifth bits: bit j of a 32-bit word belongs to element j.
#include "formats/encode/search_affine.h"

enum { N = 32, H = N / 2 };

// -- decode: x = d * (q - offset), x = d * q + m

static void q4_0_decode(const uint8_t *restrict b, float *restrict y) {
  const vf d = vf_set1_f16(b);
  for (int h = 0; h < 2; h++) PUT(y + h * H, H, vf_mul(vf_load_i4(b + 2 + i, h), d));
}

static void q4_1_decode(const uint8_t *restrict b, float *restrict y) {
  const vf d = vf_set1_f16(b), m = vf_set1_f16(b + 2);
  for (int h = 0; h < 2; h++) PUT(y + h * H, H, vf_add(vf_mul(vf_load_u4(b + 4 + i, h), d), m));
}

static void q5_0_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b);
  const uint32_t h = load_u32(b + 2);
  for (int j = 0; j < H; j++) {
    y[j] = (float)((int)((b[6 + j] & 15) | ((h >> j) & 1) << 4) - 16) * d;
    y[j + H] = (float)((int)((b[6 + j] >> 4) | ((h >> (j + H)) & 1) << 4) - 16) * d;
  }
}

static void q5_1_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b), m = load_f16(b + 2);
  const uint32_t h = load_u32(b + 4);
  for (int j = 0; j < H; j++) {
    y[j] = (float)(int)((b[8 + j] & 15) | ((h >> j) & 1) << 4) * d + m;
    y[j + H] = (float)(int)((b[8 + j] >> 4) | ((h >> (j + H)) & 1) << 4) * d + m;
  }
}

static void q8_0_decode(const uint8_t *restrict b, float *restrict y) {
  const vf d = vf_set1_f16(b);
  PUT(y, N, vf_mul(vf_load_i8((const int8_t *)b + 2 + i), d));
}

// -- encode: the reference quantisers, which use only a block's extreme values; every GGUF writer gives these bytes

static void put_nibbles(uint8_t *restrict b, const uint8_t *restrict q) {
  for (int j = 0; j < H; j++) b[j] = (q[j] & 15) | (uint8_t)(q[j + H] << 4);
}

static void put_high_bits(uint8_t *restrict b, const uint8_t *restrict q) {
  uint32_t h = 0;
  for (int j = 0; j < N; j++) h |= (uint32_t)(q[j] >> 4) << j;
  store_u32(b, h);
}

// The least and the greatest value of a block. NaN counts as none: a block of NaN has the least value INFINITY.
PG_INLINE void least_and_greatest(const float *x, float *lo, float *hi) {
  vf least = vf_set1(INFINITY), greatest = vf_set1(-INFINITY);
  for (int j = 0; j < N; j += VF_N) {
    least = vf_min(vf_load(x + j), least);
    greatest = vf_max(vf_load(x + j), greatest);
  }
  *lo = -vf_hmax(vf_sub(vf_zero(), least));
  *hi = vf_hmax(greatest);
}

// q = x / d + half, where the first value of the greatest magnitude becomes q = 0. Returns d.
static float symmetric(const float *restrict x, uint8_t *restrict q, int half) {
  float lo, hi;
  least_and_greatest(x, &lo, &hi);
  float ext = hi < lo ? 0 : hi > -lo ? hi : lo;
  for (int j = 0; hi == -lo && j < N; j++)
    if (fabsf(x[j]) == hi) {
      ext = x[j];
      break;
    }
  const float d = ext != 0 ? ext / -half : -0.0f, inv = d != 0 ? 1 / d : 0;
  for (int j = 0; j < N; j += VF_N) {
    const vf ideal = vf_mul(vf_load(x + j), vf_set1(inv));
    put_bytes(q + j, clamps(vf_add(ideal, vf_set1((float)half + 0.5f)), 0, (float)(2 * half - 1)));
  }
  return d;
}

// q = (x - min) / d in 0..top. Returns d and min.
static float affine_reference(const float *restrict x, uint8_t *restrict q, int top, float *min) {
  float lo, hi;
  least_and_greatest(x, &lo, &hi);
  for (int j = 0; lo == 0 && j < N; j++)
    if (x[j] == 0) { // the sign of the first zero is stored
      lo = x[j];
      break;
    }
  const float d = (hi != lo ? hi - lo : hi - hi) / top, inv = d != 0 ? 1 / d : 0;
  for (int j = 0; j < N; j += VF_N) {
    const vf ideal = vf_mul(vf_sub(vf_load(x + j), vf_set1(lo)), vf_set1(inv));
    put_bytes(q + j, clamps(vf_add(ideal, vf_set1(0.5f)), 0, (float)top));
  }
  *min = lo;
  return d;
}

// With weights: the scale (and minimum) of least weighted error.

// Scales of up to SIDE blocks.
static void symmetric_weighted(const float *x, const float *w, int half, float *d, int n_blocks) {
  side of;
  put_side(&of, x, w, N, n_blocks);
  sym_stored(&of, N, half == 8 ? codes_4bit : codes_5bit, d);
}

static float symmetric_codes(const float *x, float d, uint8_t *q, int half) {
  const float inv = inverse(d);
  for (int j = 0; j < N; j++) q[j] = (uint8_t)((int)nearest(x[j] * inv, half == 8 ? codes_4bit : codes_5bit) + half);
  return d;
}

static void affine_weighted(const float *x, const float *w, int top, float *d, float *m, int n_blocks) {
  side of;
  put_side(&of, x, w, N, n_blocks);
  affine_stored(&of, N, top, d, m);
}

static float affine_codes(const float *x, float d, float m, uint8_t *q, int top, float *min) {
  const float inv = inverse(d);
  for (int j = 0; j < N; j++) q[j] = (uint8_t)affine_code(x[j], inv, m, top);
  *min = -m;
  return d;
}

// Bytes of q4_0, q5_0: d, then the codes, which `put` writes. q4_1, q5_1: d, m, then the codes.
PG_INLINE void encode_symmetric(const float *x, const float *weights, uint8_t *b, int n_blocks, int bytes, int half,
                                void (*put)(uint8_t *b, const uint8_t *q)) {
  float d[SIDE];
  if (weights) symmetric_weighted(x, weights, half, d, n_blocks);
  for (int i = 0; i < n_blocks; i++, x += N, b += bytes) {
    uint8_t q[N];
    store_scale(b, weights ? symmetric_codes(x, d[i], q, half) : symmetric(x, q, half));
    put(b + 2, q);
  }
}

PG_INLINE void encode_affine(const float *x, const float *weights, uint8_t *b, int n_blocks, int bytes, int top,
                             void (*put)(uint8_t *b, const uint8_t *q)) {
  float d[SIDE], m[SIDE];
  if (weights) affine_weighted(x, weights, top, d, m, n_blocks);
  for (int i = 0; i < n_blocks; i++, x += N, b += bytes) {
    uint8_t q[N];
    float min;
    store_scale(b, weights ? affine_codes(x, d[i], m[i], q, top, &min) : affine_reference(x, q, top, &min));
    store_scale(b + 2, min);
    put(b + 4, q);
  }
}

static void put_5_bits(uint8_t *b, const uint8_t *q) {
  put_high_bits(b, q);
  put_nibbles(b + 4, q);
}

static void q4_0_encode(const float *x, const float *weights, uint8_t *b, int n_blocks) {
  encode_symmetric(x, weights, b, n_blocks, 18, 8, put_nibbles);
}

static void q4_1_encode(const float *x, const float *weights, uint8_t *b, int n_blocks) {
  encode_affine(x, weights, b, n_blocks, 20, 15, put_nibbles);
}

static void q5_0_encode(const float *x, const float *weights, uint8_t *b, int n_blocks) {
  encode_symmetric(x, weights, b, n_blocks, 22, 16, put_5_bits);
}

static void q5_1_encode(const float *x, const float *weights, uint8_t *b, int n_blocks) {
  encode_affine(x, weights, b, n_blocks, 24, 31, put_5_bits);
}

static void q8_0_encode(const float *restrict x, const float *weights, uint8_t *restrict b) {
  (void)weights; // ignored: with 255 steps they make no difference worth having
  float amax = 0;
  for (int j = 0; j < N; j++) amax = fabsf(x[j]) > amax ? fabsf(x[j]) : amax;
  const float d = amax / 127, inv = d != 0 ? 1 / d : 0;
  store_scale(b, d);
  for (int j = 0; j < N; j++) b[2 + j] = (uint8_t)(int8_t)to_int(round_away(x[j] * inv), -127, 127);
}

BLOCK_DECODER(q4_0)
BLOCK_DECODER(q4_1)
BLOCK_DECODER(q5_0)
BLOCK_DECODER(q5_1)
BLOCK_DECODER(q8_0)
SIDE_ENCODER(q4_0, SIDE)
SIDE_ENCODER(q4_1, SIDE)
SIDE_ENCODER(q5_0, SIDE)
SIDE_ENCODER(q5_1, SIDE)
BLOCK_ENCODER(q8_0)
