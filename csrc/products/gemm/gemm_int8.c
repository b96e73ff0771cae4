// The products of gemm.c with the numbers of int8.h.
#define R16_INT8
#include "products/gemm/gemm.c" // NOLINT(bugprone-suspicious-include)
