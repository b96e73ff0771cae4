// Convert floats to bf16. Numbers below its normal range (1e-38) become 0, and those that round beyond it (3.39e38)
// become infinite.
#pragma once
#include "kernel.h"

// 32 numbers, in order.
PG_INLINE __m512i bf16_of(vf low, vf high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// 16 pairs.
PG_INLINE __m512i bf16_pairs(vf even, vf odd) {
  const __m512i turns =
      _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007, 0x180008,
                        0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
  return _mm512_permutexvar_epi16(turns, bf16_of(even, odd));
}

// The rest of x that rounding leaves.
PG_INLINE vf bf16_rest(vf x) {
  const __m512i rounded = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
  return _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(rounded, 16)));
}

// Transpose 16 lines of 16 pairs: the first line of the result has the first pair of each. `step`: bytes between lines.
PG_INLINE void bf16_turn(void *to, int64_t step, const __m512i *lines) {
  __m512i a[16], b[16];
  _Pragma("GCC unroll 8") for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(lines[i], lines[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(lines[i], lines[i + 1]);
  }
  _Pragma("GCC unroll 4") for (int i = 0; i < 16; i += 4) _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) {
    b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
    b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
  }
  // b[4i + j] now has the pairs j, 4 + j, 8 + j, 12 + j of the lines 4i .. 4i + 3.
  _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
    const __m512i low02 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88),
                  low13 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd),
                  high02 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88),
                  high13 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    char *line = (char *)to + j * step;
    _mm512_storeu_si512(line, _mm512_shuffle_i32x4(low02, high02, 0x88));
    _mm512_storeu_si512(line + 4 * step, _mm512_shuffle_i32x4(low13, high13, 0x88));
    _mm512_storeu_si512(line + 8 * step, _mm512_shuffle_i32x4(low02, high02, 0xdd));
    _mm512_storeu_si512(line + 12 * step, _mm512_shuffle_i32x4(low13, high13, 0xdd));
  }
}
