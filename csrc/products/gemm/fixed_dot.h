// What the tiles of fixed.c, fixed_blocks.c and int8.c share; and products of pairs of 16-bit integers.
#pragma once
#include "products/gemm/gemm.h"
#include "products/r16/vec.h"

#define UNROLL _Pragma("GCC unroll 16")

// The place of a tile's results, whose columns lie `ld` apart; and the sums before them, if any, TILE_ROWS apart. Tiles
// take its address: copied as an argument, by vectors, it would have to wait for its parts.
typedef struct target {
  float *to;
  int64_t ld;
  const float (*before)[TILE_ROWS];
} target;

#if VF_N == 4
#elif VF_N == 16
PG_INLINE vi pair(const int16_t *p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return _mm512_set1_epi32(v);
}
PG_INLINE vi dot_pairs(vi sum, vi a, vi b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
#else
PG_INLINE vi pair(const int16_t *p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return _mm256_set1_epi32(v);
}
PG_INLINE vi dot_pairs(vi sum, vi a, vi b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
#endif

// Keep sums in their registers and additions in their order: gcc's own order does not fit the registers.
#if defined(PG_EMULATE) || VF_N == 4
#define STAYS(sum)
#else
#define STAYS(sum) __asm__("" : "+v"(sum))
#endif

// Keep loads and stores in their order: gcc would load what does not fit the registers early.
#define IN_ORDER __asm__ volatile("" : : : "memory")

// sum[j] += two pairs of a panel's rows times two pairs of nt columns, which are `width` apart. Two pairs share the
// instructions that do not multiply: those that prefetch.
PG_INLINE void dot_two_pairs(int nt, vi (*sum)[TILE_VECTORS], const int16_t (*w)[TILE_ROWS][2], const int16_t *x,
                             int width, const r16_fetch *f, fetching *at) {
  fetch_two(f, at);
  UNROLL for (int64_t e = 0; e < 2; e++, x += 2 * width) {
#if VF_N == 4
    int16x8_t first[2], second[2]; // the elements of a pair, of eight rows
    UNROLL for (int i = 0; i < 2; i++) {
      const int16x8x2_t rows = vld2q_s16(w[e][8 * i]);
      first[i] = rows.val[0];
      second[i] = rows.val[1];
    }
    UNROLL for (int j = 0; j < nt; j++) {
      int32_t both;
      memcpy(&both, x + 2 * j, sizeof both);
      const int16x4_t b = (int16x4_t)vdup_n_s32(both);
      UNROLL for (int i = 0; i < 2; i++) {
        int32x4_t low = (int32x4_t)sum[j][2 * i], high = (int32x4_t)sum[j][2 * i + 1];
        low = vmlal_lane_s16(vmlal_lane_s16(low, vget_low_s16(first[i]), b, 0), vget_low_s16(second[i]), b, 1);
        high = vmlal_high_lane_s16(vmlal_high_lane_s16(high, first[i], b, 0), second[i], b, 1);
        sum[j][2 * i] = (vi)low, sum[j][2 * i + 1] = (vi)high;
      }
    }
#else
    const vi w0 = vi_load(w[e][0]), w1 = vi_load(w[e][VF_N]);
    UNROLL for (int j = 0; j < nt; j++) {
      const vi b = pair(x + 2 * j);
      sum[j][0] = dot_pairs(sum[j][0], w0, b);
      STAYS(sum[j][0]);
      sum[j][1] = dot_pairs(sum[j][1], w1, b);
      STAYS(sum[j][1]);
    }
#endif
  }
}

// A function for each number of columns, so that missing columns cost nothing.
#if VF_N == 16
#define EACH_NT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#else
#define EACH_NT(X) X(1) X(2) X(3) X(4)
#endif
