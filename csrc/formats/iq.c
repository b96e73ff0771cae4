// IQ1_*, IQ2_*, IQ3_*: super-blocks of 256. Groups of 8 (or 4) elements are points of a grid, by number, with
// separate signs (IQ1: with a common shift instead).
#include "formats/block_iq.h"
#include "formats/encode/search_grid.h"

// y[0..8) = scale * (point + shift)
PG_INLINE void put_shifted(float *restrict y, const int8_t *restrict point, float scale, float shift) {
#if defined(__AVX2__)
  const __m256 p = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)point)));
  _mm256_storeu_ps(y, _mm256_mul_ps(_mm256_set1_ps(scale), _mm256_add_ps(p, _mm256_set1_ps(shift))));
#else
  for (int j = 0; j < 8; j++) y[j] = scale * ((float)point[j] + shift);
#endif
}

// y[0..8) = scale * the eight bytes of `point`, negated where `signs` has a bit.
PG_INLINE void put_signed(float *restrict y, uint64_t point, float scale, uint32_t signs) {
#if defined(__AVX2__)
  const __m256i shift = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  const __m256i minus =
      _mm256_and_si256(_mm256_sllv_epi32(_mm256_set1_epi32((int)signs), shift), _mm256_set1_epi32(INT32_MIN));
  const __m256i p = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)point));
  const __m256 v = _mm256_mul_ps(_mm256_set1_ps(scale), _mm256_cvtepi32_ps(p));
  _mm256_storeu_ps(y, _mm256_xor_ps(v, _mm256_castsi256_ps(minus)));
#else
  for (int j = 0; j < 8; j++) {
    const float v = scale * (float)(int8_t)(point >> 8 * j);
    y[j] = (signs >> j) & 1 ? -v : v;
  }
#endif
}

PG_INLINE void put_point(float *restrict y, const int8_t *point, float scale, uint32_t signs) {
  put_signed(y, load_u64(point), scale, signs);
}

// The same for two points of four elements.
PG_INLINE void put_points(float *restrict y, const int8_t *first, const int8_t *second, float scale, uint32_t signs) {
  put_signed(y, load_u32(first) | (uint64_t)load_u32(second) << 32, scale, signs);
}

// Bytes: d, then for each 32 elements 4 point numbers and a word: 4 sign sets of 7 bits, 4 bits of scale.
static void iq2_xxs_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b);
  for (int s = 0; s < 8; s++) {
    const uint8_t *q = b + 2 + s * 8;
    const uint32_t word = load_u32(q + 4);
    const float dl = d * (0.5f + (float)(int)(word >> 28)) * 0.25f;
    for (int g = 0; g < 4; g++) put_point(y + s * 32 + g * 8, pg_grid_iq2_xxs[q[g]], dl, even_signs(word >> (7 * g)));
  }
}

// Bytes: d, 32 words (9 bits of point, 7 of signs), 8 of scales (4 bits per 16 elements).
static void iq2_xs_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b);
  for (int s = 0; s < 8; s++)
    for (int g = 0; g < 4; g++) {
      const uint16_t word = load_u16(b + 2 + s * 8 + g * 2);
      const float dl = d * (0.5f + (float)((b[66 + s] >> (g / 2 * 4)) & 15)) * 0.25f;
      put_point(y + s * 32 + g * 8, pg_grid_iq2_xs[word & 511], dl, even_signs(word >> 9));
    }
}

// Bytes: d, 32 low bytes of points, 32 sign sets, 8 of high bit pairs of points, 8 of scales (4 bits per 16 elements).
static void iq2_s_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b);
  for (int s = 0; s < 8; s++)
    for (int g = 0; g < 4; g++) {
      const int point = b[2 + s * 4 + g] | ((b[66 + s] >> (g * 2)) & 3) << 8;
      const float dl = d * (0.5f + (float)((b[74 + s] >> (g / 2 * 4)) & 15)) * 0.25f;
      put_point(y + s * 32 + g * 8, pg_grid_iq2_s[point], dl, b[34 + s * 4 + g]);
    }
}

// Bytes: d, 64 points of 4 elements, 8 words for 32 elements each: 4 sign sets of 7 bits for 8, 4 bits of scale.
static void iq3_xxs_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b);
  for (int s = 0; s < 8; s++) {
    const uint8_t *q = b + 2 + s * 8;
    const uint32_t word = load_u32(b + 66 + s * 4);
    const float dl = d * (0.5f + (float)(int)(word >> 28)) * 0.5f;
    for (int g = 0; g < 4; g++)
      put_points(y + s * 32 + g * 8, pg_grid_iq3_xxs[q[g * 2]], pg_grid_iq3_xxs[q[g * 2 + 1]], dl,
                 even_signs(word >> (7 * g)));
  }
}

// Bytes: d, 64 low bytes of points, 8 of their ninth bits, 32 sign sets, 4 of scales (4 bits per 32 elements).
static void iq3_s_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b);
  for (int s = 0; s < 8; s++) {
    const uint8_t *q = b + 2 + s * 8;
    const int high = b[66 + s] << 8;
    const float dl = d * (float)(1 + 2 * ((b[106 + s / 2] >> (s % 2 * 4)) & 15));
    for (int g = 0; g < 4; g++) {
      const int8_t *first = pg_grid_iq3_s[q[g * 2] | (high >> (g * 2) & 256)];
      const int8_t *second = pg_grid_iq3_s[q[g * 2 + 1] | (high >> (g * 2 + 1) & 256)];
      put_points(y + s * 32 + g * 8, first, second, dl, b[74 + s * 4 + g]);
    }
  }
}

// Bytes: d, 32 low bytes of points, 8 words for 32 elements each: 4 x 3 high bits of points, 3 bits of scale, shift's
// sign.
static void iq1_s_decode(const uint8_t *restrict b, float *restrict y) {
  const float d = load_f16(b);
  for (int s = 0; s < 8; s++) {
    const uint16_t word = load_u16(b + 34 + s * 2);
    const float dl = d * (float)(2 * ((word >> 12) & 7) + 1), shift = word & 0x8000 ? -IQ1_SHIFT : IQ1_SHIFT;
    for (int g = 0; g < 4; g++) {
      const int point = b[2 + s * 4 + g] | ((word >> (g * 3)) & 7) << 8;
      put_shifted(y + s * 32 + g * 8, pg_grid_iq1[point], dl, shift);
    }
  }
}

// Bytes: 32 low bytes of points, 16 of nibbles (3 high bits of the point, the shift's sign), 4 words of scales: 4 x 3
// bits (one per 16 elements) under a nibble of d.
static void iq1_m_decode(const uint8_t *restrict b, float *restrict y) {
  const uint16_t bits = iq1_m_d(b);
  const float d = load_f16(&bits);
  for (int s = 0; s < 16; s++) {
    const float dl = d * (float)(2 * ((load_u16(b + 48 + s / 4 * 2) >> (s % 4 * 3)) & 7) + 1);
    for (int g = 0; g < 2; g++) {
      const int nibble = b[32 + s] >> (g * 4);
      put_shifted(y + s * 16 + g * 8, pg_grid_iq1[b[s * 2 + g] | (nibble & 7) << 8], dl,
                  nibble & 8 ? -IQ1_SHIFT : IQ1_SHIFT);
    }
  }
}

// -- encode

static void search_3(const grid *g, const side *of, found *f) { search_grid(g, of, f, 8, 3); }
static void search_8(const grid *g, const side *of, found *f) { search_grid(g, of, f, 4, 8); }

// Searches super-blocks: one, or where sub-blocks have 32 elements, one or two.
static void grid_search(const grid *g, const float *x, const float *weights, int n_blocks, found *f) {
  side of;
  put_side(&of, x, weights, g->sub, n_blocks * 256 / g->sub);
  (g->near->base == 3 ? search_3 : search_8)(g, &of, f);
}

// Magnitudes and signs of n elements. With `even`, the number of negatives per 8 is made even by negating the magnitude
// that matters least.
static void split_signs(const float *x, const float *w, int n, int even, float *mag, uint8_t *signs) {
  for (int i = 0; i < n; i += 8, x += 8, mag += 8) {
    int bits = 0;
    for (int j = 0; j < 8; j++) {
      mag[j] = fabsf(x[j]);
      bits |= (x[j] < 0) << j;
    }
    if (even && __builtin_popcount((unsigned)bits) % 2) {
      int least = 0;
      float matters = INFINITY;
      for (int j = 0; j < 8; j++) {
        const float m = w ? w[i + j] * mag[j] : mag[j];
        least = m < matters ? j : least;
        matters = m < matters ? m : matters;
      }
      bits ^= 1 << least;
      mag[least] = -mag[least];
    }
    signs[i / 8] = (uint8_t)bits;
  }
}

static void grid_search_signed(const grid *g, const float *x, const float *weights, int n_blocks, int even, found *f,
                               uint8_t *signs) {
  float mag[512];
  split_signs(x, weights, n_blocks * 256, even, mag, signs);
  grid_search(g, mag, weights, n_blocks, f);
}

// The levels of IQ2 are 8, 25, 43; those of IQ3_XXS 4, 12, .. 52, 62: rounding to even steps is near enough.
#define IQ2(name, sub) ((grid){pg_near_of(name), 7.75f, 17.5f, sub, 16, 0, 8})

static void iq2_xxs_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  const grid g = IQ2(PG_GRID_IQ2_XXS, 32);
  uint8_t signs[64];
  found f;
  grid_search_signed(&g, x, weights, n_blocks, 1, &f, signs);
  for (int i = 0; i < n_blocks; i++, b += 66) {
    store_f16(b, f.unit[i] * 8);
    for (int s = 0; s < 8; s++) {
      uint32_t word = (uint32_t)f.level[i * 8 + s] << 28;
      for (int k = 0; k < 4; k++) {
        b[2 + s * 8 + k] = (uint8_t)f.point[k][i * 8 + s];
        word |= (uint32_t)(signs[i * 32 + s * 4 + k] & 127) << (7 * k);
      }
      store_u32(b + 2 + s * 8 + 4, word);
    }
  }
}

static void iq2_xs_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  const grid g = IQ2(PG_GRID_IQ2_XS, 16);
  uint8_t signs[32];
  found f;
  grid_search_signed(&g, x, weights, n_blocks, 1, &f, signs);
  store_f16(b, f.unit[0] * 8);
  for (int k = 0; k < 32; k++) store_u16(b + 2 + k * 2, (uint16_t)(f.point[k % 2][k / 2] | (signs[k] & 127) << 9));
  for (int s = 0; s < 8; s++) b[66 + s] = (uint8_t)(f.level[2 * s] | f.level[2 * s + 1] << 4);
}

static void iq2_s_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  const grid g = IQ2(PG_GRID_IQ2_S, 16);
  found f;
  grid_search_signed(&g, x, weights, n_blocks, 0, &f, b + 34);
  store_f16(b, f.unit[0] * 8);
  memset(b + 66, 0, 8);
  for (int k = 0; k < 32; k++) {
    const int point = f.point[k % 2][k / 2];
    b[2 + k] = (uint8_t)point;
    b[66 + k / 4] |= (point >> 8) << (k % 4 * 2);
  }
  for (int s = 0; s < 8; s++) b[74 + s] = (uint8_t)(f.level[2 * s] | f.level[2 * s + 1] << 4);
}

static void iq3_xxs_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  const grid g = {pg_near_of(PG_GRID_IQ3_XXS), 4, 8, 32, 16, 0, 4};
  uint8_t signs[64];
  found f;
  grid_search_signed(&g, x, weights, n_blocks, 1, &f, signs);
  for (int i = 0; i < n_blocks; i++, b += 98) {
    store_f16(b, f.unit[i] * 4);
    for (int k = 0; k < 64; k++) b[2 + k] = (uint8_t)f.point[k % 8][i * 8 + k / 8];
    for (int s = 0; s < 8; s++) {
      uint32_t word = (uint32_t)f.level[i * 8 + s] << 28;
      for (int k = 0; k < 4; k++) word |= (uint32_t)(signs[i * 32 + s * 4 + k] & 127) << (7 * k);
      store_u32(b + 66 + s * 4, word);
    }
  }
}

static void iq3_s_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  const grid g = {pg_near_of(PG_GRID_IQ3_S), 1, 2, 32, 16, 0, 1};
  uint8_t signs[64];
  found f;
  grid_search_signed(&g, x, weights, n_blocks, 0, &f, signs);
  for (int i = 0; i < n_blocks; i++, b += 110) {
    const int *level = f.level + i * 8;
    store_f16(b, f.unit[i]);
    memset(b + 66, 0, 8);
    for (int k = 0; k < 64; k++) {
      const int point = f.point[k % 8][i * 8 + k / 8];
      b[2 + k] = (uint8_t)point;
      b[66 + k / 8] |= (point >> 8) << (k % 8);
    }
    memcpy(b + 74, signs + i * 32, 32);
    for (int s = 0; s < 4; s++) b[106 + s] = (uint8_t)(level[2 * s] | level[2 * s + 1] << 4);
  }
}

static void iq1_s_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  const grid g = {pg_near_of(PG_GRID_IQ1), -1, 1, 32, 8, 1, 1};
  found f;
  grid_search(&g, x, weights, n_blocks, &f);
  for (int i = 0; i < n_blocks; i++, b += 50) {
    store_f16(b, f.unit[i]);
    for (int s = 0; s < 8; s++) {
      int word = f.level[i * 8 + s] << 12 | f.negative[0][i * 8 + s] << 15;
      for (int k = 0; k < 4; k++) {
        const int point = f.point[k][i * 8 + s];
        b[2 + s * 4 + k] = (uint8_t)point;
        word |= (point >> 8) << (3 * k);
      }
      store_u16(b + 34 + s * 2, (uint16_t)word);
    }
  }
}

static void iq1_m_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  const grid g = {pg_near_of(PG_GRID_IQ1), -1, 1, 16, 8, 2, 1};
  found f;
  grid_search(&g, x, weights, n_blocks, &f);
  const int d = pg_f32_to_f16(f.unit[0]);
  memset(b + 32, 0, 16);
  for (int k = 0; k < 32; k++) {
    const int point = f.point[k % 2][k / 2];
    b[k] = (uint8_t)point;
    b[32 + k / 2] |= (point >> 8 | f.negative[k % 2][k / 2] << 3) << (k % 2 * 4);
  }
  for (int i = 0; i < 4; i++) {
    int word = ((d >> (i * 4)) & 15) << 12;
    for (int k = 0; k < 4; k++) word |= f.level[i * 4 + k] << (3 * k);
    store_u16(b + 48 + i * 2, (uint16_t)word);
  }
}

BLOCK_DECODER(iq1_s)
BLOCK_DECODER(iq1_m)
BLOCK_DECODER(iq2_xxs)
BLOCK_DECODER(iq2_xs)
BLOCK_DECODER(iq2_s)
BLOCK_DECODER(iq3_xxs)
BLOCK_DECODER(iq3_s)
SIDE_ENCODER(iq1_s, 2)
SIDE_ENCODER(iq1_m, 1)
SIDE_ENCODER(iq2_xxs, 2)
SIDE_ENCODER(iq2_xs, 1)
SIDE_ENCODER(iq2_s, 1)
SIDE_ENCODER(iq3_xxs, 2)
SIDE_ENCODER(iq3_s, 2)
