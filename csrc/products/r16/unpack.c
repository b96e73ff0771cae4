// R16 -> stored rows, the way back of pack.c, of the types in which no bit is lost: not those whose codes are no longer
// the numbers of points on a grid. Row by row: for those who look at weights, or rewrite them.
#include "formats/block.h"
#include "products/r16/stored.h"

// A unit, number `n` of a block, to the block's bytes `b`, which are zeros at first.
typedef void (*give_fn)(const row_unit *restrict u, int n, uint8_t *restrict b);

#define GIVE(name) static void give_##name(const row_unit *restrict u, int n, uint8_t *restrict b)

// Bits (mask << from) of each code into the 32 bytes at b, at bit `shift`.
PG_INLINE void give_bits(uint8_t *restrict b, const uint32_t *restrict q, int shift, uint32_t mask, int from) {
  for (int i = 0; i < R16_QUARTETS; i++)
    store_u32(b + 4 * i, load_u32(b + 4 * i) | (q[i] >> from & BYTES(mask)) << shift);
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

GIVE(Q4_0) { give_nibbles_32(b + 2, u->q); }
GIVE(Q4_1) { give_nibbles_32(b + 4, u->q); }
GIVE(Q5_0) {
  give_nibbles_32(b + 6, u->q);
  give_fifth_32(b + 2, u->q);
}
GIVE(Q5_1) {
  give_nibbles_32(b + 8, u->q);
  give_fifth_32(b + 4, u->q);
}
GIVE(Q8_0) {
  for (int i = 0; i < R16_QUARTETS; i++) store_u32(b + 2 + 4 * i, u->q[i] ^ BYTES(0x80));
}
GIVE(IQ4_NL) { give_nibbles_32(b + 2, u->q); }
GIVE(MXFP4) {
  give_nibbles_32(b + 1, u->q);
  b[0] = u->scale[0] ^ 0x80;
}

GIVE(Q2_K) {
  give_bits(b + 16 + n / 4 * 32, u->q, n % 4 * 2, 3, 0);
  memcpy(b + 2 * n, u->scale, 2);
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

// As get_scale_min takes them apart.
PG_INLINE void give_scale_min(uint8_t *restrict p, int i, const uint8_t *restrict scale) {
  if (i < 4) {
    p[i] |= scale[0];
    p[i + 4] |= scale[1];
    return;
  }
  p[i + 4] |= (uint8_t)((scale[0] & 15) | (scale[1] & 15) << 4);
  p[i - 4] |= (uint8_t)(scale[0] >> 4 << 6);
  p[i] |= (uint8_t)(scale[1] >> 4 << 6);
}

GIVE(Q4_K) {
  give_bits(b + 16 + n / 2 * 32, u->q, n % 2 * 4, 15, 0);
  give_scale_min(b + 4, n, u->scale);
}

GIVE(Q5_K) {
  give_bits(b + 48 + n / 2 * 32, u->q, n % 2 * 4, 15, 0);
  give_bits(b + 16, u->q, n, 1, 4);
  give_scale_min(b + 4, n, u->scale);
}

GIVE(Q6_K) {
  give_bits(b + n / 4 * 64 + n % 2 * 32, u->q, n % 4 / 2 * 4, 15, 0);
  give_bits(b + 128 + n / 4 * 32, u->q, n % 4 * 2, 3, 4);
  memcpy(b + 192 + 2 * n, u->scale, 2);
}

GIVE(IQ4_XS) {
  give_nibbles_32(b + 8 + n * 16, u->q);
  const int v = (u->scale[0] + 32) & 63;
  b[4 + n / 2] |= (uint8_t)((v & 15) << (n % 2 * 4));
  store_u16(b + 2, (uint16_t)(load_u16(b + 2) | (v >> 4) << (n * 2)));
}

GIVE(TQ2_0) { give_bits(b + n / 4 * 32, u->q, n % 4 * 2, 3, 0); }

static give_fn give_of(int64_t type) {
  switch (type) {
#define X(name)                                                                                                        \
  case PG_##name:                                                                                                      \
    return give_##name;
    R16_BY_BITS(X)
#undef X
  default:
    return NULL;
  }
}

// Lines of `bits` bits of each code to bit `to` on of the codes of row r.
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

// Row r of a block of a group.
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
