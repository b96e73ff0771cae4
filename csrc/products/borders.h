// Columns up to which one way through a product is faster than the next, by instruction set: all such borders that
// depend on it. `python -m pyggml.tools.measure.borders` measures how the time of a column goes with their number.
//
// Throughput should never fall as columns are added. Where it does just beyond a border, the border is too low; where a
// column just below one takes longer than just beyond it, too high.
//
// FEW: gemv.c, then gemm.c, of repacked weights whose codes are plain bytes or nibbles; FEW_SLOW: whose codes take
// longer to unpack; FLOATS: product.c, then gemm.c, of F16 and BF16 that may be rounded. What depends on the width of
// vectors alone stands in product.c.
//
// Cascade Lake, one thread, 2026-11-22. 2048 x 2048, the time of gemm over that of gemv (above 1: gemv is faster),
// avx512vnni: Q4_0 12: 0.97, 13: 1.00, 14: 0.97, 16: 1.02; Q8_0 12: 1.00, 13: 0.95, 14: 0.89, 16: 0.97; Q4_K 12:
// 1.03, 13: 1.07, 14: 1.00, 16: 1.03; Q6_K 10: 1.01, 11: 0.96, 12: 0.95; IQ4_XS 10: 1.03, 12: 0.99; Q3_K 10: 1.01,
// 12: 0.93. Two threads, 16: Q4_0 896 x 4864 1.01, 4864 x 896 1.24, Q4_K 2048 x 5632 1.12. us a column of floats,
// 2048 x 5632, as they are and converted, F16: avx2 192: 422 and 440, 256: 432 and 414; avx512 512: 357 and 617;
// avx512vnni 64: 284 and 509, 96: 353 and 374, 120: 440 and 270. amx: from a machine that had it. Q4_0, avx2, with a
// gemm that took 12 % longer than today's: 33: 1.13, 48: 1.07; Q6_K 13: 1.09, 16: 1.00.
//
// Zen 4, one thread, 2026-11-23, the same product, avx2: Q4_0 16: 1.03, 20: 1.00, 24: 0.98; Q8_0 20: 1.00, 24: 1.00,
// 28: 0.98; Q4_K 16: 1.01, 20: 0.99; Q6_K 10: 1.05, 12: 0.98; IQ4_XS 10: 1.07, 12: 0.94, 16: 0.92; Q3_K 9: 1.04, 12:
// 0.82. avx512vnni: Q4_0 17: 1.04, 24: 1.00, 25: 0.98; Q8_0 17: 1.02, 24: 0.98; Q4_K 17: 1.02, 24: 0.96; Q6_K 11: 1.10,
// 13: 1.02, 16: 0.98; IQ4_XS 11: 1.16, 14: 1.07, 20: 1.02; Q3_K 11: 1.12, 14: 1.04, 16: 0.96. A whole model (0.5 B,
// Q4_0, two threads), 17 and 18: 1.10, 20: 1.03, 24: 1.01.
#pragma once

#define PG_NEVER (INT64_MAX)

extern int pg_cpu_is_amd; // else it is taken for Intel's (exec/isa.c)

// Level, FEW, FEW_SLOW, the same two on AMD's CPUs, FLOATS.
#define PG_BORDERS(X)                                                                                                  \
  X(generic, 0, 0, 0, 0, PG_NEVER)                                                                                     \
  X(avx2, 32, 12, 24, 12, 255)                                                                                         \
  X(avx512, 32, 12, 24, 12, PG_NEVER)                                                                                  \
  X(avx512vnni, 16, 10, 24, 14, 96)                                                                                    \
  X(amx, 16, 16, 16, 16, 32)

enum {
#define X(level, few, few_slow, few_amd, few_slow_amd, floats)                                                         \
  pg_FEW_##level = few, pg_FEW_SLOW_##level = few_slow, pg_FEW_AMD_##level = few_amd,                                  \
  pg_FEW_SLOW_AMD_##level = few_slow_amd,
  PG_BORDERS(X)
#undef X
};
