// Measure the limits of one thread of this machine, for op-bench: reading memory, and multiplying with each instruction
// that kernels use. The compiler must assume that the registers change, so it cannot optimise the work away.
#include "pg.h"

enum { CHAINS = 12 }; // independent sums: more than a multiplication's latency times the number of units that multiply

#define OPAQUE(x) __asm__ volatile("" : "+x"(x))
#define UNROLLED _Pragma("GCC unroll 12")

// CHAINS sums of `vec`, each stepped `n` times; the result is the operations done, `ops` per step.
#define PEAK(name, target, vec, ops, one, step)                                                                        \
  target static double name(const char *p, int64_t n) {                                                                \
    vec acc[CHAINS], x = one;                                                                                          \
    OPAQUE(x);                                                                                                         \
    UNROLLED for (int i = 0; i < CHAINS; i++) acc[i] = x;                                                              \
    for (int64_t r = 0; r < n; r++) {                                                                                  \
      UNROLLED for (int i = 0; i < CHAINS; i++) {                                                                      \
        acc[i] = step(acc[i], x);                                                                                      \
        OPAQUE(acc[i]);                                                                                                \
      }                                                                                                                \
    }                                                                                                                  \
    return (double)(ops)*CHAINS * (double)n;                                                                           \
  }

// All `n` bytes at `p`, a multiple of 4 KiB, four vectors at a time.
#define READ(name, target, vec)                                                                                        \
  target static double name(const char *p, int64_t n) {                                                                \
    vec a = *(const vec *)p, b = a, c = a, d = a;                                                                      \
    for (const vec *q = (const vec *)p, *end = (const vec *)(p + n); q < end; q += 4) {                                \
      a |= q[0], b |= q[1], c |= q[2], d |= q[3];                                                                      \
    }                                                                                                                  \
    a |= b | c | d;                                                                                                    \
    OPAQUE(a);                                                                                                         \
    return (double)n;                                                                                                  \
  }

#define NO_TARGET
typedef float f32x4 __attribute__((vector_size(16)));
typedef int64_t i64x2 __attribute__((vector_size(16)));

#define MUL_ADD(acc, x) ((acc) * (x) + (x))
PEAK(f32_generic, NO_TARGET, f32x4, 8, ((f32x4){1, 1, 1, 1}), MUL_ADD)
READ(read_generic, NO_TARGET, i64x2)

#if defined(PG_X86)
#include "simd/amx.h"
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512bw")))
#define VNNI __attribute__((target("avx512f,avx512vnni")))

#define FMA_256(acc, x) _mm256_fmadd_ps(x, x, acc)
#define FMA_512(acc, x) _mm512_fmadd_ps(x, x, acc)
#define BYTES_256(acc, x) _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(acc, x), x))
#define BYTES_512(acc, x) _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(acc, x), x))
#define DPBUSD(acc, x) _mm512_dpbusd_epi32(acc, x, x)

PEAK(f32_avx2, AVX2, __m256, 16, _mm256_set1_ps(1), FMA_256)
PEAK(f32_avx512, AVX512, __m512, 32, _mm512_set1_ps(1), FMA_512)
PEAK(int8_avx2, AVX2, __m256i, 64, _mm256_set1_epi8(1), BYTES_256)
PEAK(int8_avx512, AVX512, __m512i, 128, _mm512_set1_epi8(1), BYTES_512)
PEAK(int8_vnni, VNNI, __m512i, 128, _mm512_set1_epi8(1), DPBUSD)
READ(read_avx2, AVX2, __m256i)
READ(read_avx512, AVX512, __m512i)

static double bf16_amx(const char *p, int64_t n) {
  TILES_BEGIN();
  TILE_ZERO(0);
  TILE_ZERO(1);
  for (int64_t r = 0; r < n; r += 4) { // a step is as slow as 16 vectors
    TILE_DOT(4, 0, 1);
    TILE_DOT(5, 0, 1);
    TILE_DOT(6, 0, 1);
    TILE_DOT(7, 0, 1);
  }
  TILES_END();
  return 2.0 * 16 * 16 * 32 * (double)((n + 3) / 4 * 4);
}
#endif

static const struct {
  int kind, level; // `level`: the lowest one, in the order of isa.c, that can run it
  double (*run)(const char *p, int64_t n);
} peaks[] = {
    {PG_PEAK_READ, 0, read_generic}, {PG_PEAK_F32, 0, f32_generic},
#if defined(PG_X86)
    {PG_PEAK_READ, 1, read_avx2},    {PG_PEAK_F32, 1, f32_avx2},    {PG_PEAK_INT8, 1, int8_avx2},
    {PG_PEAK_READ, 2, read_avx512},  {PG_PEAK_F32, 2, f32_avx512},  {PG_PEAK_INT8, 2, int8_avx512},
    {PG_PEAK_INT8, 3, int8_vnni},    {PG_PEAK_BF16, 4, bf16_amx},
#endif
};

double pg_peak(int level, enum pg_peak_kind kind, const void *p, int64_t n) {
  for (int i = sizeof peaks / sizeof *peaks - 1; i >= 0; i--) {
    if (peaks[i].kind == (int)kind && peaks[i].level <= level) return peaks[i].run(p, n);
  }
  return 0;
}
