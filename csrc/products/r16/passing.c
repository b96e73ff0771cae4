// Stored rows -> R16 (r16.h) in passing, VF_N rows at a time: what pack.c does once, done each time a product reads its
// weights as they are stored. So it has the lanes of the instruction set, and asks for rows before it needs them. Types
// that are looked up go to pack.c, as does a last group that is not full.
#include "products/r16/repacked.h"
#include "products/r16/stored.h"
#include "products/r16/vec.h"

enum { PARTS = R16_ROWS / VF_N, AHEAD = 512 };

#define UNROLL _Pragma("GCC unroll 16")
#define EACH_ROW(r) UNROLL for (int r = 0; r < VF_N; r++)

typedef uint32_t rows __attribute__((vector_size(4 * VF_N))); // four bytes of each row of a part

// Where the rows of a part are: every fourth, and how far the next three are from it. So a row is one address to the
// CPU: 16 of them would not fit its registers.
typedef struct source {
  const uint8_t *fourth[VF_N / 4];
  int64_t one, three;
  int64_t ahead; // bytes from here to those to fetch
  int bytes;     // of a block
} source;

PG_INLINE source source_of(const uint8_t *first, int64_t stride) {
  source b = {.one = stride, .three = 3 * stride};
  UNROLL for (int i = 0; i < VF_N / 4; i++) {
    b.fourth[i] = first + 4 * i * stride;
    __asm__("" : "+r"(b.fourth[i])); // not to be worked out again
  }
  __asm__("" : "+r"(b.three));
  return b;
}

PG_INLINE const uint8_t *row_of(const source *b, int r) {
  const uint8_t *p = b->fourth[r / 4];
  return r % 4 == 3 ? p + b->three : p + r % 4 * b->one;
}

PG_INLINE __m256i load_2(const source *b, int r, int at) { // 16 bytes each of rows r and r + 4
  const __m128i low = _mm_loadu_si128((const __m128i *)(row_of(b, r) + at));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_loadu_si128((const __m128i *)(row_of(b, r + 4) + at)),
                                 1);
}

// The four dwords of each row from byte `at` on.
PG_INLINE void load_4(rows *q, const source *b, int at) {
  vi a[4];
#if VF_N == 16
  UNROLL for (int i = 0; i < 4; i++) a[i] =
      _mm512_inserti64x4(_mm512_castsi256_si512(load_2(b, i, at)), load_2(b, 8 + i, at), 1);
#define OF(name) _mm512_##name
#else
  UNROLL for (int i = 0; i < 4; i++) a[i] = load_2(b, i, at);
#define OF(name) _mm256_##name
#endif
  const vi x = OF(unpacklo_epi32)(a[0], a[1]), y = OF(unpacklo_epi32)(a[2], a[3]);
  const vi z = OF(unpackhi_epi32)(a[0], a[1]), w = OF(unpackhi_epi32)(a[2], a[3]);
  q[0] = (rows)OF(unpacklo_epi64)(x, y), q[1] = (rows)OF(unpackhi_epi64)(x, y);
  q[2] = (rows)OF(unpacklo_epi64)(z, w), q[3] = (rows)OF(unpackhi_epi64)(z, w);
#undef OF
}
PG_INLINE void load_8(rows *q, const source *b, int at) {
  load_4(q, b, at);
  load_4(q + 4, b, at + 16);
}

// Bytes below 64 less 32: nothing is borrowed.
#define LESS_32(v) ((((v) | BYTES(0x80)) - BYTES(32)) ^ BYTES(0x80))

// n bits of each byte of a from bit `from` on, moved to bit `to`.
PG_INLINE rows bits(rows a, int from, int n, int to) {
  return (from > to ? a >> (from - to) : a << (to - from)) & BYTES(((1u << n) - 1) << to);
}

// Where a unit's lines and scales of this part go.
typedef struct place {
  uint8_t *line, *scale;
} place;

PG_INLINE void put_line(place to, int line, rows v) { memcpy(to.line + line * R16_LINE, &v, sizeof v); }

// Lines of codes from the 32 bytes of each row in q: nibbles at bit `from` of each, crumbs, single bits.
PG_INLINE void put_nibbles(place to, const rows *q, int from) {
  UNROLL for (int i = 0; i < 4; i++) put_line(to, i, bits(q[2 * i], from, 4, 0) | bits(q[2 * i + 1], from, 4, 4));
}
PG_INLINE void put_crumbs(place to, int line, const rows *q, int from) {
  UNROLL for (int j = 0; j < 2; j++) {
    rows v = bits(q[4 * j], from, 2, 0);
    UNROLL for (int i = 1; i < 4; i++) v |= bits(q[4 * j + i], from, 2, 2 * i);
    put_line(to, line + j, v);
  }
}
PG_INLINE void put_bits(place to, int line, const rows *q, int from) {
  rows v = bits(q[0], from, 1, 0);
  UNROLL for (int p = 1; p < R16_QUARTETS; p++) v |= bits(q[p], from, 1, p);
  put_line(to, line, v);
}
// Nibbles of 16 bytes: element j below element j + 16.
PG_INLINE void put_nibbles_32(place to, const rows *q) {
  UNROLL for (int i = 0; i < 4; i++) {
    const rows *pair = q + i % 2 * 2;
    put_line(to, i, bits(pair[0], i / 2 * 4, 4, 0) | bits(pair[1], i / 2 * 4, 4, 4));
  }
}

// The bytes 0 .. 3 of each row to four places.
PG_INLINE void put_4_scales(uint8_t *const to[4], rows v) {
#if VF_N == 16
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

// Unit n of a block of eight asks for what comes later in its share of the rows: all at once would wait for memory.
PG_INLINE void fetch(const source *b, int n) {
  enum { SHARE = VF_N / 8 };
  UNROLL for (int r = n * SHARE; r < (n + 1) * SHARE; r++) UNROLL for (int i = 0; i < b->bytes; i += 64)
      __builtin_prefetch(row_of(b, r) + b->ahead + i);
}

// A block of the rows of a part -> its units, `unit_bytes` apart from `to` on.
#define TAKE(name) PG_INLINE void take_##name(const source *b, int unit_bytes, place to)
#define EACH_UNIT(n) UNROLL for (int n = 0; n < 8; n++)
#define UNIT(n) ((place){to.line + (n)*unit_bytes, to.scale + (n)*unit_bytes})
#define SCALE(n, which) (to.scale + (n)*unit_bytes + (which)*R16_ROWS) // of unit n
// The first or second scale of each of four units; both scales of two units.
#define OF_4_UNITS(n, which)                                                                                           \
  ((uint8_t *[]){SCALE(n, which), SCALE(n + 1, which), SCALE(n + 2, which), SCALE(n + 3, which)})
#define OF_2_UNITS(n) ((uint8_t *[]){SCALE(n, 0), SCALE(n, 1), SCALE(n + 1, 0), SCALE(n + 1, 1)})

TAKE(Q4_0) {
  rows q[4];
  load_4(q, b, 2);
  put_nibbles_32(to, q);
}
TAKE(Q4_1) {
  rows q[4];
  load_4(q, b, 4);
  put_nibbles_32(to, q);
}
TAKE(IQ4_NL) { take_Q4_0(b, unit_bytes, to); }
TAKE(MXFP4) {
  rows q[4];
  load_4(q, b, 1);
  put_nibbles_32(to, q);
  EACH_ROW(r) to.scale[r] = *row_of(b, r) ^ 0x80;
}

// Fifth bits: bit j of a word belongs to element j.
PG_INLINE void put_fifth(place to, rows h) {
  rows v = {0};
  UNROLL for (int p = 0; p < R16_QUARTETS; p++) {
    const rows four = h >> (4 * p) & 15;
    v |= ((four | four << 7 | four << 14 | four << 21) & BYTES(1)) << p;
  }
  put_line(to, 4, v);
}
TAKE(Q5_0) {
  rows q[4];
  load_4(q, b, 0);
  put_fifth(to, q[0] >> 16 | q[1] << 16);
  load_4(q, b, 6);
  put_nibbles_32(to, q);
}
TAKE(Q5_1) {
  rows q[4];
  load_4(q, b, 0);
  put_fifth(to, q[1]);
  load_4(q, b, 8);
  put_nibbles_32(to, q);
}
TAKE(Q8_0) {
  rows q[8];
  load_8(q, b, 2);
  UNROLL for (int i = 0; i < 8; i++) put_line(to, i, q[i] ^ BYTES(0x80));
}

TAKE(Q2_K) {
  rows q[8], s[4];
  load_4(s, b, 0);
  for (int i = 0; i < 4; i++) put_4_scales(OF_2_UNITS(2 * i), s[i]);
  EACH_UNIT(n) {
    fetch(b, n);
    if (n % 4 == 0) load_8(q, b, 16 + n / 4 * 32);
    put_crumbs(UNIT(n), 0, q, n % 4 * 2);
  }
}

TAKE(Q3_K) {
  rows q[8], high[8], d[4], s[4];
  load_4(d, b, 94); // the scales begin two bytes on: what follows d may not be there
  const rows low[2] = {d[0] >> 16 | d[1] << 16, d[1] >> 16 | d[2] << 16}, top = d[2] >> 16 | d[3] << 16;
  UNROLL for (int i = 0; i < 4; i++) {
    const rows v = bits(low[i % 2], i / 2 * 4, 4, 0) | bits(top, 2 * i, 2, 4);
    s[i] = LESS_32(v);
  }
  for (int i = 0; i < 4; i++) put_4_scales(OF_2_UNITS(2 * i), s[i]);
  load_8(high, b, 0);
  EACH_UNIT(n) {
    fetch(b, n);
    if (n % 4 == 0) load_8(q, b, 32 + n / 4 * 32);
    put_crumbs(UNIT(n), 0, q, n % 4 * 2);
    put_bits(UNIT(n), 2, high, n);
  }
}

// Scales and minima of four units each, as formats/block_k.h has them, after d and m.
PG_INLINE void scales_mins(const source *b, rows *scales, rows *mins) {
  rows q[4];
  load_4(q, b, 0);
  scales[0] = q[1] & BYTES(63);
  scales[1] = (q[3] & BYTES(15)) | bits(q[1], 6, 2, 4);
  mins[0] = q[2] & BYTES(63);
  mins[1] = bits(q[3], 4, 4, 0) | bits(q[2], 6, 2, 4);
}

TAKE(Q4_K) {
  rows q[8], s[2], m[2];
  scales_mins(b, s, m);
  for (int i = 0; i < 2; i++) {
    put_4_scales(OF_4_UNITS(4 * i, 0), s[i]);
    put_4_scales(OF_4_UNITS(4 * i, 1), m[i]);
  }
  EACH_UNIT(n) {
    fetch(b, n);
    if (n % 2 == 0) load_8(q, b, 16 + n / 2 * 32);
    put_nibbles(UNIT(n), q, n % 2 * 4);
  }
}

TAKE(Q5_K) {
  rows q[8], high[8], s[2], m[2];
  scales_mins(b, s, m);
  for (int i = 0; i < 2; i++) {
    put_4_scales(OF_4_UNITS(4 * i, 0), s[i]);
    put_4_scales(OF_4_UNITS(4 * i, 1), m[i]);
  }
  load_8(high, b, 16);
  EACH_UNIT(n) {
    fetch(b, n);
    if (n % 2 == 0) load_8(q, b, 48 + n / 2 * 32);
    put_nibbles(UNIT(n), q, n % 2 * 4);
    put_bits(UNIT(n), 4, high, n);
  }
}

TAKE(Q6_K) {
  rows q[8], high[8], s[4];
  load_4(s, b, 192);
  for (int i = 0; i < 4; i++) put_4_scales(OF_2_UNITS(2 * i), s[i]);
  UNROLL for (int half = 0; half < 2; half++) {
    load_8(high, b, 128 + half * 32);
    UNROLL for (int i = 0; i < 4; i++) { // units 0, 2, 1, 3 of the half: two of them share bytes
      const int n = half * 4 + i / 2 + i % 2 * 2;
      fetch(b, n);
      if (i % 2 == 0) load_8(q, b, half * 64 + n % 2 * 32);
      put_nibbles(UNIT(n), q, n % 4 / 2 * 4);
      put_crumbs(UNIT(n), 4, high, n % 4 * 2);
    }
  }
}

TAKE(IQ4_XS) {
  rows q[4], head[4];
  load_4(head, b, 0);
  for (int i = 0; i < 2; i++) { // four bytes of a nibble and, above it, two bits each; less 32
    rows s = {0};
    for (int n = 4 * i; n < 4 * i + 4; n++)
      s |= ((head[1] >> (4 * n) & 15) | (head[0] >> (16 + 2 * n) & 3) << 4) << 8 * (n % 4);
    put_4_scales(OF_4_UNITS(4 * i, 0), LESS_32(s));
  }
  EACH_UNIT(n) {
    fetch(b, n);
    load_4(q, b, 8 + n * 16);
    put_nibbles_32(UNIT(n), q);
  }
}

TAKE(TQ2_0) {
  rows q[8];
  EACH_UNIT(n) {
    fetch(b, n);
    if (n % 4 == 0) load_8(q, b, n / 4 * 32);
    put_crumbs(UNIT(n), 0, q, n % 4 * 2);
  }
}

// f16 numbers of each row, at byte `at` of it; four of them are one store.
PG_INLINE void put_head(uint8_t *to, const source *b, int at) {
  UNROLL for (int r = 0; r < VF_N; r += 4) {
    uint64_t four = 0;
    UNROLL for (int i = 0; i < 4; i++) {
      uint16_t one;
      memcpy(&one, row_of(b, r + i) + at, sizeof one);
      four |= (uint64_t)one << 16 * i;
    }
    memcpy(to + 2 * r, &four, sizeof four);
  }
}

typedef void (*take_fn)(const source *b, int unit_bytes, place to);

// In the row or, beyond its end, in the same row of the next group.
typedef struct reach {
  int64_t near, next; // bytes of the row that are left; from its end to the row of the next group
} reach;

PG_INLINE void take_blocks(r16_format f, stored s, take_fn take, const uint8_t *b, int64_t stride, int64_t n_blocks,
                           uint8_t *to, reach reach) {
  const int head = r16_head_bytes(f), unit_bytes = r16_unit_bytes(f);
  const int period = PG_MAX(1, 64 / s.bytes); // small blocks share a cache line
  for (int64_t i = 0; i < n_blocks; i++, b += s.bytes, to += r16_block_bytes(f), reach.near -= s.bytes)
    for (int part = 0; part < PARTS; part++) {
      source from = source_of(b + part * VF_N * stride, stride);
      from.ahead = reach.near > AHEAD ? AHEAD : AHEAD + reach.next;
      from.bytes = s.bytes;
      if (f.units == 1 && i % period == 0) EACH_ROW(r) __builtin_prefetch(row_of(&from, r) + from.ahead);
      if (head) put_head(to + part * VF_N * 2, &from, s.d);
      if (head == 64) put_head(to + 32 + part * VF_N * 2, &from, s.m);
      uint8_t *unit = to + head;
      take(&from, unit_bytes, (place){unit + part * VF_N * 4, unit + r16_lines(f) * R16_LINE + part * VF_N});
    }
}

typedef void (*blocks_fn)(const uint8_t *b, int64_t stride, int64_t n_blocks, uint8_t *to, reach ahead);

#define X(name)                                                                                                        \
  static void blocks_##name(const uint8_t *b, int64_t stride, int64_t n_blocks, uint8_t *to, reach ahead) {            \
    take_blocks(r16_##name, stored_##name, take_##name, b, stride, n_blocks, to, ahead);                               \
  }
R16_BY_BITS(X)
#undef X

static blocks_fn blocks_of(int64_t type) {
  switch (type) {
#define X(name)                                                                                                        \
  case PG_##name:                                                                                                      \
    return blocks_##name;
    R16_BY_BITS(X)
#undef X
  default:
    return NULL;
  }
}

const uint8_t *PG_FN(r16_pass)(const r16_product *p, int64_t group, int64_t k, int64_t n, uint8_t *to) {
  const int64_t per = R16_UNIT * p->f.units, bytes = stored_of(p->f.type).bytes, row = group * R16_ROWS;
  const uint8_t *b = p->w + row * p->row_bytes + k / per * bytes;
  const blocks_fn blocks = blocks_of(p->f.type);
  if (blocks && row + R16_ROWS <= p->m) {
    const int64_t left = p->row_bytes - k / per * bytes;
    blocks(b, p->row_bytes, n / per, to, (reach){left, (R16_ROWS - 1) * p->row_bytes});
  } else {
    pg_r16_pack(p->f.type, b, p->row_bytes, n, PG_MIN(R16_ROWS, p->m - row), to, 0, 1);
  }
  return to;
}
