// Repack stored rows as R16 (r16.h), and unpack them. Each format has a function TAKE, which unpacks a unit of 32
// elements of four rows, and a function GIVE, which assembles a unit of one row again; the rest is common. Formats
// whose codes number points of a grid have no GIVE, because R16 does not keep the numbers. The code runs on any CPU,
// with vectors that every CPU has, because memory is the limit.
#include "formats/block_iq.h"
#include "formats/block_k.h"
#include "products/r16/stored.h"
#include "simd/shuffle.h"

enum { LANES = 4, QUADS = R16_ROWS / LANES };

typedef uint32_t lanes __attribute__((vector_size(16))); // a number of each of four rows

// A unit of four rows: its quartets of codes, and its two (or fewer) bytes of scales, as r16_scales defines them.
typedef struct unit {
  lanes q[R16_QUARTETS];
  uint8_t scale[2][LANES];
} unit;

// Block `b` of the first row, `stride` bytes before that of the next one -> unit number `n` of them.
typedef void (*take_fn)(const uint8_t *restrict b, int64_t stride, int n, unit *restrict u);

#define TAKE(name) PG_INLINE void take_##name(const uint8_t *restrict b, int64_t stride, int n, unit *restrict u)
#define EACH_LANE(r) for (int r = 0; r < LANES; r++)

PG_INLINE lanes load_1(const uint8_t *restrict b, int64_t stride) {
  return (lanes){load_u32(b), load_u32(b + stride), load_u32(b + 2 * stride), load_u32(b + 3 * stride)};
}

// Write unit number `n` to the bytes `b` of its block, which are zeros at first.
typedef void (*give_fn)(const row_unit *restrict u, int n, uint8_t *restrict b);

#define GIVE(name) static void give_##name(const row_unit *restrict u, int n, uint8_t *restrict b)

// Load the four dwords at b, each for all rows.
PG_INLINE void load_4(lanes *restrict q, const uint8_t *restrict b, int64_t stride) {
  lanes a[LANES];
  EACH_LANE(r) memcpy(a + r, b + r * stride, sizeof *a);
  const lanes x = PG_SHUFFLE(a[0], a[1], 0, 4, 1, 5), y = PG_SHUFFLE(a[2], a[3], 0, 4, 1, 5);
  const lanes z = PG_SHUFFLE(a[0], a[1], 2, 6, 3, 7), w = PG_SHUFFLE(a[2], a[3], 2, 6, 3, 7);
  q[0] = PG_SHUFFLE(x, y, 0, 1, 4, 5), q[1] = PG_SHUFFLE(x, y, 2, 3, 6, 7);
  q[2] = PG_SHUFFLE(z, w, 0, 1, 4, 5), q[3] = PG_SHUFFLE(z, w, 2, 3, 6, 7);
}

// Add bits to the codes: the bits (mask << shift) of each of the 32 bytes at b, moved to bit `to`.
PG_INLINE void or_bits(lanes *restrict q, const uint8_t *restrict b, int64_t stride, int shift, uint32_t mask, int to) {
  for (int i = 0; i < R16_QUARTETS; i += 4) {
    lanes a[4];
    load_4(a, b + 4 * i, stride);
    for (int j = 0; j < 4; j++) q[i + j] |= (a[j] >> shift & BYTES(mask)) << to;
  }
}
PG_INLINE void take_bits(lanes *restrict q, const uint8_t *restrict b, int64_t stride, int shift, uint32_t mask) {
  for (int i = 0; i < R16_QUARTETS; i++) q[i] = (lanes){0};
  or_bits(q, b, stride, shift, mask, 0);
}

// Put the bits (mask << from) of each code into the 32 bytes at b, at bit `shift`.
PG_INLINE void give_bits(uint8_t *restrict b, const uint32_t *restrict q, int shift, uint32_t mask, int from) {
  for (int i = 0; i < R16_QUARTETS; i++)
    store_u32(b + 4 * i, load_u32(b + 4 * i) | (q[i] >> from & BYTES(mask)) << shift);
}

// Bits 0..3 to bytes 0..3.
#define SPREAD(bits) (((bits) | (bits) << 7 | (bits) << 14 | (bits) << 21) & BYTES(1))

// -- blocks of 32: nibble j and nibble j + 16 share byte j; the fifth bits are a 32-bit word

PG_INLINE void nibbles_32(lanes *restrict q, const uint8_t *restrict b, int64_t stride) {
  load_4(q, b, stride);
  for (int i = 0; i < 4; i++) {
    q[4 + i] = q[i] >> 4 & BYTES(15);
    q[i] &= BYTES(15);
  }
}
PG_INLINE void fifth_32(lanes *restrict q, const uint8_t *restrict b, int64_t stride) {
  const lanes h = load_1(b, stride);
  for (int i = 0; i < R16_QUARTETS; i++) {
    const lanes bits = h >> 4 * i & 15;
    q[i] |= SPREAD(bits) << 4;
  }
}

PG_INLINE void give_nibbles_32(uint8_t *restrict b, const uint32_t *restrict q) {
  for (int i = 0; i < 4; i++) store_u32(b + 4 * i, (q[i] & BYTES(15)) | (q[4 + i] & BYTES(15)) << 4);
}
PG_INLINE void give_fifth_32(uint8_t *restrict b, const uint32_t *restrict q) {
  uint32_t h = 0;
  for (int i = 0; i < R16_QUARTETS; i++) {
    const uint32_t v = q[i] >> 4 & BYTES(1);
    h |= ((v | v >> 7 | v >> 14 | v >> 21) & 15) << 4 * i;
  }
  store_u32(b, h);
}

TAKE(Q4_0) { nibbles_32(u->q, b + 2, stride); }
GIVE(Q4_0) { give_nibbles_32(b + 2, u->q); }
TAKE(Q4_1) { nibbles_32(u->q, b + 4, stride); }
GIVE(Q4_1) { give_nibbles_32(b + 4, u->q); }
TAKE(Q5_0) {
  nibbles_32(u->q, b + 6, stride);
  fifth_32(u->q, b + 2, stride);
}
GIVE(Q5_0) {
  give_nibbles_32(b + 6, u->q);
  give_fifth_32(b + 2, u->q);
}
TAKE(Q5_1) {
  nibbles_32(u->q, b + 8, stride);
  fifth_32(u->q, b + 4, stride);
}
GIVE(Q5_1) {
  give_nibbles_32(b + 8, u->q);
  give_fifth_32(b + 4, u->q);
}
TAKE(Q8_0) {
  for (int i = 0; i < R16_QUARTETS; i += 4) load_4(u->q + i, b + 2 + 4 * i, stride);
  for (int i = 0; i < R16_QUARTETS; i++) u->q[i] ^= BYTES(0x80);
}
GIVE(Q8_0) {
  for (int i = 0; i < R16_QUARTETS; i++) store_u32(b + 2 + 4 * i, u->q[i] ^ BYTES(0x80));
}
TAKE(IQ4_NL) { nibbles_32(u->q, b + 2, stride); }
GIVE(IQ4_NL) { give_nibbles_32(b + 2, u->q); }
TAKE(MXFP4) {
  nibbles_32(u->q, b + 1, stride);
  EACH_LANE(r) u->scale[0][r] = b[r * stride] ^ 0x80;
}
GIVE(MXFP4) {
  give_nibbles_32(b + 1, u->q);
  b[0] = u->scale[0] ^ 0x80;
}

// -- blocks of 256, as formats/k.c and formats/lut.c describe them

PG_INLINE void two_scales(const uint8_t *restrict b, int64_t stride, unit *restrict u) {
  EACH_LANE(r) for (int h = 0; h < 2; h++) u->scale[h][r] = b[r * stride + h];
}

TAKE(Q2_K) {
  take_bits(u->q, b + 16 + n / 4 * 32, stride, n % 4 * 2, 3);
  two_scales(b + 2 * n, stride, u);
}
GIVE(Q2_K) {
  give_bits(b + 16 + n / 4 * 32, u->q, n % 4 * 2, 3, 0);
  memcpy(b + 2 * n, u->scale, 2);
}

TAKE(Q3_K) {
  take_bits(u->q, b + 32 + n / 4 * 32, stride, n % 4 * 2, 3);
  or_bits(u->q, b, stride, n, 1, 2);
  EACH_LANE(r) for (int h = 0; h < 2; h++) {
    const uint8_t *p = b + r * stride;
    const int s = 2 * n + h;
    u->scale[h][r] =
        (uint8_t)((((p[96 + s % 8] >> (s / 8 * 4)) & 15) | ((p[104 + s % 4] >> (s / 4 * 2)) & 3) << 4) - 32);
  }
}
GIVE(Q3_K) {
  give_bits(b + 32 + n / 4 * 32, u->q, n % 4 * 2, 3, 0);
  give_bits(b, u->q, n, 1, 2);
  for (int s = 2 * n; s < 2 * n + 2; s++) {
    const int v = (u->scale[s % 2] + 32) & 63;
    b[96 + s % 8] |= (uint8_t)((v & 15) << (s / 8 * 4));
    b[104 + s % 4] |= (uint8_t)((v >> 4) << (s / 4 * 2));
  }
}

PG_INLINE void scale_min_32(const uint8_t *restrict b, int64_t stride, int n, unit *restrict u) {
  EACH_LANE(r) {
    const scale_min sm = get_scale_min(b + r * stride + 4, n);
    u->scale[0][r] = (uint8_t)sm.scale;
    u->scale[1][r] = (uint8_t)sm.min;
  }
}

TAKE(Q4_K) {
  take_bits(u->q, b + 16 + n / 2 * 32, stride, n % 2 * 4, 15);
  scale_min_32(b, stride, n, u);
}
GIVE(Q4_K) {
  give_bits(b + 16 + n / 2 * 32, u->q, n % 2 * 4, 15, 0);
  put_scale_min(b + 4, n, u->scale[0], u->scale[1]);
}

TAKE(Q5_K) {
  take_bits(u->q, b + 48 + n / 2 * 32, stride, n % 2 * 4, 15);
  or_bits(u->q, b + 16, stride, n, 1, 4);
  scale_min_32(b, stride, n, u);
}
GIVE(Q5_K) {
  give_bits(b + 48 + n / 2 * 32, u->q, n % 2 * 4, 15, 0);
  give_bits(b + 16, u->q, n, 1, 4);
  put_scale_min(b + 4, n, u->scale[0], u->scale[1]);
}

TAKE(Q6_K) {
  take_bits(u->q, b + n / 4 * 64 + n % 2 * 32, stride, n % 4 / 2 * 4, 15);
  or_bits(u->q, b + 128 + n / 4 * 32, stride, n % 4 * 2, 3, 4);
  two_scales(b + 192 + 2 * n, stride, u);
}
GIVE(Q6_K) {
  give_bits(b + n / 4 * 64 + n % 2 * 32, u->q, n % 4 / 2 * 4, 15, 0);
  give_bits(b + 128 + n / 4 * 32, u->q, n % 4 * 2, 3, 4);
  memcpy(b + 192 + 2 * n, u->scale, 2);
}

TAKE(IQ4_XS) {
  nibbles_32(u->q, b + 8 + n * 16, stride);
  EACH_LANE(r) {
    const uint8_t *p = b + r * stride;
    u->scale[0][r] = (uint8_t)((((p[4 + n / 2] >> (n % 2 * 4)) & 15) | ((load_u16(p + 2) >> (n * 2)) & 3) << 4) - 32);
  }
}
GIVE(IQ4_XS) {
  give_nibbles_32(b + 8 + n * 16, u->q);
  const int v = (u->scale[0] + 32) & 63;
  b[4 + n / 2] |= (uint8_t)((v & 15) << (n % 2 * 4));
  store_u16(b + 2, (uint16_t)(load_u16(b + 2) | (v >> 4) << (n * 2)));
}

TAKE(TQ2_0) { take_bits(u->q, b + n / 4 * 32, stride, n % 4 * 2, 3); }
GIVE(TQ2_0) { give_bits(b + n / 4 * 32, u->q, n % 4 * 2, 3, 0); }

// Blocks of 64: nibbles j and j + 8 share byte j.
TAKE(NVFP4) {
  lanes a[4];
  load_4(a, b + 4 + 16 * n, stride);
  for (int i = 0; i < 2; i++) {
    u->q[i] = a[i] & BYTES(15), u->q[2 + i] = a[i] >> 4 & BYTES(15);
    u->q[4 + i] = a[2 + i] & BYTES(15), u->q[6 + i] = a[2 + i] >> 4 & BYTES(15);
  }
  EACH_LANE(r) for (int h = 0; h < 2; h++) {
    const uint8_t s = b[r * stride + 2 * n + h];
    u->scale[h][r] = s & 0x7f & -(s != 0x7f);
  }
}

// -- formats that need tables, row by row

#define TAKE_ROW(name)                                                                                                 \
  PG_INLINE void row_##name(const uint8_t *restrict b, int n, row_unit *restrict u);                                   \
  TAKE(name) {                                                                                                         \
    EACH_LANE(r) {                                                                                                     \
      row_unit v = {{0}, {0}};                                                                                         \
      row_##name(b + r * stride, n, &v);                                                                               \
      for (int p = 0; p < R16_QUARTETS; p++) u->q[p][r] = v.q[p];                                                      \
      for (int h = 0; h < 2; h++) u->scale[h][r] = v.scale[h];                                                         \
    }                                                                                                                  \
  }                                                                                                                    \
  PG_INLINE void row_##name(const uint8_t *restrict b, int n, row_unit *restrict u)

// Grids, as formats/iq.c describes them.

// The codes of four elements of a point: `bits` bits of each, from bit `from` on, number its level; above them is its
// sign.
PG_INLINE uint32_t point_4(const int8_t *restrict point, int from, int bits, uint32_t signs) {
  signs &= 15;
  return (load_u32(point) >> from & BYTES((1u << bits) - 1)) | SPREAD(signs) << bits;
}
PG_INLINE void point_8(uint32_t *restrict q, const int8_t *restrict point, int from, uint32_t signs) {
  for (int i = 0; i < 2; i++) q[i] = point_4(point + 4 * i, from, 2, signs >> 4 * i);
}

TAKE_ROW(IQ1_S) {
  const uint16_t word = load_u16(b + 34 + 2 * n);
  for (int g = 0; g < 4; g++) {
    const int point = b[2 + 4 * n + g] | (word >> 3 * g & 7) << 8;
    point_8(u->q + 2 * g, pg_grid_iq1[point], 0, word & 0x8000 ? 255 : 0);
  }
  u->scale[0] = (uint8_t)(2 * (word >> 12 & 7) + 1);
}

TAKE_ROW(IQ1_M) {
  for (int g = 0; g < 4; g++) {
    const int nibble = b[32 + 2 * n + g / 2] >> g % 2 * 4;
    point_8(u->q + 2 * g, pg_grid_iq1[b[4 * n + g] | (nibble & 7) << 8], 0, nibble & 8 ? 255 : 0);
  }
  for (int h = 0; h < 2; h++)
    u->scale[h] = (uint8_t)(2 * (load_u16(b + 48 + n / 2 * 2) >> (n % 2 * 2 + h) * 3 & 7) + 1);
}

TAKE_ROW(IQ2_XXS) {
  const uint8_t *q = b + 2 + 8 * n;
  const uint32_t word = load_u32(q + 4);
  for (int g = 0; g < 4; g++) point_8(u->q + 2 * g, pg_grid_iq2_xxs[q[g]], 4, even_signs(word >> 7 * g));
  u->scale[0] = (uint8_t)(2 * (word >> 28) + 1);
}

PG_INLINE void nibble_scales(int nibbles, row_unit *restrict u) {
  u->scale[0] = (uint8_t)(2 * (nibbles & 15) + 1);
  u->scale[1] = (uint8_t)(2 * (nibbles >> 4) + 1);
}

TAKE_ROW(IQ2_XS) {
  for (int g = 0; g < 4; g++) {
    const uint16_t word = load_u16(b + 2 + 8 * n + 2 * g);
    point_8(u->q + 2 * g, pg_grid_iq2_xs[word & 511], 4, even_signs(word >> 9));
  }
  nibble_scales(b[66 + n], u);
}

TAKE_ROW(IQ2_S) {
  for (int g = 0; g < 4; g++) {
    const int point = b[2 + 4 * n + g] | (b[66 + n] >> 2 * g & 3) << 8;
    point_8(u->q + 2 * g, pg_grid_iq2_s[point], 4, b[34 + 4 * n + g]);
  }
  nibble_scales(b[74 + n], u);
}

TAKE_ROW(IQ3_XXS) {
  const uint32_t word = load_u32(b + 66 + 4 * n);
  for (int i = 0; i < R16_QUARTETS; i++) {
    const uint32_t signs = even_signs(word >> i / 2 * 7) >> i % 2 * 4;
    u->q[i] = point_4(pg_grid_iq3_xxs[b[2 + 8 * n + i]], 3, 3, signs);
  }
  u->scale[0] = (uint8_t)(2 * (word >> 28) + 1);
}

TAKE_ROW(IQ3_S) {
  for (int i = 0; i < R16_QUARTETS; i++) {
    const int point = b[2 + 8 * n + i] | (b[66 + n] >> i & 1) << 8;
    u->q[i] = point_4(pg_grid_iq3_s[point], 1, 3, b[74 + 4 * n + i / 2] >> i % 2 * 4);
  }
  u->scale[0] = (uint8_t)(2 * (b[106 + n / 2] >> n % 2 * 4 & 15) + 1);
}

TAKE_ROW(TQ1_0) {
  static const uint8_t powers[] = {1, 3, 9, 27, 81};
  for (int i = 0; i < R16_UNIT; i++) {
    const int e = 32 * n + i, t = e < 160 ? e / 32 : e < 240 ? (e - 160) / 16 : (e - 240) / 4;
    const uint8_t q = e < 160 ? b[e % 32] : e < 240 ? b[32 + e % 16] : b[48 + e % 4];
    const uint32_t trit = (uint8_t)(q * powers[t]) * 3u >> 8;
    u->q[i / 4] = i % 4 ? u->q[i / 4] | trit << i % 4 * 8 : trit;
  }
}

// -- units to lines

// Write the lines with `bits` bits of each code, from bit `from` on, for four rows. Returns their number, `bits`.
PG_INLINE int put_lines_of(const lanes *restrict q, int bits, int from, uint8_t *restrict to) {
  const int per = R16_QUARTETS / bits; // quartets per line
  for (int j = 0; j < bits; j++) {
    lanes line = {0};
    for (int i = 0; i < per; i++) line |= (q[j * per + i] >> from & BYTES((1u << bits) - 1)) << (i * bits);
    memcpy(to + j * R16_LINE, &line, sizeof line);
  }
  return bits;
}

PG_INLINE void put_lines(int codes, const lanes *restrict q, uint8_t *restrict to) {
  switch (codes) {
  case R16_BYTES:
    for (int p = 0; p < R16_QUARTETS; p++) memcpy(to + p * R16_LINE, q + p, sizeof *q);
    break;
  case R16_NIBBLES:
    put_lines_of(q, 4, 0, to);
    break;
  case R16_NIBBLES_BITS:
    put_lines_of(q, 1, 4, to + put_lines_of(q, 4, 0, to) * R16_LINE);
    break;
  case R16_NIBBLES_CRUMBS:
    put_lines_of(q, 2, 4, to + put_lines_of(q, 4, 0, to) * R16_LINE);
    break;
  case R16_CRUMBS:
    put_lines_of(q, 2, 0, to);
    break;
  default:
    put_lines_of(q, 1, 2, to + put_lines_of(q, 2, 0, to) * R16_LINE); // R16_CRUMBS_BITS
  }
}

// Pack four rows, from 4 * quad on, of one block of a group.
PG_INLINE void pack_quad(r16_format f, stored s, take_fn take, const uint8_t *restrict b, int64_t stride, int quad,
                         uint8_t *restrict to) {
  const int head = r16_head_bytes(f), unit_bytes = r16_unit_bytes(f), lines = r16_lines(f) * R16_LINE;
  if (head) EACH_LANE(r) {
      const uint8_t *p = b + r * stride;
      uint8_t *at = to + 2 * (LANES * quad + r);
      store_u16(at, s.d < 0 ? iq1_m_d(p) : load_u16(p + s.d));
      if (head == 64) store_u16(at + 32, load_u16(p + s.m));
    }
  to += head;
  _Pragma("GCC unroll 8") for (int n = 0; n < f.units; n++, to += unit_bytes) {
    unit u;
    take(b, stride, n, &u);
    put_lines(f.codes, u.q, to + quad * LANES * 4);
    if (unit_bytes > lines) memcpy(to + lines + LANES * quad, u.scale[0], LANES);
    if (unit_bytes > lines + R16_ROWS) memcpy(to + lines + R16_ROWS + LANES * quad, u.scale[1], LANES);
  }
}

// A group of 16 rows.
typedef void (*pack_fn)(const uint8_t *restrict b, int64_t stride, int64_t n_blocks, uint8_t *restrict to);

#define X(name, ...)                                                                                                   \
  static void pack_##name(const uint8_t *restrict b, int64_t stride, int64_t n_blocks, uint8_t *restrict to) {         \
    for (; n_blocks; n_blocks--, b += stored_##name.bytes, to += r16_block_bytes(r16_##name))                          \
      for (int i = 0; i < QUADS; i++)                                                                                  \
        pack_quad(r16_##name, stored_##name, take_##name, b + i * LANES * stride, stride, i, to);                      \
  }
R16_FORMATS(X)
#undef X

#define X(name, ...) [PG_##name] = pack_##name,
static const pack_fn packers[] = {R16_FORMATS(X)};
#undef X

int64_t pg_r16_bytes(int64_t type, int64_t k, int64_t m) {
  const r16_format *f = r16_find(type);
  return f ? r16_matrix_bytes(*f, k, m) : 0;
}

void pg_r16_pack(int64_t type, const void *rows, int64_t row_bytes, int64_t k, int64_t m, void *dst, int64_t first,
                 int64_t last) {
  const r16_format f = *r16_find(type);
  const int64_t n_blocks = k / (R16_UNIT * f.units), bytes = stored_of(type).bytes;
  for (int64_t g = first; g < last; g++) {
    const uint8_t *src = (const uint8_t *)rows + g * R16_ROWS * row_bytes;
    uint8_t *to = (uint8_t *)dst + g * r16_group_bytes(f, k);
    const int64_t n = m - g * R16_ROWS;
    if (n >= R16_ROWS) {
      packers[type](src, row_bytes, n_blocks, to);
      continue;
    }
    for (int64_t b = 0; b < n_blocks; b++, to += r16_block_bytes(f)) { // missing rows are zeros
      uint8_t block[R16_ROWS][R16_MAX_STORED] = {{0}};
      for (int64_t r = 0; r < n; r++) memcpy(block[r], src + r * row_bytes + b * bytes, bytes);
      packers[type](block[0], R16_MAX_STORED, 1, to);
    }
  }
}

// -- lines to units

#define GIVEN(X)                                                                                                       \
  X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(IQ4_XS) X(TQ2_0) X(MXFP4)

static give_fn give_of(int64_t type) {
  switch (type) {
#define X(name)                                                                                                        \
  case PG_##name:                                                                                                      \
    return give_##name;
    GIVEN(X)
#undef X
  default:
    return NULL;
  }
}

// Read lines with `bits` bits of each code, for row r; add them to the codes from bit `to` on.
PG_INLINE void get_lines(const uint8_t *restrict lines, int r, int bits, int to, uint32_t *restrict q) {
  const int per = R16_QUARTETS / bits; // quartets per line
  for (int p = 0; p < R16_QUARTETS; p++) {
    const uint32_t line = load_u32(lines + p / per * R16_LINE + 4 * r);
    q[p] |= (line >> p % per * bits & BYTES((1u << bits) - 1)) << to;
  }
}

static void get_codes(int codes, const uint8_t *restrict unit, int r, uint32_t *restrict q) {
  switch (codes) {
  case R16_BYTES:
    get_lines(unit, r, 8, 0, q);
    return;
  case R16_CRUMBS:
  case R16_CRUMBS_BITS:
    get_lines(unit, r, 2, 0, q);
    if (codes == R16_CRUMBS_BITS) get_lines(unit + 2 * R16_LINE, r, 1, 2, q);
    return;
  default:
    get_lines(unit, r, 4, 0, q);
    if (codes == R16_NIBBLES_BITS) get_lines(unit + 4 * R16_LINE, r, 1, 4, q);
    if (codes == R16_NIBBLES_CRUMBS) get_lines(unit + 4 * R16_LINE, r, 2, 4, q);
  }
}

// Unpack row r of a block of a group.
static void unpack_row(r16_format f, stored s, give_fn give, const uint8_t *restrict from, int r, uint8_t *restrict b) {
  const int head = r16_head_bytes(f), unit_bytes = r16_unit_bytes(f), lines = r16_lines(f) * R16_LINE;
  memset(b, 0, s.bytes);
  if (head) memcpy(b + s.d, from + 2 * r, 2);
  if (head == 64) memcpy(b + s.m, from + 32 + 2 * r, 2);
  from += head;
  for (int n = 0; n < f.units; n++, from += unit_bytes) {
    row_unit u = {{0}, {0}};
    get_codes(f.codes, from, r, u.q);
    for (int h = 0; h < (unit_bytes - lines) / R16_ROWS; h++) u.scale[h] = from[lines + h * R16_ROWS + r];
    give(&u, n, b);
  }
}

int pg_r16_unpack(int64_t type, const void *packed, int64_t k, int64_t m, void *rows, int64_t row_bytes, int64_t first,
                  int64_t last) {
  const r16_format *f = r16_find(type);
  const give_fn give = give_of(type);
  if (!f || !give) return PG_E_TYPE;
  const stored s = stored_of(type);
  const int64_t n_blocks = k / (R16_UNIT * f->units);
  for (int64_t g = first; g < last; g++) {
    const uint8_t *from = (const uint8_t *)packed + g * r16_group_bytes(*f, k);
    const int n = (int)PG_MIN(R16_ROWS, m - g * R16_ROWS);
    for (int64_t i = 0; i < n_blocks; i++, from += r16_block_bytes(*f))
      for (int r = 0; r < n; r++)
        unpack_row(*f, s, give, from, r, (uint8_t *)rows + (g * R16_ROWS + r) * row_bytes + i * s.bytes);
  }
  return PG_OK;
}
