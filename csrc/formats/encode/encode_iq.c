// IQ1_*, IQ2_*, IQ3_*, encoded (layouts: formats/decode_iq.c).
#include "formats/encode/search_grid.h"

static void search_3(const grid *g, const side *of, found *f) { search_grid(g, of, f, 8, 3); }
static void search_8(const grid *g, const side *of, found *f) { search_grid(g, of, f, 4, 8); }

// Searches super-blocks: one, or where sub-blocks have 32 elements, one or two.
static void search(const grid *g, const float *x, const float *weights, int n_blocks, found *f) {
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

static void search_signed(const grid *g, const float *x, const float *weights, int n_blocks, int even, found *f,
                          uint8_t *signs) {
  float mag[512];
  split_signs(x, weights, n_blocks * 256, even, mag, signs);
  search(g, mag, weights, n_blocks, f);
}

// The levels of IQ2 are 8, 25, 43; those of IQ3_XXS 4, 12, .. 52, 62: rounding to even steps is near enough.
#define IQ2(name, sub) ((grid){pg_near_of(name), 7.75f, 17.5f, sub, 16, 0, 8})

static void iq2_xxs_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  const grid g = IQ2(PG_GRID_IQ2_XXS, 32);
  uint8_t signs[64];
  found f;
  search_signed(&g, x, weights, n_blocks, 1, &f, signs);
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
  search_signed(&g, x, weights, n_blocks, 1, &f, signs);
  store_f16(b, f.unit[0] * 8);
  for (int k = 0; k < 32; k++) store_u16(b + 2 + k * 2, (uint16_t)(f.point[k % 2][k / 2] | (signs[k] & 127) << 9));
  for (int s = 0; s < 8; s++) b[66 + s] = (uint8_t)(f.level[2 * s] | f.level[2 * s + 1] << 4);
}

static void iq2_s_encode(const float *x, const float *weights, uint8_t *restrict b, int n_blocks) {
  const grid g = IQ2(PG_GRID_IQ2_S, 16);
  found f;
  search_signed(&g, x, weights, n_blocks, 0, &f, b + 34);
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
  search_signed(&g, x, weights, n_blocks, 1, &f, signs);
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
  search_signed(&g, x, weights, n_blocks, 0, &f, signs);
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
  search(&g, x, weights, n_blocks, &f);
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
  search(&g, x, weights, n_blocks, &f);
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

SIDE_ENCODER(iq1_s, 256, 50, 2)
SIDE_ENCODER(iq1_m, 256, 56, 1)
SIDE_ENCODER(iq2_xxs, 256, 66, 2)
SIDE_ENCODER(iq2_xs, 256, 74, 1)
SIDE_ENCODER(iq2_s, 256, 82, 1)
SIDE_ENCODER(iq3_xxs, 256, 98, 2)
SIDE_ENCODER(iq3_s, 256, 110, 2)
