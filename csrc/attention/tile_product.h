// The product of attention's tiles: each lane of a vector is a column of one factor and of the result, so the sums need
// no operation across lanes. An element of the other factor is broadcast, and multiplied with all lanes.
#pragma once
#include "attention/flash_attn_tile.h"

// Result rows computed at a time, for one and for two registers of lanes: as many sums as fit the registers.
enum { BATCH_1 = VF_N == 16 ? 16 : 8, BATCH_2 = VF_N == 16 ? 12 : VF_N == 8 ? 6 : 4, PART = 4 };

// One factor of a product: element (i, l) is at i * i_step + l * l_step.
typedef struct factor {
  const float *data;
  int64_t i_step, l_step;
} factor;

// What becomes of sums: they replace the result, they are added to it, or they go on from it.
enum sums { SUMS_NEW, SUMS_ADD, SUMS_ON };

// out[i][lanes] = sum over l < n_l of a(i, l) * b[l][lanes]; NV registers of lanes, I rows.
PG_INLINE void tile_product_part(float *out, enum sums how, factor a, const float *b, int64_t n_l, int I, int NV) {
  const int64_t ld = NV * VF_N;
  const float *p[4]; // one address for four rows, because there are few registers for addresses
  vf acc[16][2];
  UNROLL for (int i = 0; i < I; i++) UNROLL for (int v = 0; v < NV; v++) acc[i][v] =
      how == SUMS_ON ? vf_load(out + i * ld + v * VF_N) : vf_zero();
  UNROLL for (int i = 0; i < I; i += 4) p[i / 4] = a.data + i * a.i_step;
  for (int64_t l = 0; l < n_l; l++, b += ld) {
    vf x[2];
    UNROLL for (int v = 0; v < NV; v++) x[v] = vf_load(b + v * VF_N);
    UNROLL for (int i = 0; i < I; i++) {
      const vf y = vf_set1(p[i / 4][i % 4 * a.i_step]);
      UNROLL for (int v = 0; v < NV; v++) acc[i][v] = vf_fma(y, x[v], acc[i][v]);
    }
    UNROLL for (int i = 0; i < I; i += 4) p[i / 4] += a.l_step;
  }
  UNROLL for (int i = 0; i < I; i++) UNROLL for (int v = 0; v < NV; v++) {
    float *o = out + i * ld + v * VF_N;
    vf_store(o, how == SUMS_ADD ? vf_add(vf_load(o), acc[i][v]) : acc[i][v]);
  }
}

// Not inlined: in a larger function the sums would not stay in registers.
#define PRODUCT(name, ...)                                                                                             \
  static __attribute__((noinline)) void name(float *out, enum sums how, const float *a, int64_t step, const float *b,  \
                                             int64_t n_l) {                                                            \
    tile_product_part(out, how, __VA_ARGS__);                                                                          \
  }
#define ALONG (factor){a, step, 1}, b, n_l
#define ACROSS (factor){a, 1, step}, b, n_l
PRODUCT(along_1, ALONG, BATCH_1, 1)
PRODUCT(along_2, ALONG, BATCH_2, 2)
PRODUCT(along_1_part, ALONG, PART, 1)
PRODUCT(along_2_part, ALONG, PART, 2)
PRODUCT(across_1, ACROSS, BATCH_1, 1)
PRODUCT(across_2, ACROSS, BATCH_2, 2)
PRODUCT(across_1_part, ACROSS, PART, 1)
PRODUCT(across_2_part, ACROSS, PART, 2)

// `along`: the sum runs along the rows of a, which lie `step` apart; otherwise across them. n_i is rounded up to a
// multiple of PART; the buffers have room for that.
PG_INLINE void tile_product(float *out, enum sums how, const float *a, int along, int64_t step, const float *b,
                            int64_t n_i, int64_t n_l, fetch f, int NV) {
  const int64_t batch = NV == 1 ? BATCH_1 : BATCH_2, ld = NV * VF_N;
  n_i = (n_i + PART - 1) / PART * PART;
  for (int64_t i = 0, n; i < n_i; i += n) {
    const int64_t rest = n_i - i;
    n = rest >= batch && (batch % PART == 0 || rest != 2 * PART) ? batch : PART;
    const float *p = a + (along ? i * step : i);
    float *o = out + i * ld;
    fetch_up_to(&f, i + n, n_i);
    if (n == batch)
      (along ? NV == 1 ? along_1 : along_2 : NV == 1 ? across_1 : across_2)(o, how, p, step, b, n_l);
    else
      (along     ? NV == 1 ? along_1_part : along_2_part
       : NV == 1 ? across_1_part
                 : across_2_part)(o, how, p, step, b, n_l);
  }
}

// Result rows of tile_dots computed at a time: there are three sums for each.
enum { DOTS_1 = VF_N == 16 ? 8 : 4, DOTS_2 = VF_N == 16 ? 4 : 2 };

// out[i][lanes] = the product of row i of a and the columns b[..][lanes], of d elements, in the order that
// vf_sum4_in_turn makes: elements that are VF_N apart make a sum, four of these make one, and these are added up.
PG_INLINE void tile_dots_part(float *out, const float *a, int64_t step, const float *b, int64_t d, int I, int NV) {
  const int64_t ld = NV * VF_N;
  vf all[8][2];
  UNROLL for (int i = 0; i < I; i++) UNROLL for (int v = 0; v < NV; v++) all[i][v] = vf_zero();
  for (int64_t first = 0; first < VF_N; first += 4) {
    vf four[8][2];
    UNROLL for (int j = 0; j < 4; j++) {
      vf acc[8][2];
      const float *p = a + first + j, *q = b + (first + j) * ld;
      UNROLL for (int i = 0; i < I; i++) UNROLL for (int v = 0; v < NV; v++) acc[i][v] = vf_zero();
      for (int64_t l = first + j; l < d; l += VF_N, p += VF_N, q += VF_N * ld) {
        vf x[2];
        UNROLL for (int v = 0; v < NV; v++) x[v] = vf_load(q + v * VF_N);
        UNROLL for (int i = 0; i < I; i++) {
          const vf y = vf_set1(p[i * step]);
          UNROLL for (int v = 0; v < NV; v++) acc[i][v] = vf_fma(y, x[v], acc[i][v]);
        }
      }
      UNROLL for (int i = 0; i < I; i++) UNROLL for (int v = 0; v < NV; v++) four[i][v] =
          j ? vf_add(four[i][v], acc[i][v]) : acc[i][v];
    }
    UNROLL for (int i = 0; i < I; i++) UNROLL for (int v = 0; v < NV; v++) all[i][v] = all[i][v] + four[i][v];
  }
  UNROLL for (int i = 0; i < I; i++) UNROLL for (int v = 0; v < NV; v++) vf_store(out + i * ld + v * VF_N, all[i][v]);
}

static __attribute__((noinline)) void dots_1(float *out, const float *a, int64_t step, const float *b, int64_t d) {
  tile_dots_part(out, a, step, b, d, DOTS_1, 1);
}

static __attribute__((noinline)) void dots_2(float *out, const float *a, int64_t step, const float *b, int64_t d) {
  tile_dots_part(out, a, step, b, d, DOTS_2, 2);
}

// n rows of a, rounded up to a multiple of DOTS_1 or DOTS_2; the buffers have room for that.
PG_INLINE void tile_dots(float *out, const float *a, int64_t step, const float *b, int64_t n, int64_t d, fetch f,
                         int NV) {
  const int64_t some = NV == 1 ? DOTS_1 : DOTS_2;
  for (int64_t i = 0; i < n; i += some) {
    fetch_up_to(&f, i + some, n);
    (NV == 1 ? dots_1 : dots_2)(out + i * NV * VF_N, a + i * step, step, b, d);
  }
}
