// Unpack rows as they are stored, VF_N at a time, to codes and scales of R16 (r16.h) in registers, whose lanes are
// rows. pack.c does the same once; this is for products that read stored weights (passing.c).
#pragma once
#include "formats/iq_grids.h"
#include "products/r16/stored.h"
#include "products/r16/vec.h"

#define UNROLL _Pragma("GCC unroll 16")

typedef uint8_t row_bytes __attribute__((vector_size(4 * VF_N)));
typedef uint8_t four_rows __attribute__((vector_size(16)));

#if VF_N == 16
#define OF(name) _mm512_##name
#elif VF_N == 8
#define OF(name) _mm256_##name
#endif

// The places of the rows of a part: the address of every fourth row, and the distance to the next three, because 16
// addresses would not fit the CPU's registers.
typedef struct source {
  const uint8_t *fourth[VF_N / 4];
  int64_t one, three;
} source;

PG_INLINE source source_of(const uint8_t *first, int64_t stride) {
  source b = {.one = stride, .three = 3 * stride};
  UNROLL for (int i = 0; i < VF_N / 4; i++) {
    b.fourth[i] = first + 4 * i * stride;
    __asm__("" : "+r"(b.fourth[i])); // kept in a register instead of being computed again
  }
  __asm__("" : "+r"(b.three));
  return b;
}

PG_INLINE const void *row_at(const source *b, int r, int at) {
  const uint8_t *p = b->fourth[r / 4] + at;
  return r % 4 == 3 ? p + b->three : p + r % 4 * b->one;
}

// Load four dwords of each row from byte `at` on.
#if VF_N == 4
PG_INLINE void load_4(rows *q, const source *b, int at) {
  rows a[4];
  UNROLL for (int i = 0; i < 4; i++) memcpy(a + i, row_at(b, i, at), sizeof *a);
  const rows x = PG_SHUFFLE(a[0], a[1], 0, 4, 1, 5), y = PG_SHUFFLE(a[2], a[3], 0, 4, 1, 5);
  const rows z = PG_SHUFFLE(a[0], a[1], 2, 6, 3, 7), w = PG_SHUFFLE(a[2], a[3], 2, 6, 3, 7);
  q[0] = PG_SHUFFLE(x, y, 0, 1, 4, 5), q[1] = PG_SHUFFLE(x, y, 2, 3, 6, 7);
  q[2] = PG_SHUFFLE(z, w, 0, 1, 4, 5), q[3] = PG_SHUFFLE(z, w, 2, 3, 6, 7);
}
#else
PG_INLINE __m128i load_row(const source *b, int r, int at) {
  return _mm_loadu_si128((const __m128i *)row_at(b, r, at));
}

PG_INLINE void load_4(rows *q, const source *b, int at) {
  vi a[4];
#if VF_N == 16
  UNROLL for (int i = 0; i < 4; i++) { // blends while loading, because only one port shuffles
    a[i] = _mm512_broadcast_i32x4(load_row(b, i, at));
    a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x00f0, load_row(b, 4 + i, at));
    a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x0f00, load_row(b, 8 + i, at));
    a[i] = _mm512_mask_broadcast_i32x4(a[i], 0xf000, load_row(b, 12 + i, at));
  }
#else
  UNROLL for (int i = 0; i < 4; i++) a[i] =
      _mm256_inserti128_si256(_mm256_castsi128_si256(load_row(b, i, at)), load_row(b, 4 + i, at), 1);
#endif
  const vi x = OF(unpacklo_epi32)(a[0], a[1]), y = OF(unpacklo_epi32)(a[2], a[3]);
  const vi z = OF(unpackhi_epi32)(a[0], a[1]), w = OF(unpackhi_epi32)(a[2], a[3]);
  q[0] = (rows)OF(unpacklo_epi64)(x, y), q[1] = (rows)OF(unpackhi_epi64)(x, y);
  q[2] = (rows)OF(unpacklo_epi64)(z, w), q[3] = (rows)OF(unpackhi_epi64)(z, w);
}
#endif
PG_INLINE void load_8(rows *q, const source *b, int at) {
  load_4(q, b, at);
  load_4(q + 4, b, at + 16);
}

// Load the word at byte `at` of a block of `bytes` bytes, without reading beyond the block. Bits above 16 are
// undefined.
PG_INLINE rows load_word(const source *b, int bytes, int at) {
  const int first = PG_MIN(at, bytes - 16);
  rows q[4];
  load_4(q, b, first);
  return q[(at - first) / 4] >> (at - first) % 4 * 8;
}

// Subtract 32 from bytes below 64, without borrowing from the next byte.
#define LESS_32(v) ((((v) | BYTES(0x80)) - BYTES(32)) ^ BYTES(0x80))

// n bits of each byte of a from bit `from` on, moved to bit `to`.
PG_INLINE rows bits(rows a, int from, int n, int to) {
  return (from > to ? a >> (from - to) : a << (to - from)) & BYTES(((1u << n) - 1) << to);
}

// `value` in each byte of quartet p whose bit of h, which has one for each element, is set.
PG_INLINE rows where_set(rows h, int p, uint32_t value) {
  const int i = p / 2;
  const four_rows byte = {i,     i,     i,     i,     4 + i,  4 + i,  4 + i,  4 + i,
                          8 + i, 8 + i, 8 + i, 8 + i, 12 + i, 12 + i, 12 + i, 12 + i};
#if VF_N == 4
  const rows v = (rows)vqtbl1q_u8((vi)h, byte);
#elif VF_N == 16
  const rows v = (rows)_mm512_shuffle_epi8((vi)h, _mm512_broadcast_i32x4((__m128i)byte));
#else
  const rows v = (rows)_mm256_shuffle_epi8((vi)h, _mm256_broadcastsi128_si256((__m128i)byte));
#endif
  const row_bytes one = (row_bytes)((rows){0} + (0x08040201u << p % 2 * 4));
  return (rows)(((row_bytes)v & one) == one) & BYTES(value);
}

// `value` in each byte of the rows whose bit `bit` of h is set.
PG_INLINE rows if_set(rows h, int bit, uint32_t value) {
  return (rows)((signed_rows)(h << (31 - bit)) >> 31) & BYTES(value);
}

// Four sets of signs, seven bits each, from bit 0 of w on. The number of negatives is even, so the eighth sign is the
// parity.
PG_INLINE rows even_signs_4(rows w) {
  const rows y = (w & 0x7f) | (w << 1 & 0x7f00) | (w << 2 & 0x7f0000) | (w << 3 & 0x7f000000);
  rows p = y ^ y >> 4;
  p ^= p >> 2;
  p ^= p >> 1;
  return y | bits(p, 0, 1, 7);
}

// Four bytes each of the points of a grid, from byte `at` on; a point has `size`, a constant.
#if VF_N == 16
#define POINTS(grid, size, index, at) ((rows)_mm512_i32gather_epi32((vi)(index), (const int8_t *)(grid) + (at), size))
#elif VF_N == 4
PG_INLINE rows points_of(const void *grid, int size, rows index) {
  rows v;
  UNROLL for (int i = 0; i < 4; i++) {
    uint32_t point;
    memcpy(&point, (const char *)grid + (int64_t)index[i] * size, sizeof point);
    v[i] = point;
  }
  return v;
}
#define POINTS(grid, size, index, at) points_of((const int8_t *)(grid) + (at), size, index)
#else
#define POINTS(grid, size, index, at)                                                                                  \
  ((rows)_mm256_i32gather_epi32((const int *)((const int8_t *)(grid) + (at)), (vi)(index), size))
#endif

// Store bytes 0 .. 3 of each row to four places.
PG_INLINE void put_4_scales(uint8_t *const to[4], rows v) {
#if VF_N == 4
  v = (rows)vqtbl1q_u8((vi)v, (vi){0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15});
#elif VF_N == 16
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)),
                order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i by_lane = _mm512_shuffle_epi8((__m512i)v, bytes); // each byte of four rows in one dword
  v = (rows)_mm512_castps_si512(_mm512_permutexvar_ps(order, _mm512_castsi512_ps(by_lane)));
#else
  const __m256i bytes =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  v = (rows)_mm256_permutevar8x32_epi32(_mm256_shuffle_epi8((__m256i)v, bytes),
                                        _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#endif
  UNROLL for (int i = 0; i < 4; i++) memcpy(to[i], (const uint8_t *)&v + i * VF_N, VF_N);
}

// -- a type: the beginning of a block, and the codes of unit u in stretch s (a few units that share loads)

// Codes, not yet masked. `low` has their low bits (those in the first lines of the format) from bit low_from on, `high`
// the bits above from bit high_from on.
typedef struct codes {
  rows low[R16_QUARTETS], high[R16_QUARTETS];
  int low_from, high_from;
} codes;

typedef struct piece { // values kept from one unit to the next
  rows q[8], other[8], more[8];
} piece;

typedef struct places { // of scales: the place of the first unit, and the distance to the next
  uint8_t *first;
  int apart;
} places;

typedef void (*begin_fn)(const source *b, piece *t, places to);
typedef void (*codes_fn)(const source *b, int s, int u, piece *t, codes *q, places to); // *q: zeros

#define BEGIN(name) PG_INLINE void begin_##name(const source *b, piece *t, places to)
#define CODES(name) PG_INLINE void codes_##name(const source *b, int s, int u, piece *t, codes *q, places to)
#define EACH_QUARTET(p) UNROLL for (int p = 0; p < R16_QUARTETS; p++)
#define EACH_POINT(g) UNROLL for (int g = 0; g < 4; g++)

// The first or second scale of four units; both scales of two units.
#define SCALE(n, which) (to.first + (n)*to.apart + (which)*R16_ROWS)
#define OF_4_UNITS(n, which, step)                                                                                     \
  ((uint8_t *[]){SCALE(n, which), SCALE(n + step, which), SCALE(n + 2 * step, which), SCALE(n + 3 * step, which)})
#define OF_2_UNITS(n) ((uint8_t *[]){SCALE(n, 0), SCALE(n, 1), SCALE(n + 1, 0), SCALE(n + 1, 1)})

// Blocks of 32: element j below element j + 16; fifth bits are a word with one for each element.
PG_INLINE void nibbles_32(codes *q, const source *b, int at) {
  load_4(q->low, b, at);
  UNROLL for (int i = 0; i < 4; i++) q->low[4 + i] = q->low[i] >> 4;
}
PG_INLINE void fifth_32(codes *q, const source *b, int at) {
  rows h[4];
  load_4(h, b, at);
  EACH_QUARTET(p) q->high[p] = where_set(h[0], p, 1);
}
PG_INLINE void put_low(codes *q, const rows *from, int bit) {
  EACH_QUARTET(p) q->low[p] = from[p];
  q->low_from = bit;
}
PG_INLINE void put_high(codes *q, const rows *from, int bit) {
  EACH_QUARTET(p) q->high[p] = from[p];
  q->high_from = bit;
}

CODES(Q4_0) { nibbles_32(q, b, 2); }
CODES(Q4_1) { nibbles_32(q, b, 4); }
CODES(Q5_0) {
  nibbles_32(q, b, 6);
  fifth_32(q, b, 2);
}
CODES(Q5_1) {
  nibbles_32(q, b, 8);
  fifth_32(q, b, 4);
}
CODES(Q8_0) {
  load_8(q->low, b, 2);
  EACH_QUARTET(p) q->low[p] ^= BYTES(0x80);
}
CODES(IQ4_NL) { nibbles_32(q, b, 2); }
BEGIN(MXFP4) { put_bytes(SCALE(0, 0), load_word(b, 17, 0) ^ 0x80); }
CODES(MXFP4) { nibbles_32(q, b, 1); }

// Blocks of 64: nibbles j and j + 8 share byte j.
BEGIN(NVFP4) {
  const row_bytes s = (row_bytes)load_word(b, 36, 0);
  put_4_scales(OF_2_UNITS(0), (rows)(s & 0x7f & ~(row_bytes)(s == 0x7f)));
}
CODES(NVFP4) {
  rows a[4];
  load_4(a, b, 4 + 16 * u);
  UNROLL for (int p = 0; p < 8; p++) q->low[p] = a[p / 4 * 2 + p % 2] >> p / 2 % 2 * 4;
}

// Blocks of 256, as formats/k.c and formats/lut.c describe them.

BEGIN(Q2_K) {
  rows v[4];
  load_4(v, b, 0);
  UNROLL for (int i = 0; i < 4; i++) put_4_scales(OF_2_UNITS(2 * i), v[i]);
}
CODES(Q2_K) {
  if (u == 0) load_8(t->q, b, 16 + s * 32);
  put_low(q, t->q, u * 2);
}

BEGIN(Q3_K) {
  rows d[4];
  load_4(d, b, 94); // loaded from two bytes earlier: the block may end behind d
  const rows low[2] = {d[0] >> 16 | d[1] << 16, d[1] >> 16 | d[2] << 16}, top = d[2] >> 16 | d[3] << 16;
  UNROLL for (int i = 0; i < 4; i++) {
    const rows v = bits(low[i % 2], i / 2 * 4, 4, 0) | bits(top, 2 * i, 2, 4);
    put_4_scales(OF_2_UNITS(2 * i), LESS_32(v));
  }
  load_8(t->more, b, 0);
}
CODES(Q3_K) {
  if (u == 0) load_8(t->q, b, 32 + s * 32);
  put_low(q, t->q, u * 2);
  put_high(q, t->more, u);
  if (u == 3) EACH_QUARTET(p) t->more[p] >>= 4;
}

// Scales and minima of four units each, as formats/block_k.h has them, after d and m.
PG_INLINE void scales_mins(const source *b, places to) {
  rows q[4];
  load_4(q, b, 0);
  put_4_scales(OF_4_UNITS(0, 0, 1), q[1] & BYTES(63));
  put_4_scales(OF_4_UNITS(4, 0, 1), (q[3] & BYTES(15)) | bits(q[1], 6, 2, 4));
  put_4_scales(OF_4_UNITS(0, 1, 1), q[2] & BYTES(63));
  put_4_scales(OF_4_UNITS(4, 1, 1), bits(q[3], 4, 4, 0) | bits(q[2], 6, 2, 4));
}

BEGIN(Q4_K) { scales_mins(b, to); }
CODES(Q4_K) {
  if (u == 0) load_8(t->q, b, 16 + s * 32);
  put_low(q, t->q, u * 4);
}

BEGIN(Q5_K) {
  scales_mins(b, to);
  load_8(t->more, b, 16);
}
CODES(Q5_K) {
  if (u == 0) load_8(t->q, b, 48 + s * 32);
  put_low(q, t->q, u * 4);
  put_high(q, t->more, u);
  if (u == 1) EACH_QUARTET(p) t->more[p] >>= 2;
}

BEGIN(Q6_K) {
  rows v[4];
  load_4(v, b, 192);
  UNROLL for (int i = 0; i < 4; i++) put_4_scales(OF_2_UNITS(2 * i), v[i]);
}
CODES(Q6_K) { // units u and u + 2 of a half share bytes
  if (u == 0) load_8(t->more, b, 128 + s * 32);
  if (u < 2) load_8(u ? t->other : t->q, b, s * 64 + u * 32);
  put_low(q, u % 2 ? t->other : t->q, u / 2 * 4);
  put_high(q, t->more, u * 2);
}

BEGIN(IQ4_XS) {
  rows head[4];
  load_4(head, b, 0);
  UNROLL for (int i = 0; i < 2; i++) { // four bytes of a nibble and, above it, two bits each; less 32
    rows v = {0};
    UNROLL for (int n = 4 * i; n < 4 * i + 4; n++) v |= ((head[1] >> (4 * n) & 15) | (head[0] >> (16 + 2 * n) & 3) << 4)
                                                        << 8 * (n % 4);
    put_4_scales(OF_4_UNITS(4 * i, 0, 1), LESS_32(v));
  }
}
CODES(IQ4_XS) { nibbles_32(q, b, 8 + s * 16); }

CODES(TQ2_0) {
  if (u == 0) load_8(t->q, b, s * 32);
  put_low(q, t->q, u * 2);
}

// Bytes are fractions of 256 in base 3. Get the first trit of each byte; then the others.
PG_INLINE rows first_trit(rows v) {
  const row_bytes x = (row_bytes)v;
  return (rows)(-(row_bytes)(x > 85) - (row_bytes)(x > 170));
}
PG_INLINE rows next_trits(rows v) {
  const row_bytes x = (row_bytes)v;
  return (rows)(x + x + x);
}

BEGIN(TQ1_0) {
  load_8(t->q, b, 0);
  load_4(t->more, b, 32);
  t->more[4] = load_word(b, 54, 48) & 0xffff;
  t->more[4] |= load_word(b, 54, 50) << 16;
}
CODES(TQ1_0) { // trit u of 32 bytes; then two or one of 16 bytes each; at last four of four bytes
  EACH_QUARTET(p) {
    rows *from = u < 5 ? t->q + p : u == 7 && p > 3 ? t->more + 4 : t->more + p % 4;
    q->low[p] = first_trit(*from);
    *from = next_trits(*from);
  }
}

// Grids, as formats/iq.c describes them: a code is the bits of an element that number its levels and, above
// them, its sign.

// Put the quartets of point g, which has eight elements.
#define PUT_POINT_8(g, grid, index, sign)                                                                              \
  UNROLL for (int h = 0; h < 2; h++) q->low[2 * (g) + h] = POINTS(grid, 8, index, 4 * h), q->high[2 * (g) + h] = sign

// Odd scales: twice and one more.
#define ODD(v) ((v) << 1 | BYTES(1))

BEGIN(IQ1_S) {
  load_4(t->more, b, 34);
  UNROLL for (int i = 0; i < 2; i++) {
    rows v = {0};
    UNROLL for (int j = 0; j < 4; j++) v |= (t->more[2 * i + j / 2] >> (12 + j % 2 * 16) & 7) << 8 * j;
    put_4_scales(OF_4_UNITS(4 * i, 0, 1), ODD(v));
  }
}
CODES(IQ1_S) {
  if (u == 0) load_4(t->q, b, 2 + s * 16);
  const rows word = t->more[u / 2] >> u % 2 * 16, sign = if_set(word, 15, 1);
  EACH_POINT(g) {
    const rows index = (t->q[u] >> 8 * g & 255) | (word >> 3 * g & 7) << 8;
    PUT_POINT_8(g, pg_grid_iq1, index, sign);
  }
  if (u == 3) t->more[0] = t->more[2], t->more[1] = t->more[3];
}

BEGIN(IQ1_M) {
  rows v[4];
  load_4(v, b, 40);
  UNROLL for (int i = 0; i < 4; i++) {
    const rows word = v[2 + i / 2] >> i % 2 * 16;
    rows four = {0};
    UNROLL for (int j = 0; j < 4; j++) four |= (word >> 3 * j & 7) << 8 * j;
    put_4_scales(OF_2_UNITS(2 * i), ODD(four));
  }
  load_4(t->more, b, 32);
}
CODES(IQ1_M) {
  if (u == 0) load_4(t->q, b, s * 16);
  const rows h = t->more[u / 2] >> u % 2 * 16;
  EACH_POINT(g) {
    const rows index = (t->q[u] >> 8 * g & 255) | (h >> 4 * g & 7) << 8, sign = if_set(h, 4 * g + 3, 1);
    PUT_POINT_8(g, pg_grid_iq1, index, sign);
  }
  if (u == 3) t->more[0] = t->more[2], t->more[1] = t->more[3];
}

CODES(IQ2_XXS) {
  if (u == 0) load_4(t->q, b, 2 + s * 16);
  const rows points = t->q[2 * u], word = t->q[2 * u + 1], signs = even_signs_4(word);
  put_bytes(SCALE(2 * s + u, 0), word >> 28 << 1 | 1);
  EACH_POINT(g) PUT_POINT_8(g, pg_grid_iq2_xxs, points >> 8 * g & 255, where_set(signs, 2 * g + h, 1));
  q->low_from = 4;
}

// Two scales in the nibbles of a byte of each unit.
PG_INLINE void nibble_scales_8(rows low, rows high, places to) {
  put_4_scales(OF_4_UNITS(0, 0, 1), ODD(low & BYTES(15)));
  put_4_scales(OF_4_UNITS(0, 1, 1), ODD(bits(low, 4, 4, 0)));
  put_4_scales(OF_4_UNITS(4, 0, 1), ODD(high & BYTES(15)));
  put_4_scales(OF_4_UNITS(4, 1, 1), ODD(bits(high, 4, 4, 0)));
}

BEGIN(IQ2_XS) {
  rows v[4];
  load_4(v, b, 58);
  nibble_scales_8(v[2], v[3], to);
}
CODES(IQ2_XS) {
  if (u == 0) load_4(t->q, b, 2 + s * 16);
  const rows a = t->q[2 * u], c = t->q[2 * u + 1];
  const rows signs = even_signs_4((a >> 9 & 127) | (a >> 25) << 7 | (c >> 9 & 127) << 14 | (c >> 25) << 21);
  EACH_POINT(g) {
    const rows index = (g < 2 ? a : c) >> g % 2 * 16 & 511;
    PUT_POINT_8(g, pg_grid_iq2_xs, index, where_set(signs, 2 * g + h, 1));
  }
  q->low_from = 4;
}

BEGIN(IQ2_S) {
  load_4(t->more + 4, b, 66);
  nibble_scales_8(t->more[6], t->more[7], to);
}
CODES(IQ2_S) {
  const int n = s % 4;
  if (n == 0) {
    load_4(t->q, b, 2 + s * 4);
    load_4(t->more, b, 34 + s * 4);
  }
  const rows top = t->more[4] >> 8 * n;
  EACH_POINT(g) {
    const rows index = (t->q[n] >> 8 * g & 255) | (top >> 2 * g & 3) << 8;
    PUT_POINT_8(g, pg_grid_iq2_s, index, where_set(t->more[n], 2 * g + h, 1));
  }
  q->low_from = 4;
  if (n == 3) t->more[4] = t->more[5];
}

CODES(IQ3_XXS) {
  if (u == 0) load_4(t->more, b, 66 + s * 16);
  if (u % 2 == 0) load_4(t->q, b, 2 + s * 32 + u * 8);
  const rows word = t->more[u], signs = even_signs_4(word);
  put_bytes(SCALE(4 * s + u, 0), word >> 28 << 1 | 1);
  EACH_QUARTET(p) {
    const rows index = t->q[u % 2 * 2 + p / 4] >> p % 4 * 8 & 255;
    q->low[p] = bits(POINTS(pg_grid_iq3_xxs, 4, index, 0), 3, 3, 0) | where_set(signs, p, 8);
  }
}

BEGIN(IQ3_S) {
  rows v[4];
  load_4(v, b, 94);
  put_4_scales(OF_4_UNITS(0, 0, 2), ODD(v[3] & BYTES(15)));
  put_4_scales(OF_4_UNITS(1, 0, 2), ODD(bits(v[3], 4, 4, 0)));
  load_4(t->more + 4, b, 66);
}
CODES(IQ3_S) {
  if (u == 0) load_4(t->more, b, 74 + s * 16);
  if (u % 2 == 0) load_4(t->q, b, 2 + s * 32 + u * 8);
  EACH_QUARTET(p) {
    const rows index = (t->q[u % 2 * 2 + p / 4] >> p % 4 * 8 & 255) | (t->more[4] >> (8 * u + p) & 1) << 8;
    q->low[p] = bits(POINTS(pg_grid_iq3_s, 4, index, 0), 1, 3, 0) | where_set(t->more[u], p, 8);
  }
  if (u == 3) t->more[4] = t->more[5];
}
