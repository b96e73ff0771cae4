// Tiles for the weight types that are multiplied straight from memory. Vectors run along k, so neither operand is
// transposed, and one column costs no more than a matrix-vector product. All of them add in the order of f32_order.h.
// `type` and `nr` are constants wherever these functions are inlined, so that sums stay in registers.
#include "products/tile.h"

#include "products/borders.h"
#include "simd/ahead.h"

#define UNROLL _Pragma("GCC unroll 8")

enum {
#if VF_N == 8
  AHEAD = PG_AHEAD, // bytes of prefetch for rows in turn ...
  CACHE = 2,        // ... and its hint: 2 is the L2 cache, best on AMD's CPUs, 3 is L1 (docs/products.md)
#else
  AHEAD = 4096,
  CACHE = 3,
#endif
  PAGE = 4096,
  BLOCK = 32,                // elements of the block types below: an f16 scale, then the values
  FLOATS = VF_N == 4 ? 4 : 1 // vectors of floats of a row at a time: short vectors come in pairs from one load
};

typedef float *const *out;
typedef const char *const *rows;
typedef const float *const *cols;

PG_INLINE int bytes_of(int type, int n) { // n elements
  return type == PG_F32 ? n * 4 : type == PG_Q8_0 ? n / BLOCK * 34 : type == PG_Q4_0 ? n / BLOCK * 18 : n * 2;
}

// The memory to prefetch while `mr` rows are read: the memory behind them, not too near. NULL when rows are not
// adjacent, and where prefetchers follow long rows by themselves: eight at a time, on AMD's CPUs before AVX-512, and
// those of F32 on a Zen 5.
PG_INLINE const char *next_rows(int type, int mr, rows a, int64_t k) {
  const int64_t stride = a[1] - a[0];
  const int follows = VF_N == 8 ? pg_cpu_is_amd : pg_cpu_is_zen5 && type == PG_F32;
  if (mr == PG_TALL && stride >= PAGE && follows) return NULL;
  return stride * BLOCK == k * bytes_of(type, BLOCK) ? a[0] + PG_MAX(mr * stride, PG_AHEAD) : NULL;
}

PG_INLINE void put_sums(float *y, const vf *acc, int add) {
  float s[PG_MR];
  vf_sum4(s, acc[0], acc[1], acc[2], acc[3]);
  UNROLL for (int r = 0; r < PG_MR; r++) y[r] = add ? y[r] + s[r] : s[r];
}

// -- floats

PG_INLINE vf load(int type, const char *p) {
  return type == PG_F32 ? vf_load((const float *)p) : type == PG_F16 ? vf_load_f16(p) : vf_load_bf16(p);
}

// w[0..nv) = vectors that lie one behind the other. On Arm one load is enough for two of halves.
PG_INLINE void load_some(int type, const char *p, int nv, vf *w) {
  const int bytes = bytes_of(type, VF_N * 32) / 32;
#if defined(PG_ISA_neon)
  if (type != PG_F32 && nv % 2 == 0) {
    UNROLL for (int v = 0; v < nv; v += 2) {
      const uint16x8_t two = (uint16x8_t)vld1q_u8((const uint8_t *)p + v * bytes);
      w[v] = type == PG_F16 ? vcvt_f32_f16((float16x4_t)vget_low_u16(two)) : (vf)vshll_n_u16(vget_low_u16(two), 16);
      w[v + 1] = type == PG_F16 ? vcvt_high_f32_f16((float16x8_t)two) : (vf)vshll_high_n_u16(two, 16);
    }
    return;
  }
#endif
  UNROLL for (int v = 0; v < nv; v++) w[v] = load(type, p + v * bytes);
}

PG_INLINE vf load_n(int type, const char *p, int n) {
  return type == PG_F32 ? vf_load_n((const float *)p, n) : type == PG_F16 ? vf_load_f16_n(p, n) : vf_load_bf16_n(p, n);
}

// Four cuts at a time, which lie side by side or in several rows: sums of n elements of a[i] times b[i], in the order
// of vectors of 16.
PG_INLINE void four_cuts(int type, float *sums, rows a, cols b, int64_t n) {
  const int bytes = bytes_of(type, VF_N * 32) / 32, nv = 16 / VF_N;
  vf acc[2][4] = {{vf_zero(), vf_zero(), vf_zero(), vf_zero()}, {vf_zero(), vf_zero(), vf_zero(), vf_zero()}};
  int64_t i = 0, o = 0; // element, byte
  for (; i + 2 * VF_N <= n; i += 2 * VF_N, o += 2 * bytes) {
    UNROLL for (int r = 0; r < 4; r++) UNROLL for (int e = 0; e < 2 * bytes; e += 64) {
      __builtin_prefetch(a[r] + o + AHEAD + e, 0, CACHE); // product.c says why
    }
    UNROLL for (int v = 0; v < 2; v++) UNROLL for (int r = 0; r < 4; r++) {
      const vf w = load(type, a[r] + o + v * bytes), x = vf_load(b[r] + i + v * VF_N);
      acc[v % nv][r] = vf_fma(w, x, acc[v % nv][r]);
    }
  }
  for (int v = 0; i < n; i += VF_N, o += bytes, v++) {
    const int some = (int)PG_MIN(VF_N, n - i);
    UNROLL for (int r = 0; r < 4; r++) {
      const vf w = load_n(type, a[r] + o, some), x = vf_load_n(b[r] + i, some);
      if (v % nv)
        acc[1][r] = vf_fma(w, x, acc[1][r]);
      else
        acc[0][r] = vf_fma(w, x, acc[0][r]);
    }
  }
#if VF_N == 8
  const vf q = vf_add(vf_quarters4(acc[0][0], acc[0][1], acc[0][2], acc[0][3]),
                      vf_quarters4(acc[1][0], acc[1][1], acc[1][2], acc[1][3]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(q), _mm256_extractf128_ps(q, 1)));
#else
  vf_sum4(sums, acc[0][0], acc[0][1], acc[0][2], acc[0][3]);
#endif
}

// Rows one after the other, one stream of memory. Several cuts at a time hide fma's latency.
PG_INLINE void rows_in_turn(int type, out y, rows a, cols b, int64_t k, int add) {
  const int64_t n_whole = k / PG_CUT, rest = k % PG_CUT, cut_bytes = bytes_of(type, PG_CUT);
  const char *w[4];
  const float *x[4];
  float sums[4], total[PG_MR];
  for (int r = 0; r < PG_MR; r++) total[r] = add ? y[0][r] : 0;
  int64_t cut = 0, r = 0; // the next one
  for (int64_t i = 0; i < PG_MR * n_whole; i += 4) {
    int64_t cut_of[4], row_of[4];
    for (int j = 0; j < 4; j++) {
      w[j] = a[r] + cut * cut_bytes, x[j] = b[0] + cut * PG_CUT;
      cut_of[j] = cut, row_of[j] = r;
      if (++cut == n_whole) cut = 0, r++;
    }
    four_cuts(type, sums, w, x, PG_CUT);
    for (int j = 0; j < 4; j++) {
      float *t = &total[row_of[j]];
      *t = cut_of[j] || add ? *t + sums[j] : sums[j];
    }
  }
  if (rest) {
    for (int j = 0; j < 4; j++) w[j] = a[j] + n_whole * cut_bytes, x[j] = b[0] + n_whole * PG_CUT;
    four_cuts(type, sums, w, x, rest);
    for (int j = 0; j < 4; j++) total[j] = n_whole || add ? total[j] + sums[j] : sums[j];
  }
  for (int j = 0; j < PG_MR; j++) y[0][j] = total[j];
}

// acc += `nv` vectors of each row, from byte o on, times those of the columns from element i on.
PG_INLINE void add_floats(int type, int mr, int nr, int nv, rows a, int64_t o, cols b, int64_t i, vf (*acc)[PG_TALL]) {
  vf x[PG_NR][FLOATS];
  UNROLL for (int j = 0; j < nr; j++) UNROLL for (int v = 0; v < nv; v++) x[j][v] = vf_load(b[j] + i + v * VF_N);
  UNROLL for (int r = 0; r < mr; r++) {
    vf w[FLOATS];
    load_some(type, a[r] + o, nv, w);
    UNROLL for (int v = 0; v < nv; v++) UNROLL for (int j = 0; j < nr; j++) {
      acc[j][r] = vf_fma(w[v], x[j][v], acc[j][r]);
    }
  }
}

PG_INLINE void rows_of_floats(int type, int mr, int nr, out y, rows a, cols b, int64_t k, int add) {
  const int bytes = bytes_of(type, VF_N * 32) / 32;
  const char *next = next_rows(type, mr, a, k);
  int64_t i = 0, o = 0; // element, byte
  for (int64_t end; i < k; add = 1) {
    vf acc[PG_NR][PG_TALL];
    UNROLL for (int r = 0; r < mr; r++) UNROLL for (int j = 0; j < nr; j++) acc[j][r] = vf_zero();
    for (end = PG_MIN(i + PG_CUT, k); i + FLOATS * VF_N <= end; i += FLOATS * VF_N, o += FLOATS * bytes) {
      if (next) next = pg_ask(next, mr * FLOATS * bytes);
      add_floats(type, mr, nr, FLOATS, a, o, b, i, acc);
    }
    for (; i + VF_N <= end; i += VF_N, o += bytes) add_floats(type, mr, nr, 1, a, o, b, i, acc);
    if (i < end) {
      const int n = (int)(end - i);
      vf w[PG_TALL];
      UNROLL for (int r = 0; r < mr; r++) w[r] = load_n(type, a[r] + o, n);
      UNROLL for (int j = 0; j < nr; j++) {
        const vf x = vf_load_n(b[j] + i, n);
        UNROLL for (int r = 0; r < mr; r++) acc[j][r] = vf_fma(w[r], x, acc[j][r]);
      }
      i = end;
    }
    UNROLL for (int j = 0; j < nr; j++) UNROLL for (int r = 0; r < mr; r += PG_MR) {
      put_sums(y[j] + r, acc[j] + r, add);
    }
  }
}

PG_INLINE void tile_of_floats(int type, int nr, out y, rows a, cols b, int64_t k, int add) {
  rows_of_floats(type, PG_MR, nr, y, a, b, k, add);
}

// -- blocks: the weights are those that a conversion to F32 gives, without rounding

// The scale of the block at p. Reading more than it saves a shuffle.
PG_INLINE vf scale_of(const char *p) {
#if VF_N >= 8
  return vf_set1(_mm256_cvtss_f32(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p))));
#else
  return vf_set1_f16(p);
#endif
}

// Vector v of the weights of the block at p, whose scale is d. The offset is subtracted here: from the sum, it would
// turn an infinite x into NaN.
PG_INLINE vf weights(int type, const char *p, int v, vf d) {
  const int i = v * VF_N;
  if (type == PG_Q8_0) return vf_mul(d, vf_load_i8((const int8_t *)p + 2 + i));
  const uint8_t *codes = (const uint8_t *)p + 2 + i % 16; // Q4_0: byte j holds elements j and j + 16
#if VF_N == 16                                            // one table of products instead of two vectors of them
  const vf table = vf_mul(d, _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
  return _mm512_permutexvar_ps(v ? _mm512_srli_epi32(x, 4) : x, table);
#else
  return vf_mul(d, vf_load_i4(codes, i >= 16));
#endif
}

PG_INLINE void tile_of_blocks(int type, int nr, out y, rows a, cols b, int64_t k, int add) {
  enum { NV = BLOCK / VF_N };
  const int bytes = bytes_of(type, BLOCK);
  const char *next = next_rows(type, PG_MR, a, k);
  for (int64_t i = 0, o = 0, end; i < k; add = 1) {
    vf acc[PG_NR][PG_MR];
    UNROLL for (int j = 0; j < nr; j++) UNROLL for (int r = 0; r < PG_MR; r++) acc[j][r] = vf_zero();
    for (end = PG_MIN(i + PG_CUT, k); i < end; i += BLOCK, o += bytes) {
      vf x[PG_NR][NV];
      if (next) next = pg_ask(next, PG_MR * bytes);
      UNROLL for (int j = 0; j < nr; j++) UNROLL for (int v = 0; v < NV; v++) x[j][v] = vf_load(b[j] + i + v * VF_N);
      UNROLL for (int r = 0; r < PG_MR; r++) {
        const char *p = a[r] + o;
        const vf d = scale_of(p);
        UNROLL for (int v = 0; v < NV; v++) {
          const vf w = weights(type, p, v, d);
          UNROLL for (int j = 0; j < nr; j++) acc[j][r] = vf_fma(w, x[j][v], acc[j][r]);
        }
      }
    }
    UNROLL for (int j = 0; j < nr; j++) put_sums(y[j], acc[j], add);
  }
}

#define TILE(kind, type, nr)                                                                                           \
  static void tile_##type##_##nr(out y, rows a, cols b, int64_t k, int add) {                                          \
    tile_of_##kind(PG_##type, nr, y, a, b, k, add);                                                                    \
  }
#if VF_N == 16
#define COLUMNS(X, ...)                                                                                                \
  X(__VA_ARGS__, 1) X(__VA_ARGS__, 2) X(__VA_ARGS__, 3) X(__VA_ARGS__, 4) X(__VA_ARGS__, 5) X(__VA_ARGS__, 6)
#elif VF_N == 8
#define COLUMNS(X, ...) X(__VA_ARGS__, 1) X(__VA_ARGS__, 2) X(__VA_ARGS__, 3)
#else
#define COLUMNS(X, ...) X(__VA_ARGS__, 1) X(__VA_ARGS__, 2)
#endif
#define NAME(type, nr) tile_##type##_##nr,
#define TILES(kind, type) COLUMNS(TILE, kind, type) static const pg_tile tiles_##type[PG_NR] = {COLUMNS(NAME, type)};
TILES(floats, F32)
TILES(floats, F16)
TILES(floats, BF16)
TILES(blocks, Q8_0)
TILES(blocks, Q4_0)

const pg_tile *PG_FN(tiles)(int64_t type) {
  switch (type) {
  case PG_F32:
    return tiles_F32;
  case PG_F16:
    return tiles_F16;
  case PG_BF16:
    return tiles_BF16;
  case PG_Q8_0:
    return tiles_Q8_0;
  case PG_Q4_0:
    return tiles_Q4_0;
  default:
    return NULL;
  }
}
#define EACH(X) X(F32) X(F16) X(BF16)
#define BY_TYPE(way) (type == PG_F32 ? way##_F32 : type == PG_F16 ? way##_F16 : type == PG_BF16 ? way##_BF16 : NULL)

#define TALL(type)                                                                                                     \
  static void tall_##type(out y, rows a, cols b, int64_t k, int add) {                                                 \
    rows_of_floats(PG_##type, PG_TALL, 1, y, a, b, k, add);                                                            \
  }
EACH(TALL)
pg_tile PG_FN(tall_tile)(int64_t type) { return BY_TYPE(tall); }

#if VF_N >= 8
#define IN_TURN(type)                                                                                                  \
  static void in_turn_##type(out y, rows a, cols b, int64_t k, int add) { rows_in_turn(PG_##type, y, a, b, k, add); }
EACH(IN_TURN)
pg_tile PG_FN(tile_in_turn)(int64_t type) { return BY_TYPE(in_turn); }
#endif
