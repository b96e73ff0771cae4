// Codes in registers: vi has VF_N lanes of 4 bytes, one lane per row. With 512 bits that is a whole line, with 256 half
// of one, with NEON a quarter.
#pragma once
#include "formats/block_lut.h"
#include "products/r16/r16.h"

// Points of the grids by element, the sign in the highest bit of a code. IQ1: 8 times what an element and its shift
// are.
static const int8_t iq1_values[16] = {1, 9, 0, -7, -1, 7, 0, -9};
static const int8_t iq2_values[16] = {8, 25, 43, 0, -8, -25, -43, 0};
static const int8_t iq3_xxs_values[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};
static const int8_t iq3_s_values[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};

#if VF_N == 16
typedef __m512i vi;
PG_INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
PG_INLINE vi vi_set1_i8(int x) { return _mm512_set1_epi8((char)x); }
PG_INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
PG_INLINE vi vi_or_masked(vi a, vi b, vi mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0xf8); } // a | (b & mask)
PG_INLINE vi vi_shl(vi a, int n) { return _mm512_slli_epi16(a, n); }
PG_INLINE vi vi_shr(vi a, int n) { return _mm512_srli_epi16(a, n); }
PG_INLINE vi vi_lookup(const int8_t *values, vi q) { // 128 + values[q]
  const vi table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)values));
  return _mm512_shuffle_epi8(_mm512_xor_si512(table, vi_set1_i8(0x80)), q);
}
PG_INLINE vf vf_load_e4m3(const uint8_t *p) { // R16_E4M3
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 7));
}
#elif VF_N == 8
typedef __m256i vi;
PG_INLINE vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
PG_INLINE vi vi_set1_i8(int x) { return _mm256_set1_epi8((char)x); }
PG_INLINE vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
PG_INLINE vi vi_or_masked(vi a, vi b, vi mask) { return _mm256_or_si256(a, _mm256_and_si256(b, mask)); }
PG_INLINE vi vi_shl(vi a, int n) { return _mm256_slli_epi16(a, n); }
PG_INLINE vi vi_shr(vi a, int n) { return _mm256_srli_epi16(a, n); }
PG_INLINE vi vi_lookup(const int8_t *values, vi q) {
  const vi table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)values));
  return _mm256_shuffle_epi8(_mm256_xor_si256(table, vi_set1_i8(0x80)), q);
}
PG_INLINE vf vf_load_e4m3(const uint8_t *p) {
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7));
}
#else
typedef uint8x16_t vi;
PG_INLINE vi vi_load(const void *p) { return vld1q_u8(p); }
PG_INLINE vi vi_set1_i8(int x) { return vdupq_n_u8((uint8_t)x); }
PG_INLINE vi vi_and(vi a, vi b) { return a & b; }
PG_INLINE vi vi_or_masked(vi a, vi b, vi mask) { return a | (b & mask); }
PG_INLINE vi vi_shl(vi a, int n) { return (vi)((uint16x8_t)a << n); }
PG_INLINE vi vi_shr(vi a, int n) { return (vi)((uint16x8_t)a >> n); }
PG_INLINE vi vi_lookup(const int8_t *values, vi q) { return vqtbl1q_u8((vi)vld1q_s8(values) ^ vi_set1_i8(0x80), q); }
PG_INLINE uint16x4_t vi_bytes(const uint8_t *p) { // four of them
  uint32_t x;
  memcpy(&x, p, sizeof x);
  return vget_low_u16(vmovl_u8(vcreate_u8(x)));
}
PG_INLINE vf vf_load_e4m3(const uint8_t *p) { return vcvt_f32_f16((float16x4_t)(vi_bytes(p) << 7)); }
#endif

typedef uint32_t rows __attribute__((vector_size(4 * VF_N))); // the same lanes in arithmetic
typedef int32_t signed_rows __attribute__((vector_size(4 * VF_N)));
typedef uint16_t words __attribute__((vector_size(4 * VF_N)));

PG_INLINE vi vi_zero(void) { return (vi)(rows){0}; }
PG_INLINE vi vi_set1(int32_t x) { return (vi)((signed_rows){0} + x); }
PG_INLINE vi vi_add(vi a, vi b) { return (vi)((rows)a + (rows)b); } // sums and products of 32 bits, modulo 2^32
PG_INLINE vi vi_mul(vi a, vi b) { return (vi)((rows)a * (rows)b); }
PG_INLINE vi vi_sub_16(vi a, vi b) { return (vi)((words)a - (words)b); } // the same of 16 bits
PG_INLINE vi vi_mul_16(vi a, vi b) { return (vi)((words)a * (words)b); }
// The low half of each: those of `low` in the even places of 16 bits, those of `high` in the odd ones.
PG_INLINE vi vi_words(vi low, vi high) {
#if VF_N == 16
  return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16));
#elif VF_N == 8
  return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa);
#else
  return (vi)((rows)high << 16 | ((rows)low & 0xffff));
#endif
}
PG_INLINE void vi_store(void *p, vi a) { memcpy(p, &a, sizeof a); }
PG_INLINE vi vi_twice_16(vi a) { return vi_words(a, a); }
PG_INLINE vf vf_of_vi(vi a) { return __builtin_convertvector((signed_rows)a, vf); }

// VF_N bytes as integers of 32 bits; and the lower or upper half of each.
#if VF_N == 16
PG_INLINE vi vi_load_i8(const uint8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
PG_INLINE vi vi_load_u8(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
#elif VF_N == 8
PG_INLINE vi vi_load_i8(const uint8_t *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
PG_INLINE vi vi_load_u8(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
#else
PG_INLINE vi vi_load_i8(const uint8_t *p) { return (vi)((int32x4_t)vshll_n_u16(vi_bytes(p) << 8, 16) >> 24); }
PG_INLINE vi vi_load_u8(const uint8_t *p) { return (vi)vmovl_u16(vi_bytes(p)); }
#endif
PG_INLINE vi vi_load_u4(const uint8_t *p, int upper) {
  const rows x = (rows)vi_load_u8(p);
  return (vi)(upper ? x >> 4 : x & 15);
}

// The low 16 bits of each row; as numbers.
#if VF_N == 16
PG_INLINE __m256i low_words(rows v) { return _mm512_cvtepi32_epi16((vi)v); }
PG_INLINE vf f16_of(rows v) { return _mm512_cvtph_ps(low_words(v)); }
PG_INLINE void put_words(uint8_t *to, rows v) { _mm256_storeu_si256((__m256i *)to, low_words(v)); }
PG_INLINE void put_bytes(uint8_t *to, rows v) { _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((vi)v)); }
#elif VF_N == 8
PG_INLINE __m128i low_words(rows v) {
  const __m256i low = (__m256i)(v & 0xffff);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08));
}
PG_INLINE vf f16_of(rows v) { return _mm256_cvtph_ps(low_words(v)); }
PG_INLINE void put_words(uint8_t *to, rows v) { _mm_storeu_si128((__m128i *)to, low_words(v)); }
PG_INLINE void put_bytes(uint8_t *to, rows v) {
  const __m128i low = low_words(v & 255);
  _mm_storel_epi64((__m128i *)to, _mm_packus_epi16(low, low));
}
#else
PG_INLINE uint16x4_t low_words(rows v) { return vmovn_u32((uint32x4_t)v); }
PG_INLINE vf f16_of(rows v) { return vcvt_f32_f16((float16x4_t)low_words(v)); }
PG_INLINE void put_words(uint8_t *to, rows v) { vst1_u8(to, (uint8x8_t)low_words(v)); }
PG_INLINE void put_bytes(uint8_t *to, rows v) {
  const uint16x4_t low = low_words(v);
  const uint32_t four = vget_lane_u32((uint32x2_t)vmovn_u16(vcombine_u16(low, low)), 0);
  memcpy(to, &four, sizeof four);
}
#endif

// The bits of a from bit `from` of each byte on moved to bit `to`; other bits become anything (mask them).
PG_INLINE vi vi_move_bits(vi a, int from, int to) {
  return from > to ? vi_shr(a, from - to) : from < to ? vi_shl(a, to - from) : a;
}

// The n bits of each byte from bit `from` on.
PG_INLINE vi vi_bits(vi a, int from, int n) {
#if VF_N == 4
  if (from + n == 8) return a >> from;
#endif
  return vi_and(vi_move_bits(a, from, 0), vi_set1_i8((1 << n) - 1));
}

// Codes as unsigned bytes: the codes themselves, or, in formats with a table, their values plus 128.
PG_INLINE vi r16_values(r16_format f, vi q) {
  switch (f.table) {
  case R16_IQ1:
    return vi_lookup(iq1_values, q);
  case R16_IQ2:
    return vi_lookup(iq2_values, q);
  case R16_IQ3_XXS:
    return vi_lookup(iq3_xxs_values, q);
  case R16_IQ3_S:
    return vi_lookup(iq3_s_values, q);
  case R16_IQ4:
    return vi_lookup(iq4_values, q);
  case R16_FP4:
    return vi_lookup(fp4_values, q);
  default:
    return q;
  }
}

// Quartet p of a unit, rows VF_N * part .. of it. f and p are constants.
PG_INLINE vi r16_quartet(r16_format f, const void *unit, int part, int p) {
  const uint8_t *u = (const uint8_t *)unit + part * VF_N * 4,
                *above = u + (f.codes == R16_CRUMBS_BITS ? 2 : 4) * R16_LINE;
  vi q;
  switch (f.codes) {
  case R16_BYTES:
    return vi_load(u + p * R16_LINE);
  case R16_CRUMBS:
  case R16_CRUMBS_BITS:
    q = vi_bits(vi_load(u + p / 4 * R16_LINE), p % 4 * 2, 2);
    break;
  default:
    q = vi_bits(vi_load(u + p / 2 * R16_LINE), p % 2 * 4, 4);
  }
  switch (f.codes) {
  case R16_NIBBLES_BITS:
    q = vi_or_masked(q, vi_move_bits(vi_load(above), p, 4), vi_set1_i8(0x10));
    break;
  case R16_NIBBLES_CRUMBS:
    q = vi_or_masked(q, vi_move_bits(vi_load(above + p / 4 * R16_LINE), p % 4 * 2, 4), vi_set1_i8(0x30));
    break;
  case R16_CRUMBS_BITS:
    q = vi_or_masked(q, vi_move_bits(vi_load(above), p, 2), vi_set1_i8(4));
    break;
  default:
    break;
  }
  return r16_values(f, q);
}
