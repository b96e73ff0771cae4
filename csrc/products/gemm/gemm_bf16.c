// The products of gemm.c with the numbers of bf16.h.
#define R16_BF16
#include "products/gemm/gemm.c" // NOLINT(bugprone-suspicious-include)
