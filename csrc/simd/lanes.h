// Lay rows out so that the lanes of a vector are rows; then sums of products do not run across lanes.
#pragma once
#include "kernel.h"

// to[i * lanes + 0..4) = elements i of four rows, lda apart, for i < k.
PG_INLINE void pg_rows_to_lanes(float *to, int64_t lanes, const float *a, int64_t lda, int64_t k) {
  typedef float four __attribute__((vector_size(16), aligned(4)));
  int64_t i = 0;
  for (; i + 4 <= k; i += 4, to += 4 * lanes) {
    const four r0 = *(const four *)(a + i), r1 = *(const four *)(a + lda + i);
    const four r2 = *(const four *)(a + 2 * lda + i), r3 = *(const four *)(a + 3 * lda + i);
    const four p = PG_SHUFFLE(r0, r1, 0, 4, 1, 5), q = PG_SHUFFLE(r2, r3, 0, 4, 1, 5);
    const four s = PG_SHUFFLE(r0, r1, 2, 6, 3, 7), t = PG_SHUFFLE(r2, r3, 2, 6, 3, 7);
    *(four *)to = PG_SHUFFLE(p, q, 0, 1, 4, 5);
    *(four *)(to + lanes) = PG_SHUFFLE(p, q, 2, 3, 6, 7);
    *(four *)(to + 2 * lanes) = PG_SHUFFLE(s, t, 0, 1, 4, 5);
    *(four *)(to + 3 * lanes) = PG_SHUFFLE(s, t, 2, 3, 6, 7);
  }
  for (; i < k; i++, to += lanes)
    for (int64_t r = 0; r < 4; r++) to[r] = a[r * lda + i];
}

// to[i % VF_N * ld + i / VF_N * next + r] = element i of row r, for VF_N rows, nb bytes apart, and i < k.
#if VF_N == 16
PG_INLINE void pg_turn(float *to, int64_t ld, int64_t next, const char *a, int64_t nb, int64_t k) {
  int64_t i = 0;
  for (; i + 16 <= k; i += 16, to += next) {
    __m512i q[4][4]; // elements 4e .. 4e + 3 of rows r, r + 4, r + 8, r + 12: blends while loading spare the one port
                     // that shuffles; all of a cache line is read at once, because rows often share cache sets
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) _Pragma("GCC unroll 4") for (int r = 0; r < 4; r++) {
      const __m128i *row = (const __m128i *)(a + (4 * j + r) * nb + i * 4);
      _Pragma("GCC unroll 4") for (int e = 0; e < 4; e++) {
        const __m128i x = _mm_loadu_si128(row + e);
        q[e][r] = j ? _mm512_mask_broadcast_i32x4(q[e][r], (__mmask16)(0xf << 4 * j), x) : _mm512_broadcast_i32x4(x);
      }
    }
    _Pragma("GCC unroll 4") for (int e = 0; e < 4; e++) {
      const __m512i x = _mm512_unpacklo_epi32(q[e][0], q[e][1]), y = _mm512_unpacklo_epi32(q[e][2], q[e][3]),
                    z = _mm512_unpackhi_epi32(q[e][0], q[e][1]), w = _mm512_unpackhi_epi32(q[e][2], q[e][3]);
      _mm512_storeu_si512(to + (4 * e) * ld, _mm512_unpacklo_epi64(x, y));
      _mm512_storeu_si512(to + (4 * e + 1) * ld, _mm512_unpackhi_epi64(x, y));
      _mm512_storeu_si512(to + (4 * e + 2) * ld, _mm512_unpacklo_epi64(z, w));
      _mm512_storeu_si512(to + (4 * e + 3) * ld, _mm512_unpackhi_epi64(z, w));
    }
  }
  for (; i < k; i++, to += ld)
    for (int64_t r = 0; r < VF_N; r++) memcpy(to + r, a + r * nb + i * 4, sizeof *to);
}
#else
PG_INLINE void pg_turn(float *to, int64_t ld, int64_t next, const char *a, int64_t nb, int64_t k) {
  for (int r = 0; r < VF_N; r += 4)
    for (int64_t i = 0; i < k; i += VF_N)
      pg_rows_to_lanes(to + r + i / VF_N * next, ld, (const float *)(a + r * nb) + i, nb / 4, PG_MIN(VF_N, k - i));
}
#endif
