// Products of rows as they are stored (take.h): each block is repacked each time it is read. For few columns, its codes
// are multiplied directly from registers; for more columns, and for products/gemm, they are written to a strip. Both
// give the same bits as a repacked copy. pack.c repacks a last group that is not full.
#include "products/r16/dot.h"
#include "products/r16/take.h"
#include "simd/ahead.h"

// The types with small blocks, which are one stretch each; and the types with blocks of 256, with the number of units
// of a stretch (IQ2_S: a stretch of four units would be no faster, and slow to compile).
#define SMALL(X)                                                                                                       \
  X(Q4_0, NULL)                                                                                                        \
  X(Q4_1, NULL)                                                                                                        \
  X(Q5_0, NULL)                                                                                                        \
  X(Q5_1, NULL)                                                                                                        \
  X(Q8_0, NULL)                                                                                                        \
  X(IQ4_NL, NULL)                                                                                                      \
  X(MXFP4, begin_MXFP4)                                                                                                \
  X(NVFP4, begin_NVFP4)
#define LARGE(X)                                                                                                       \
  X(Q2_K, 4, begin_Q2_K)                                                                                               \
  X(Q3_K, 4, begin_Q3_K)                                                                                               \
  X(Q4_K, 2, begin_Q4_K)                                                                                               \
  X(Q5_K, 2, begin_Q5_K)                                                                                               \
  X(Q6_K, 4, begin_Q6_K)                                                                                               \
  X(IQ1_S, 4, begin_IQ1_S)                                                                                             \
  X(IQ1_M, 4, begin_IQ1_M)                                                                                             \
  X(IQ2_XXS, 2, NULL)                                                                                                  \
  X(IQ2_XS, 2, begin_IQ2_XS)                                                                                           \
  X(IQ2_S, 1, begin_IQ2_S)                                                                                             \
  X(IQ3_XXS, 4, NULL)                                                                                                  \
  X(IQ3_S, 4, begin_IQ3_S)                                                                                             \
  X(IQ4_XS, 1, begin_IQ4_XS)                                                                                           \
  X(TQ1_0, 8, begin_TQ1_0)                                                                                             \
  X(TQ2_0, 4, NULL)

typedef struct type {
  r16_format f;
  stored s;
  int per;
  begin_fn begin;
  codes_fn codes;
} type;

// Bytes that a unit of a part prefetches: as many as it reads.
PG_INLINE int share_of(type t) { return VF_N * t.s.bytes / t.f.units; }

PG_INLINE rows d_of(type t, const source *b) {
  if (t.s.d >= 0) return load_word(b, t.s.bytes, t.s.d);
  rows v[4]; // iq1_m_d
  load_4(v, b, 40);
  return (v[2] >> 12 & 0xf) | (v[2] >> 24 & 0xf0) | (v[3] >> 4 & 0xf00) | (v[3] >> 16 & 0xf000);
}

// How many bits of each code are in the first lines of a format.
PG_INLINE int low_bits(r16_format f) { return f.codes == R16_BYTES ? 8 : f.codes >= R16_CRUMBS ? 2 : 4; }
PG_INLINE int high_bits(r16_format f) { return r16_lines(f) - low_bits(f); } // a line has one of each

// -- few columns

// Whether codes are multiplied without shifting them down in their bytes; their dots are then divided by the matching
// power of 2, which is exact. It pays when four units share bytes and codes have no further bits elsewhere. (In
// dot_planes, sums have no room for it.)
PG_INLINE int is_in_place(r16_format f) {
#if defined(__AVX512VNNI__)
  return f.codes == R16_CRUMBS && f.scales == R16_DM_SM16;
#else
  return 0;
#endif
}

PG_INLINE vi taken_quartet(r16_format f, const void *from, int part, int p) {
  const codes *c = (const codes *)from;
  if (is_in_place(f)) return (vi)bits(c->low[p], c->low_from, low_bits(f), c->low_from);
  rows q = bits(c->low[p], c->low_from, low_bits(f), 0);
  if (high_bits(f)) q |= bits(c->high[p], c->high_from, high_bits(f), low_bits(f));
  return r16_values(f, (vi)q);
}

// y[c][0 .. VF_N) = the rows of a part times nc columns.
PG_INLINE void multiply(type t, int nc, const uint8_t *b, int64_t stride, int64_t n_blocks, blocks x0, float *const *y,
                        const uint8_t *next) {
  const int head = r16_head_bytes(t.f), per_sum = r16_sum_units(t.f);
  vf total[NC];
  r16_sums sum[NC];
  const r16_x *x[NC];
  EACH(nc, c) {
    x[c] = x0[c];
    total[c] = vf_zero();
    sum[c] = (r16_sums){vi_zero(), vf_zero()};
  }
  for (int64_t i = 1; i <= n_blocks; i++, b += t.s.bytes) {
    const source from = source_of(b, stride);
    uint8_t scale[8][2 * R16_ROWS];
    const places to = {scale[0], 2 * R16_ROWS};
    piece kept;
    if (t.begin) t.begin(&from, &kept, to);
    const vf one = vf_set1(1.0f);
    const r16_head h = r16_head_of(t.f, head ? f16_of(d_of(t, &from)) : one,
                                   head == 64 ? f16_of(load_word(&from, t.s.bytes, t.s.m)) : one);
    _Pragma("GCC unroll 1") for (int s = 0; s < t.f.units / t.per; s++) EACH(t.per, u) {
      const int n = s * t.per + u;
      codes q = {.low_from = 0};
      dots dot[NC];
      next = pg_ask(next, share_of(t));
      t.codes(&from, s, u, &kept, &q, to);
      dot_parts(t.f, nc, taken_quartet, &q, 0, 1, x, dot);
      if (is_in_place(t.f)) EACH(nc, c) EACH(r16_halves(t.f), j) {
          dot[c][0][j] = (vi)((signed_rows)dot[c][0][j] >> q.low_from);
        }
      const r16_unit_scales w = r16_scales_of(t.f, h, scale[n]);
      add_unit_of(t.f, nc, &w, 0, dot, x, sum);
      if (n % per_sum == per_sum - 1) EACH(nc, c) r16_end_sum(t.f, &sum[c], h);
      __asm__ volatile("" ::: "memory"); // as in gemv.c
      EACH(nc, c) x[c]++;
    }
    if (i % (R16_RUN_UNITS / t.f.units) && i < n_blocks) continue;
    EACH(nc, c) {
      total[c] = r16_end_run(total[c], sum[c], x[c][-1].d);
      sum[c] = (r16_sums){vi_zero(), vf_zero()};
    }
  }
  EACH(nc, c) vf_store(y[c], total[c]);
}

// -- more columns

// Write lines with `n` bits of each code, from bit `from` on; a line holds R16_QUARTETS / n quartets.
PG_INLINE void put_lines(uint8_t *to, const rows *q, int n, int from) {
  UNROLL for (int j = 0; j < n; j++) {
    rows v = {0};
    UNROLL for (int i = 0; i < R16_QUARTETS / n; i++) v |= bits(q[j * (R16_QUARTETS / n) + i], from, n, n * i);
    memcpy(to + j * R16_LINE, &v, sizeof v);
  }
}

PG_INLINE void put_strip(type t, const uint8_t *b, int64_t stride, int64_t n_blocks, uint8_t *to, const uint8_t *next) {
  const int head = r16_head_bytes(t.f), unit_bytes = r16_unit_bytes(t.f);
  for (int64_t i = 0; i < n_blocks; i++, b += t.s.bytes, to += r16_block_bytes(t.f))
    _Pragma("GCC unroll 1") for (int part = 0; part < PARTS; part++) {
      const uint8_t *first = b + part * VF_N * stride;
      const source from = source_of(first, stride);
      uint8_t *lines = to + head + part * VF_N * 4;
      const places scales = {to + head + r16_lines(t.f) * R16_LINE + part * VF_N, unit_bytes};
      piece kept;
      if (head) put_words(to + part * VF_N * 2, d_of(t, &from));
      if (head == 64) put_words(to + 32 + part * VF_N * 2, load_word(&from, t.s.bytes, t.s.m));
      if (t.begin) t.begin(&from, &kept, scales);
      _Pragma("GCC unroll 1") for (int s = 0; s < t.f.units / t.per; s++) EACH(t.per, u) {
        const int n = s * t.per + u;
        uint8_t *line = lines + n * unit_bytes;
        codes q = {.low_from = 0};
        next = pg_ask(next, share_of(t));
        t.codes(&from, s, u, &kept, &q, scales);
        put_lines(line, q.low, low_bits(t.f), q.low_from);
        if (high_bits(t.f)) put_lines(line + low_bits(t.f) * R16_LINE, q.high, high_bits(t.f), q.high_from);
      }
    }
}

typedef struct ways {
  void (*put)(const uint8_t *b, int64_t stride, int64_t n_blocks, uint8_t *to, const uint8_t *next);
  void (*multiply[NC])(const uint8_t *b, int64_t stride, int64_t n_blocks, blocks x, float *const *y,
                       const uint8_t *next);
} ways;

#define TYPE(name, per, begin) ((type){r16_##name, stored_##name, per, begin, codes_##name})
#define MULTIPLY(name, per, begin, nc)                                                                                 \
  static void multiply_##name##_##nc(const uint8_t *b, int64_t stride, int64_t n_blocks, blocks x, float *const *y,    \
                                     const uint8_t *next) {                                                            \
    multiply(TYPE(name, per, begin), nc, b, stride, n_blocks, x, y, next);                                             \
  }
#define PUT_STRIP(name, per, begin)                                                                                    \
  static void put_##name(const uint8_t *b, int64_t stride, int64_t n_blocks, uint8_t *to, const uint8_t *next) {       \
    put_strip(TYPE(name, per, begin), b, stride, n_blocks, to, next);                                                  \
  }
#define X(name, begin)                                                                                                 \
  MULTIPLY(name, r16_##name.units, begin, 1)                                                                           \
  MULTIPLY(name, r16_##name.units, begin, 2)                                                                           \
  MULTIPLY(name, r16_##name.units, begin, 3)                                                                           \
  MULTIPLY(name, r16_##name.units, begin, 4)                                                                           \
  PUT_STRIP(name, r16_##name.units, begin)
SMALL(X)
#undef X
#define X(name, per, begin) MULTIPLY(name, per, begin, 1) PUT_STRIP(name, per, begin)
LARGE(X)
#undef X

#define X(name, ...)                                                                                                   \
  [PG_##name] = {put_##name, {multiply_##name##_1, multiply_##name##_2, multiply_##name##_3, multiply_##name##_4}},
#define Y(name, ...) [PG_##name] = {put_##name, {multiply_##name##_1}},
static const ways ways_of[] = {SMALL(X) LARGE(Y)};
#undef X
#undef Y

// The place where elements from k on of a group begin.
static const uint8_t *rows_at(const r16_product *p, int64_t group, int64_t k) {
  return p->w + group * R16_ROWS * p->row_bytes + k / (R16_UNIT * p->f.units) * stored_of(p->f.type).bytes;
}

// How many bytes ahead prefetch goes while `n` rows are read.
static int64_t ahead(const r16_product *p, int n) { return PG_MAX(n * p->row_bytes, PG_AHEAD); }

const uint8_t *PG_FN(r16_pass)(const r16_product *p, int64_t group, int64_t k, int64_t n, uint8_t *to) {
  const uint8_t *b = rows_at(p, group, k);
  const int64_t row = group * R16_ROWS;
  if (row + R16_ROWS <= p->m) {
    const uint8_t *next = rows_at(p, group, 0) + ahead(p, R16_ROWS) + R16_ROWS * (b - rows_at(p, group, 0));
    ways_of[p->f.type].put(b, p->row_bytes, n / (R16_UNIT * p->f.units), to, next);
  } else {
    pg_r16_pack(p->f.type, b, p->row_bytes, n, p->m - row, to, 0, 1);
  }
  return to;
}

void PG_FN(r16_multiply_stored)(const r16_product *p, int64_t group, int nc, blocks x, float *const *y) {
  const uint8_t *b = rows_at(p, group, 0);
  for (int part = 0; part < PARTS; part++, b += VF_N * p->row_bytes) {
    const uint8_t *next = b + ahead(p, VF_N);
    float *to[NC];
    for (int c = 0; c < nc; c++) to[c] = y[c] + part * VF_N;
    ways_of[p->f.type].multiply[nc - 1](b, p->row_bytes, p->k / (R16_UNIT * p->f.units), x, to, next);
  }
}
