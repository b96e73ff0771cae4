// Stored rows -> R16 (r16.h). A format is one function that takes a unit of 32 elements of one row apart; the rest is
// common. Plain C for any CPU: this runs once per weight, when a model is loaded.
#include "formats/block_iq.h"
#include "formats/block_k.h"
#include "products/r16/r16.h"

// A unit of one row: its quartets of codes, and its two (or fewer) bytes of scales, as r16_scales defines them.
typedef struct unit {
  uint32_t q[R16_QUARTETS];
  uint8_t scale[2];
} unit;

// Block `b` of a row -> unit number `n` of it.
typedef void (*take_fn)(const uint8_t *restrict b, int n, unit *restrict u);

#define BYTES(x) (0x01010101u * (x)) // x in each byte

// n quartets: the bits (mask << shift) of each byte, moved down; or_bits: added to the codes at bit `to`.
PG_INLINE void take_bits(uint32_t *restrict q, const uint8_t *restrict b, int n, int shift, uint32_t mask) {
  for (int i = 0; i < n; i++) q[i] = load_u32(b + 4 * i) >> shift & BYTES(mask);
}
PG_INLINE void or_bits(uint32_t *restrict q, const uint8_t *restrict b, int shift, uint32_t mask, int to) {
  for (int i = 0; i < R16_QUARTETS; i++) q[i] |= (load_u32(b + 4 * i) >> shift & BYTES(mask)) << to;
}

// Bits 0..3 to bytes 0..3.
PG_INLINE uint32_t spread(uint32_t bits) { return (bits & 15) * 0x00204081 & BYTES(1); }

// -- blocks of 32: nibble j and nibble j + 16 share byte j; the fifth bits are a 32-bit word

PG_INLINE void nibbles_32(uint32_t *restrict q, const uint8_t *restrict b) {
  take_bits(q, b, 4, 0, 15);
  take_bits(q + 4, b, 4, 4, 15);
}
PG_INLINE void fifth_32(uint32_t *restrict q, const uint8_t *restrict b) {
  const uint32_t h = load_u32(b);
  for (int i = 0; i < R16_QUARTETS; i++) q[i] |= spread(h >> 4 * i) << 4;
}

static void take_Q4_0(const uint8_t *restrict b, int n, unit *restrict u) { nibbles_32(u->q, b + 2); }
static void take_Q4_1(const uint8_t *restrict b, int n, unit *restrict u) { nibbles_32(u->q, b + 4); }
static void take_Q5_0(const uint8_t *restrict b, int n, unit *restrict u) {
  nibbles_32(u->q, b + 6);
  fifth_32(u->q, b + 2);
}
static void take_Q5_1(const uint8_t *restrict b, int n, unit *restrict u) {
  nibbles_32(u->q, b + 8);
  fifth_32(u->q, b + 4);
}
static void take_Q8_0(const uint8_t *restrict b, int n, unit *restrict u) {
  for (int i = 0; i < R16_QUARTETS; i++) u->q[i] = load_u32(b + 2 + 4 * i) ^ BYTES(0x80);
}
static void take_IQ4_NL(const uint8_t *restrict b, int n, unit *restrict u) { nibbles_32(u->q, b + 2); }
static void take_MXFP4(const uint8_t *restrict b, int n, unit *restrict u) {
  nibbles_32(u->q, b + 1);
  u->scale[0] = b[0] ^ 0x80;
}

// -- blocks of 256, as blocks_k.c and blocks_lut.c describe them

static void take_Q2_K(const uint8_t *restrict b, int n, unit *restrict u) {
  take_bits(u->q, b + 16 + n / 4 * 32, R16_QUARTETS, n % 4 * 2, 3);
  u->scale[0] = b[2 * n];
  u->scale[1] = b[2 * n + 1];
}

static void take_Q3_K(const uint8_t *restrict b, int n, unit *restrict u) {
  take_bits(u->q, b + 32 + n / 4 * 32, R16_QUARTETS, n % 4 * 2, 3);
  or_bits(u->q, b, n, 1, 2);
  for (int h = 0; h < 2; h++) {
    const int s = 2 * n + h;
    u->scale[h] = (uint8_t)((((b[96 + s % 8] >> (s / 8 * 4)) & 15) | ((b[104 + s % 4] >> (s / 4 * 2)) & 3) << 4) - 32);
  }
}

PG_INLINE void scale_min_32(const uint8_t *restrict b, int n, unit *restrict u) {
  const scale_min sm = get_scale_min(b + 4, n);
  u->scale[0] = (uint8_t)sm.scale;
  u->scale[1] = (uint8_t)sm.min;
}

static void take_Q4_K(const uint8_t *restrict b, int n, unit *restrict u) {
  take_bits(u->q, b + 16 + n / 2 * 32, R16_QUARTETS, n % 2 * 4, 15);
  scale_min_32(b, n, u);
}

static void take_Q5_K(const uint8_t *restrict b, int n, unit *restrict u) {
  take_bits(u->q, b + 48 + n / 2 * 32, R16_QUARTETS, n % 2 * 4, 15);
  or_bits(u->q, b + 16, n, 1, 4);
  scale_min_32(b, n, u);
}

static void take_Q6_K(const uint8_t *restrict b, int n, unit *restrict u) {
  take_bits(u->q, b + n / 4 * 64 + n % 2 * 32, R16_QUARTETS, n % 4 / 2 * 4, 15);
  or_bits(u->q, b + 128 + n / 4 * 32, n % 4 * 2, 3, 4);
  u->scale[0] = b[192 + 2 * n];
  u->scale[1] = b[193 + 2 * n];
}

static void take_IQ4_XS(const uint8_t *restrict b, int n, unit *restrict u) {
  nibbles_32(u->q, b + 8 + n * 16);
  u->scale[0] = (uint8_t)((((b[4 + n / 2] >> (n % 2 * 4)) & 15) | ((load_u16(b + 2) >> (n * 2)) & 3) << 4) - 32);
}

// -- grids, as blocks_iq.c describes them

// Four elements of a point: `bits` of each from bit `from` on, which number its levels, and above them its sign.
PG_INLINE uint32_t point_4(const int8_t *restrict point, int from, int bits, uint32_t signs) {
  return (load_u32(point) >> from & BYTES((1u << bits) - 1)) | spread(signs) << bits;
}
PG_INLINE void point_8(uint32_t *restrict q, const int8_t *restrict point, int from, uint32_t signs) {
  for (int i = 0; i < 2; i++) q[i] = point_4(point + 4 * i, from, 2, signs >> 4 * i);
}

static void take_IQ1_S(const uint8_t *restrict b, int n, unit *restrict u) {
  const uint16_t word = load_u16(b + 34 + 2 * n);
  for (int g = 0; g < 4; g++) {
    const int point = b[2 + 4 * n + g] | (word >> 3 * g & 7) << 8;
    point_8(u->q + 2 * g, pg_grid_iq1[point], 0, word & 0x8000 ? 255 : 0);
  }
  u->scale[0] = (uint8_t)(2 * (word >> 12 & 7) + 1);
}

static void take_IQ1_M(const uint8_t *restrict b, int n, unit *restrict u) {
  for (int g = 0; g < 4; g++) {
    const int nibble = b[32 + 2 * n + g / 2] >> g % 2 * 4;
    point_8(u->q + 2 * g, pg_grid_iq1[b[4 * n + g] | (nibble & 7) << 8], 0, nibble & 8 ? 255 : 0);
  }
  for (int h = 0; h < 2; h++)
    u->scale[h] = (uint8_t)(2 * (load_u16(b + 48 + n / 2 * 2) >> (n % 2 * 2 + h) * 3 & 7) + 1);
}

static void take_IQ2_XXS(const uint8_t *restrict b, int n, unit *restrict u) {
  const uint8_t *q = b + 2 + 8 * n;
  const uint32_t word = load_u32(q + 4);
  for (int g = 0; g < 4; g++) point_8(u->q + 2 * g, pg_grid_iq2_xxs[q[g]], 4, even_signs(word >> 7 * g));
  u->scale[0] = (uint8_t)(2 * (word >> 28) + 1);
}

PG_INLINE void nibble_scales(int nibbles, unit *restrict u) {
  u->scale[0] = (uint8_t)(2 * (nibbles & 15) + 1);
  u->scale[1] = (uint8_t)(2 * (nibbles >> 4) + 1);
}

static void take_IQ2_XS(const uint8_t *restrict b, int n, unit *restrict u) {
  for (int g = 0; g < 4; g++) {
    const uint16_t word = load_u16(b + 2 + 8 * n + 2 * g);
    point_8(u->q + 2 * g, pg_grid_iq2_xs[word & 511], 4, even_signs(word >> 9));
  }
  nibble_scales(b[66 + n], u);
}

static void take_IQ2_S(const uint8_t *restrict b, int n, unit *restrict u) {
  for (int g = 0; g < 4; g++) {
    const int point = b[2 + 4 * n + g] | (b[66 + n] >> 2 * g & 3) << 8;
    point_8(u->q + 2 * g, pg_grid_iq2_s[point], 4, b[34 + 4 * n + g]);
  }
  nibble_scales(b[74 + n], u);
}

static void take_IQ3_XXS(const uint8_t *restrict b, int n, unit *restrict u) {
  const uint32_t word = load_u32(b + 66 + 4 * n);
  for (int i = 0; i < R16_QUARTETS; i++) {
    const uint32_t signs = even_signs(word >> i / 2 * 7) >> i % 2 * 4;
    u->q[i] = point_4(pg_grid_iq3_xxs[b[2 + 8 * n + i]], 3, 3, signs);
  }
  u->scale[0] = (uint8_t)(2 * (word >> 28) + 1);
}

static void take_IQ3_S(const uint8_t *restrict b, int n, unit *restrict u) {
  for (int i = 0; i < R16_QUARTETS; i++) {
    const int point = b[2 + 8 * n + i] | (b[66 + n] >> i & 1) << 8;
    u->q[i] = point_4(pg_grid_iq3_s[point], 1, 3, b[74 + 4 * n + i / 2] >> i % 2 * 4);
  }
  u->scale[0] = (uint8_t)(2 * (b[106 + n / 2] >> n % 2 * 4 & 15) + 1);
}

// -- the rest, as blocks_tq.c and blocks_lut.c describe them

static void take_TQ1_0(const uint8_t *restrict b, int n, unit *restrict u) {
  static const uint8_t powers[] = {1, 3, 9, 27, 81};
  for (int i = 0; i < R16_UNIT; i++) {
    const int e = 32 * n + i, t = e < 160 ? e / 32 : e < 240 ? (e - 160) / 16 : (e - 240) / 4;
    const uint8_t q = e < 160 ? b[e % 32] : e < 240 ? b[32 + e % 16] : b[48 + e % 4];
    const uint32_t trit = (uint8_t)(q * powers[t]) * 3u >> 8;
    u->q[i / 4] = i % 4 ? u->q[i / 4] | trit << i % 4 * 8 : trit;
  }
}

static void take_TQ2_0(const uint8_t *restrict b, int n, unit *restrict u) {
  take_bits(u->q, b + n / 4 * 32, R16_QUARTETS, n % 4 * 2, 3);
}

static void take_NVFP4(const uint8_t *restrict b, int n, unit *restrict u) {
  for (int h = 0; h < 2; h++) {
    const int s = 2 * n + h;
    take_bits(u->q + 4 * h, b + 4 + 8 * s, 2, 0, 15);
    take_bits(u->q + 4 * h + 2, b + 4 + 8 * s, 2, 4, 15);
    u->scale[h] = b[s] == 0x7f ? 0 : b[s] & 0x7f;
  }
}

// What the packer knows of a stored type: bytes of a block, and where its f16 d and m are (d < 0: see iq1_m_d).
typedef struct stored {
  take_fn take;
  int bytes, d, m;
} stored;

static stored stored_of(int64_t type) {
  switch (type) {
  case PG_Q4_0:
    return (stored){take_Q4_0, 18, 0, 0};
  case PG_Q4_1:
    return (stored){take_Q4_1, 20, 0, 2};
  case PG_Q5_0:
    return (stored){take_Q5_0, 22, 0, 0};
  case PG_Q5_1:
    return (stored){take_Q5_1, 24, 0, 2};
  case PG_Q8_0:
    return (stored){take_Q8_0, 34, 0, 0};
  case PG_Q2_K:
    return (stored){take_Q2_K, 84, 80, 82};
  case PG_Q3_K:
    return (stored){take_Q3_K, 110, 108, 0};
  case PG_Q4_K:
    return (stored){take_Q4_K, 144, 0, 2};
  case PG_Q5_K:
    return (stored){take_Q5_K, 176, 0, 2};
  case PG_Q6_K:
    return (stored){take_Q6_K, 210, 208, 0};
  case PG_IQ1_S:
    return (stored){take_IQ1_S, 50, 0, 0};
  case PG_IQ1_M:
    return (stored){take_IQ1_M, 56, -1, 0};
  case PG_IQ2_XXS:
    return (stored){take_IQ2_XXS, 66, 0, 0};
  case PG_IQ2_XS:
    return (stored){take_IQ2_XS, 74, 0, 0};
  case PG_IQ2_S:
    return (stored){take_IQ2_S, 82, 0, 0};
  case PG_IQ3_XXS:
    return (stored){take_IQ3_XXS, 98, 0, 0};
  case PG_IQ3_S:
    return (stored){take_IQ3_S, 110, 0, 0};
  case PG_IQ4_NL:
    return (stored){take_IQ4_NL, 18, 0, 0};
  case PG_IQ4_XS:
    return (stored){take_IQ4_XS, 136, 0, 0};
  case PG_TQ1_0:
    return (stored){take_TQ1_0, 54, 52, 0};
  case PG_TQ2_0:
    return (stored){take_TQ2_0, 66, 64, 0};
  case PG_NVFP4:
    return (stored){take_NVFP4, 36, 0, 0};
  default:
    return (stored){take_MXFP4, 17, 0, 0};
  }
}

// -- units of 16 rows to lines

typedef uint32_t lanes[R16_QUARTETS][R16_ROWS]; // quartet p of each row

#define EACH_ROW(r) for (int r = 0; r < R16_ROWS; r++)

// Lines of `bits` bits of each code from bit `from` on; returns how many: as many lines as bits.
PG_INLINE int put_lines_of(lanes q, int bits, int from, uint8_t *to) {
  const int per = R16_QUARTETS / bits; // quartets per line
  for (int j = 0; j < bits; j++) {
    uint32_t line[R16_ROWS];
    EACH_ROW(r) line[r] = q[j * per][r] >> from & BYTES((1u << bits) - 1);
    for (int i = 1; i < per; i++)
      EACH_ROW(r) line[r] |= (q[j * per + i][r] >> from & BYTES((1u << bits) - 1)) << (i * bits);
    memcpy(to + j * R16_LINE, line, R16_LINE);
  }
  return bits;
}

static void put_lines(int codes, lanes q, uint8_t *to) {
  switch (codes) {
  case R16_BYTES:
    put_lines_of(q, 8, 0, to);
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

// One block of a group of `rows` rows.
static void pack_block(r16_format f, stored s, const uint8_t *src, int64_t row_bytes, int rows, uint8_t *to) {
  const int head = r16_head_bytes(f), unit_bytes = r16_unit_bytes(f), lines = r16_lines(f) * R16_LINE;
  for (int r = 0; r < rows && head; r++) {
    const uint8_t *b = src + r * row_bytes;
    store_u16(to + 2 * r, s.d < 0 ? iq1_m_d(b) : load_u16(b + s.d));
    if (head == 64) store_u16(to + 32 + 2 * r, load_u16(b + s.m));
  }
  to += head;
  for (int n = 0; n < f.units; n++, to += unit_bytes) {
    lanes q;
    if (rows < R16_ROWS) memset(q, 0, sizeof q);
    for (int r = 0; r < rows; r++) {
      unit u;
      s.take(src + r * row_bytes, n, &u);
      for (int p = 0; p < R16_QUARTETS; p++) q[p][r] = u.q[p];
      if (unit_bytes > lines) to[lines + r] = u.scale[0];
      if (unit_bytes > lines + R16_ROWS) to[lines + R16_ROWS + r] = u.scale[1];
    }
    put_lines(f.codes, q, to);
  }
}

int64_t pg_r16_bytes(int64_t type, int64_t k, int64_t m) {
  const r16_format *f = r16_find(type);
  return f ? r16_matrix_bytes(*f, k, m) : 0;
}

void pg_r16_pack(int64_t type, const void *rows, int64_t row_bytes, int64_t k, int64_t m, void *dst, int64_t first,
                 int64_t last) {
  const r16_format f = *r16_find(type);
  const stored s = stored_of(type);
  const int64_t n_blocks = k / (R16_UNIT * f.units), block_bytes = r16_block_bytes(f);
  for (int64_t g = first; g < last; g++) {
    const uint8_t *src = (const uint8_t *)rows + g * R16_ROWS * row_bytes;
    uint8_t *to = (uint8_t *)dst + g * r16_group_bytes(f, k);
    const int n = (int)PG_MIN(R16_ROWS, m - g * R16_ROWS);
    if (n < R16_ROWS) memset(to, 0, r16_group_bytes(f, k));
    for (int64_t b = 0; b < n_blocks; b++) pack_block(f, s, src + b * s.bytes, row_bytes, n, to + b * block_bytes);
  }
}
