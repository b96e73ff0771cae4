// Multiply the codes of a unit with the integers of columns. Both repacked weights (gemv.c) and
// stored ones (passing.c) use this, and get the same bits.
#pragma once
#include "products/r16/integers.h"
#include "products/r16/vec.h"

enum {
  PARTS = R16_ROWS / VF_N, // registers per 16 rows
#if defined(__AVX512VNNI__)
  NC = 8, // columns at a time: as many accumulators as the registers hold
#elif R16_WORDS
  NC = 4,
#else
  NC = 5, // six would take as long as three twice
#endif
  TAKEN = 4 // the same, for rows that are read as they are stored
};

#define EACH(n, i) _Pragma("GCC unroll 8") for (int i = 0; i < (n); i++)

typedef const r16_x *const *blocks; // one of each column

// A function that gives quartet p of a unit, for the rows of a part: r16_quartet, or one that takes codes from
// registers.
typedef vi (*quartet_fn)(r16_format f, const void *from, int part, int p);

// t[c][i][h] = sum over half h of the unit of (code - offset) * integer, for the VF_N rows of part i. When both halves
// share a scale, t[c][i][0] is the sum over the unit.
typedef vi dots[PARTS][2];

#define X(name, codes, table, offset, ...) _Static_assert(!((offset) & ((offset)-1)), "less_offset shifts");
R16_FORMATS(X)
#undef X

#if defined(__AVX512VNNI__)
// The sum of -offset * integer over half h of a unit; over the whole unit when both halves share a scale.
PG_INLINE vi less_offset(r16_format f, const r16_x *x, int h) {
  if (!f.offset) return _mm512_setzero_si512();
  return _mm512_slli_epi32(_mm512_set1_epi32(x->less[r16_halves(f) == 1 ? 2 : h]), __builtin_ctz(f.offset));
}

// sum + a times 4 bytes in all lanes. In assembly, because a compiler would load the bytes with an instruction of their
// own, and there is no time for twice as many instructions.
PG_INLINE vi add_dot(vi sum, vi a, const int8_t *b) {
#if defined(PG_EMULATE)
  int32_t v;
  memcpy(&v, b, sizeof v);
  return _mm512_dpbusd_epi32(sum, a, _mm512_set1_epi32(v));
#else
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*(const int8_t(*)[4])b));
  return sum;
#endif
}

PG_INLINE void dot_parts(r16_format f, int nc, quartet_fn quartet, const void *from, int first, int n, blocks x,
                         dots *t) {
  const int halves = r16_halves(f), per = R16_QUARTETS / halves;
  EACH(halves, h) {
    vi hi[NC], lo[NC];
    EACH(nc, c) {
      hi[c] = _mm512_setzero_si512();
      lo[c] = less_offset(f, x[c], h);
    }
    EACH(per, i) {
      const int p = h * per + i;
      const vi q = quartet(f, from, 0, p);
      EACH(nc, c) {
        hi[c] = add_dot(hi[c], q, x[c]->hi + 4 * p);
        lo[c] = add_dot(lo[c], q, x[c]->lo + 4 * p);
      }
    }
    EACH(nc, c) t[c][0][h] = _mm512_add_epi32(_mm512_slli_epi32(hi[c], 8), lo[c]);
  }
}
#elif VF_N == 4
#if !R16_WORDS
// Bytes are multiplied as signed numbers. Codes that fill a byte are all less 128, which is their offset.
PG_INLINE int32x4_t less_offset(r16_format f, const r16_x *x, int h) {
  if (!f.offset || f.offset == 128) return vdupq_n_s32(0);
  return vdupq_n_s32(x->less[r16_halves(f) == 1 ? 2 : h] * f.offset);
}
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
enum { AT_ONCE = 2 }; // parts, whose sums fit the registers: they share what is loaded of the columns

// Products of 2 x 8 with 8 x 2 bytes: two rows with the planes of a column, side by side. For the rows of `n` parts.
PG_INLINE void dot_some(r16_format f, int nc, quartet_fn quartet, const void *from, int first, int n, blocks x,
                        dots *t) {
  const int per = 4 / r16_halves(f); // times eight elements that share a scale
  const int32x4_t planes = {8, 0, 8, 0};
  int32x4_t sum[AT_ONCE][NC][2]; // of rows 0 and 1, 2 and 3
  EACH(4, k) {
    if (k % per == 0) EACH(n, i) EACH(nc, c) sum[i][c][0] = sum[i][c][1] = vdupq_n_s32(0);
    int8x16_t w[AT_ONCE][2];
    EACH(n, i) {
      const vi a = quartet(f, from, first + i, 2 * k), b = quartet(f, from, first + i, 2 * k + 1);
      const vi less = vi_set1_i8(f.offset == 128 ? 0x80 : 0);
      w[i][0] = (int8x16_t)(less ^ (vi)vzip1q_s32((int32x4_t)a, (int32x4_t)b));
      w[i][1] = (int8x16_t)(less ^ (vi)vzip2q_s32((int32x4_t)a, (int32x4_t)b));
    }
    EACH(nc, c) {
      const int8x16_t both = vld1q_s8(x[c]->both[k][0]);
      EACH(n, i) EACH(2, r) sum[i][c][r] = vmmlaq_s32(sum[i][c][r], w[i][r], both);
    }
    if (k % per < per - 1) continue;
    EACH(nc, c) {
      const int32x4_t less = less_offset(f, x[c], k / per);
      EACH(n, i)
      t[c][first + i][k / per] =
          (vi)(vpaddq_s32(vshlq_s32(sum[i][c][0], planes), vshlq_s32(sum[i][c][1], planes)) + less);
    }
  }
}
#elif !R16_WORDS
enum { AT_ONCE = 1 };

// For the rows of `n` parts.
PG_INLINE void dot_some(r16_format f, int nc, quartet_fn quartet, const void *from, int first, int n, blocks x,
                        dots *t) {
  const int halves = r16_halves(f);
  int32x4_t hi[AT_ONCE][NC], lo[AT_ONCE][NC];
  EACH(2, k) { // the elements 0 .. 15, then 16 .. 31
    const int h = halves == 2 ? k : 0;
    if (!k || halves == 2) EACH(nc, c) EACH(n, i) {
        hi[i][c] = vdupq_n_s32(0);
        lo[i][c] = less_offset(f, x[c], k);
      }
    int8x16_t q[AT_ONCE][4];
    EACH(n, i) EACH(4, p) {
      const vi codes = quartet(f, from, first + i, 4 * k + p);
      q[i][p] = (int8x16_t)(f.offset == 128 ? codes ^ vi_set1_i8(0x80) : codes);
    }
    EACH(nc, c) {
      const int8x16_t xhi = vld1q_s8(x[c]->hi + 16 * k), xlo = vld1q_s8(x[c]->lo + 16 * k);
#define ADD(p)                                                                                                         \
  EACH(n, i) {                                                                                                         \
    hi[i][c] = vdotq_laneq_s32(hi[i][c], q[i][p], xhi, p);                                                             \
    lo[i][c] = vdotq_laneq_s32(lo[i][c], q[i][p], xlo, p);                                                             \
  }
      ADD(0)
      ADD(1)
      ADD(2)
      ADD(3)
#undef ADD
    }
    if (k || halves == 2) EACH(nc, c) EACH(n, i) t[c][first + i][h] = (vi)((hi[i][c] << 8) + lo[i][c]);
  }
}
#else
enum { AT_ONCE = 1 };

// Codes less their offset as words, times words of the columns: the sums of a row are the lanes of a register.
PG_INLINE void dot_some(r16_format f, int nc, quartet_fn quartet, const void *from, int part, int n, blocks x,
                        dots *t) {
  const int per = R16_QUARTETS / r16_halves(f);
  const vi offset = vi_set1_i8(f.offset);
  int32x4_t sum[NC][4];
  EACH(R16_QUARTETS, p) {
    const vi q = quartet(f, from, part, p);
    const int16x8_t low = (int16x8_t)vsubl_u8(vget_low_u8(q), vget_low_u8(offset)), // rows 0 and 1
        high = (int16x8_t)vsubl_high_u8(q, offset);
    EACH(nc, c) {
      int32x4_t *s = sum[c];
      if (p % per == 0) s[0] = s[1] = s[2] = s[3] = vdupq_n_s32(0);
      const int16x8_t two = vld1q_s16(x[c]->q + p / 2 * 8), other = vextq_s16(two, two, 4);
      const int16x8_t b = p % 2 ? other : two, above = p % 2 ? two : other; // the quartet lies low, or high
      s[0] = vmlal_s16(s[0], vget_low_s16(low), vget_low_s16(b));
      s[1] = vmlal_high_s16(s[1], low, above);
      s[2] = vmlal_s16(s[2], vget_low_s16(high), vget_low_s16(b));
      s[3] = vmlal_high_s16(s[3], high, above);
      if (p % per == per - 1) t[c][part][p / per] = (vi)vpaddq_s32(vpaddq_s32(s[0], s[1]), vpaddq_s32(s[2], s[3]));
    }
    if (p % 2)
      __asm__ volatile("" ::: "memory"); // codes and columns that were loaded earlier would not fit the registers
  }
}
#endif

PG_INLINE void dot_parts(r16_format f, int nc, quartet_fn quartet, const void *from, int first, int n, blocks x,
                         dots *t) {
  const int at_once = PG_MIN(n, AT_ONCE);
  EACH(n / at_once, i) dot_some(f, nc, quartet, from, first + i * at_once, at_once, x, t);
}
#else
PG_INLINE vi less_offset(r16_format f, const r16_x *x, int h) {
  if (!f.offset) return _mm256_setzero_si256();
  return _mm256_slli_epi32(_mm256_set1_epi32(x->less[r16_halves(f) == 1 ? 2 : h]), __builtin_ctz(f.offset));
}

// Integers of a column for all lanes: four bytes of a plane, or two words.
PG_INLINE vi x_at(const void *p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return _mm256_set1_epi32(v);
}

// sum + a * b. Additions stay in this order: gcc would make a tree of them, whose terms do not fit the registers.
PG_INLINE vi add_dot(vi sum, vi a, vi b) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
  __asm__("" : "+x"(sum));
  return sum;
}

// How many quartets' products with a plane (bytes from -128 on) are summed in 16 bits. 0: words are faster. That is so
// for codes of six bits, which leave room for two quartets only; and when the sums would not fit the registers: with
// more columns, and for codes whose bits lie apart in blocks of 256 that are read as they are stored (n = 1).
PG_INLINE int quartets_in_16(r16_format f, int nc, int n) {
  if (f.table || nc > (f.codes == R16_NIBBLES ? 2 : 1)) return 0;
  switch (f.codes) {
  case R16_NIBBLES:
  case R16_CRUMBS:
    return 8;
  case R16_CRUMBS_BITS:
    return n == 1 ? 0 : 8;
  case R16_NIBBLES_BITS:
    return n == 1 && f.units == 8 ? 0 : 4;
  default:
    return 0;
  }
}

// sum + a; additions stay in this order, too.
PG_INLINE vi add_16(vi sum, vi a) {
  sum = _mm256_add_epi16(sum, a);
  __asm__("" : "+x"(sum));
  return sum;
}

// Multiply codes, as bytes, with both planes of the integers. That takes as many instructions as multiplying words, and
// saves those that widen codes to words.
PG_INLINE void dot_planes(r16_format f, int nc, quartet_fn quartet, const void *from, int first, int n, blocks x,
                          dots *t) {
  const int halves = r16_halves(f), per = R16_QUARTETS / halves, run = PG_MIN(per, quartets_in_16(f, nc, n));
  const vi of_hi = _mm256_set1_epi16(256), of_lo = _mm256_set1_epi16(1);
  vi hi[NC][PARTS], lo[NC][PARTS], sum[NC][PARTS];
  EACH(R16_QUARTETS, p) {
    const int h = p / per;
    vi q[PARTS];
    EACH(n, i) q[i] = quartet(f, from, first + i, p);
    EACH(nc, c) {
      const vi xhi = x_at(x[c]->hi + 4 * p), xlo = x_at(x[c]->lo + 4 * p);
      EACH(n, i) {
        const vi a = _mm256_maddubs_epi16(q[i], xhi), b = _mm256_maddubs_epi16(q[i], xlo);
        hi[c][i] = p % run ? add_16(hi[c][i], a) : a;
        lo[c][i] = p % run ? add_16(lo[c][i], b) : b;
      }
    }
    if (p % run < run - 1) continue;
    EACH(nc, c) {
      const vi less = less_offset(f, x[c], h);
      EACH(n, i) {
        const vi all = _mm256_add_epi32(_mm256_madd_epi16(hi[c][i], of_hi), _mm256_madd_epi16(lo[c][i], of_lo));
        sum[c][i] = p % per < run ? _mm256_add_epi32(all, less) : _mm256_add_epi32(sum[c][i], all);
        if (p % per == per - 1) t[c][first + i][h] = sum[c][i];
      }
    }
  }
}

// Multiply codes as words, several parts at once: codes are unpacked once for NC columns, and an integer is loaded once
// for all rows.
PG_INLINE void dot_words(r16_format f, int nc, quartet_fn quartet, const void *from, int first, int n, blocks x,
                         dots *t) {
  const int halves = r16_halves(f), per = R16_QUARTETS / halves;
  vi sum[NC][PARTS];
  EACH(R16_QUARTETS, p) {
    const int h = p / per;
    if (p % per == 0) EACH(nc, c) EACH(n, i) {
        sum[c][i] = less_offset(f, x[c], h);
      }
    vi q[PARTS];
    EACH(n, i) q[i] = quartet(f, from, first + i, p);
    EACH(2, odd) {
      vi w[PARTS];
      EACH(n, i) w[i] = odd ? _mm256_srli_epi16(q[i], 8) : _mm256_and_si256(q[i], _mm256_set1_epi16(255));
      EACH(nc, c) {
        const vi b = x_at(x[c]->q + 4 * p + 2 * odd);
        EACH(n, i) sum[c][i] = add_dot(sum[c][i], w[i], b);
      }
    }
    if (p % per == per - 1) EACH(nc, c) EACH(n, i) t[c][first + i][h] = sum[c][i];
  }
}

PG_INLINE void dot_parts(r16_format f, int nc, quartet_fn quartet, const void *from, int first, int n, blocks x,
                         dots *t) {
  if (quartets_in_16(f, nc, n))
    dot_planes(f, nc, quartet, from, first, n, x, t);
  else
    dot_words(f, nc, quartet, from, first, n, x, t);
}
#endif

// One unit of a part's rows times nc columns.
PG_INLINE void add_unit_of(r16_format f, int nc, const r16_unit_scales *w, int part, const dots *t, blocks x,
                           r16_sums *s) {
  EACH(nc, c) r16_add_unit(f, &s[c], w, t[c][part], x[c]->sums);
}

// The most columns for which stored rows are multiplied directly; for more, a strip of rows is repacked once for all
// columns. Blocks of 256 take long to compile, so only one column is multiplied directly.
PG_INLINE int64_t r16_taken(r16_format f) { return f.units < 8 ? TAKEN : 1; }

// A group of 16 rows of p, all there and as they are stored, times nc columns: y[c][0 .. 16) (passing.c).
void PG_FN(r16_multiply_stored)(const r16_product *p, int64_t group, int nc, blocks x, float *const *y);
