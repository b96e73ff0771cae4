// Convert rows of blocks to f32 and back, for Python: the converters of storage.h at a chosen instruction set.
#include "pg.h"

typedef void (*to_f32)(const void *row, float *dst, int64_t n);
typedef void (*from_f32)(const float *src, const float *weights, void *row, int64_t n);

#define LEVEL(isa)                                                                                                     \
  to_f32 pg_to_f32__##isa(int64_t type);                                                                               \
  from_f32 pg_from_f32_weighted__##isa(int64_t type);
LEVEL(generic)
#if defined(PG_X86)
LEVEL(avx2)
LEVEL(avx512)
#elif defined(PG_ARM)
LEVEL(neon)
#endif
#undef LEVEL

static const struct {
  to_f32 (*decoder)(int64_t type);
  from_f32 (*encoder)(int64_t type);
} levels[] = {
    // in the order of exec/isa.c, whose further levels only add kernels for repacked weights
    {pg_to_f32__generic, pg_from_f32_weighted__generic},
#if defined(PG_X86)
    {pg_to_f32__avx2, pg_from_f32_weighted__avx2},
    {pg_to_f32__avx512, pg_from_f32_weighted__avx512},
#elif defined(PG_ARM)
    {pg_to_f32__neon, pg_from_f32_weighted__neon},
#endif
};

// The level whose converters are used at `level`: itself, or the last one that has its own.
static int level_at(int level) {
  const int top = sizeof levels / sizeof *levels - 1;
  return level < 0 ? 0 : level > top ? top : level;
}

int pg_dequantize(int level, int64_t type, const void *rows, float *dst, int64_t n) {
  const to_f32 decode = levels[level_at(level)].decoder(type);
  if (!decode) return PG_E_TYPE;
  decode(rows, dst, n);
  return PG_OK;
}

int pg_quantize(int level, int64_t type, const float *src, const float *weights, void *rows, int64_t n_rows, int64_t n,
                int64_t row_bytes) {
  const from_f32 encode = levels[level_at(level)].encoder(type);
  if (!encode) return PG_E_TYPE;
  for (int64_t r = 0; r < n_rows; r++) encode(src + r * n, weights, (char *)rows + r * row_bytes, n);
  return PG_OK;
}
