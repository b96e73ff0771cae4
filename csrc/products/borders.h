// The borders between gemv.c and gemm.c: for products of weights in blocks, the largest number of columns that gemv.c
// multiplies. They depend on the instruction set and on whose CPU it is. `python -m pyggml.tools.measure.borders`
// measures them; docs/products.md has results.
//
// Throughput should never fall as columns are added. When it falls just beyond a border, the border is too low; when
// a column just below it takes longer than one just beyond it, the border is too high.
#pragma once

extern int pg_cpu_is_amd;  // 0: treated as Intel's (exec/isa.c)
extern int pg_cpu_is_zen5; // or later

// Level; FEW: codes are plain bytes or nibbles; FEW_SLOW: codes take longer to unpack; the same two on AMD's CPUs.
#define PG_BORDERS(X)                                                                                                  \
  X(avx2, 32, 12, 24, 12)                                                                                              \
  X(avx512, 32, 12, 24, 12)                                                                                            \
  X(avx512vnni, 16, 10, 24, 14)                                                                                        \
  X(amx, 16, 10, 24, 14)                                                                                               \
  X(neon, 16, 12, 16, 12)                                                                                              \
  X(dotprod, 12, 7, 12, 7)                                                                                             \
  X(i8mm, 10, 6, 10, 6)

enum {
#define X(level, few, few_slow, few_amd, few_slow_amd)                                                                 \
  pg_FEW_##level = few, pg_FEW_SLOW_##level = few_slow, pg_FEW_AMD_##level = few_amd,                                  \
  pg_FEW_SLOW_AMD_##level = few_slow_amd,
  PG_BORDERS(X)
#undef X
  // In the fast form, for all types that products/gemm/int8.h has and all CPUs; the others as above.
  pg_FEW_FAST_avx2 = 4,
  pg_FEW_FAST_avx512vnni = 10,
  pg_FEW_FAST_dotprod = 2,
  pg_FEW_FAST_i8mm = 2,
  // Of F16 and BF16 in the fast form: the most columns that products/gemm/halves.c multiplies itself.
  pg_FEW_HALVES_avx2 = 4,
  pg_FEW_HALVES_avx512vnni = 4
};
