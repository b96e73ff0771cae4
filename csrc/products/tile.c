// Tiles for the weight types that are multiplied straight from memory. Vectors run along k, so neither operand is
// transposed, one column costs no more than a matrix-vector product, and a long sum is split into VF_N or more short
// ones. `type` and `nr` are constants wherever these functions are inlined, so that sums stay in registers.
#include "products/tile.h"

#include "simd/ahead.h"

#define UNROLL _Pragma("GCC unroll 8")

enum {
  AHEAD = 4096, // bytes of prefetch for rows in turn
  BLOCK = 32    // elements of the block types below: an f16 scale, then the values
};

typedef float *const *out;
typedef const char *const *rows;
typedef const float *const *cols;

PG_INLINE int bytes_of(int type, int n) { // n elements
  return type == PG_F32 ? n * 4 : type == PG_Q8_0 ? n / BLOCK * 34 : type == PG_Q4_0 ? n / BLOCK * 18 : n * 2;
}

// The memory to prefetch while `mr` rows are read: the memory behind them, not too near. NULL when rows are not
// adjacent.
PG_INLINE const char *next_rows(int type, int mr, rows a, int64_t k) {
  const int64_t stride = a[1] - a[0];
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

PG_INLINE vf load_n(int type, const char *p, int n) {
  return type == PG_F32 ? vf_load_n((const float *)p, n) : type == PG_F16 ? vf_load_f16_n(p, n) : vf_load_bf16_n(p, n);
}

// Rows one after the other, one stream of memory, each with four sums to hide fma's latency.
PG_INLINE void rows_in_turn(int type, out y, rows a, cols b, int64_t k, int add) {
  enum { NS = 4, STEP = NS * VF_N };
  const int bytes = bytes_of(type, VF_N * 32) / 32, ask = VF_N == 16; // product.c says why
  vf acc[PG_MR];
  UNROLL for (int r = 0; r < PG_MR; r++) {
    const char *p = a[r];
    vf s[NS];
    UNROLL for (int v = 0; v < NS; v++) s[v] = vf_zero();
    int64_t i = 0;
    for (; i + STEP <= k; i += STEP, p += NS * bytes) {
      if (ask) UNROLL for (int o = 0; o < NS * bytes; o += 64) __builtin_prefetch(p + AHEAD + o);
      UNROLL for (int v = 0; v < NS; v++) s[v] = vf_fma(load(type, p + v * bytes), vf_load(b[0] + i + v * VF_N), s[v]);
    }
    for (; i < k; i += VF_N, p += bytes) {
      const int n = (int)PG_MIN(VF_N, k - i);
      s[0] = vf_fma(load_n(type, p, n), vf_load_n(b[0] + i, n), s[0]);
    }
    acc[r] = vf_add(vf_add(s[0], s[1]), vf_add(s[2], s[3]));
  }
  put_sums(y[0], acc, add);
}

PG_INLINE void rows_of_floats(int type, int mr, int nr, out y, rows a, cols b, int64_t k, int add) {
  const int bytes = bytes_of(type, VF_N * 32) / 32;
  const char *next = next_rows(type, mr, a, k);
  vf acc[PG_NR][PG_TALL];
  UNROLL for (int r = 0; r < mr; r++) UNROLL for (int j = 0; j < nr; j++) acc[j][r] = vf_zero();
  int64_t i = 0, o = 0; // element, byte
  for (; i + VF_N <= k; i += VF_N, o += bytes) {
    vf x[PG_NR];
    if (next) next = pg_ask(next, mr * bytes);
    UNROLL for (int j = 0; j < nr; j++) x[j] = vf_load(b[j] + i);
    UNROLL for (int r = 0; r < mr; r++) {
      const vf w = load(type, a[r] + o);
      UNROLL for (int j = 0; j < nr; j++) acc[j][r] = vf_fma(w, x[j], acc[j][r]);
    }
  }
  if (i < k) {
    const int n = (int)(k - i);
    vf w[PG_TALL];
    UNROLL for (int r = 0; r < mr; r++) w[r] = load_n(type, a[r] + o, n);
    UNROLL for (int j = 0; j < nr; j++) {
      const vf x = vf_load_n(b[j] + i, n);
      UNROLL for (int r = 0; r < mr; r++) acc[j][r] = vf_fma(w[r], x, acc[j][r]);
    }
  }
  UNROLL for (int j = 0; j < nr; j++) UNROLL for (int r = 0; r < mr; r += PG_MR) put_sums(y[j] + r, acc[j] + r, add);
}

PG_INLINE void tile_of_floats(int type, int nr, out y, rows a, cols b, int64_t k, int add) {
  rows_of_floats(type, PG_MR, nr, y, a, b, k, add);
}

// -- blocks: a scale times the sum over the block of integers times x

// Vector v of the integers of the block at p. The offset is subtracted here: from the sum, it would turn an infinite x
// into NaN.
PG_INLINE vf integers(int type, const char *p, int v) {
  const int i = v * VF_N;
  if (type == PG_Q8_0) return vf_load_i8((const int8_t *)p + 2 + i);
  return vf_load_i4((const uint8_t *)p + 2 + i % 16, i >= 16); // Q4_0: byte j holds elements j and j + 16
}

PG_INLINE void tile_of_blocks(int type, int nr, out y, rows a, cols b, int64_t k, int add) {
  enum { NV = BLOCK / VF_N };
  const int bytes = bytes_of(type, BLOCK);
  const char *next = next_rows(type, PG_MR, a, k);
  vf acc[PG_NR][PG_MR];
  UNROLL for (int j = 0; j < nr; j++) UNROLL for (int r = 0; r < PG_MR; r++) acc[j][r] = vf_zero();
  for (int64_t i = 0, o = 0; i < k; i += BLOCK, o += bytes) {
    vf x[PG_NR][NV];
    if (next) next = pg_ask(next, PG_MR * bytes);
    UNROLL for (int j = 0; j < nr; j++) UNROLL for (int v = 0; v < NV; v++) x[j][v] = vf_load(b[j] + i + v * VF_N);
    UNROLL for (int r = 0; r < PG_MR; r++) {
      const char *p = a[r] + o;
      const vf d = vf_set1_f16(p);
      vf sum[PG_NR];
      UNROLL for (int v = 0; v < NV; v++) {
        const vf q = integers(type, p, v);
        UNROLL for (int j = 0; j < nr; j++) sum[j] = v ? vf_fma(q, x[j][v], sum[j]) : vf_mul(q, x[j][v]);
      }
      UNROLL for (int j = 0; j < nr; j++) acc[j][r] = vf_fma(d, sum[j], acc[j][r]);
    }
  }
  UNROLL for (int j = 0; j < nr; j++) put_sums(y[j], acc[j], add);
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

#if VF_N >= 8
#define ONE_COLUMN(type)                                                                                               \
  static void tall_##type(out y, rows a, cols b, int64_t k, int add) {                                                 \
    rows_of_floats(PG_##type, PG_TALL, 1, y, a, b, k, add);                                                            \
  }                                                                                                                    \
  static void in_turn_##type(out y, rows a, cols b, int64_t k, int add) { rows_in_turn(PG_##type, y, a, b, k, add); }
ONE_COLUMN(F32)
ONE_COLUMN(F16)
ONE_COLUMN(BF16)
#define BY_TYPE(way) (type == PG_F32 ? way##_F32 : type == PG_F16 ? way##_F16 : type == PG_BF16 ? way##_BF16 : NULL)
#else
#define BY_TYPE(way) NULL
#endif

pg_tile PG_FN(tall_tile)(int64_t type) { return BY_TYPE(tall); }
pg_tile PG_FN(tile_in_turn)(int64_t type) { return BY_TYPE(in_turn); }
