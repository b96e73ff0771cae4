// Products of matrices of F16 and BF16 in the fast form (halves.c), for gemm.c and mul_mat_r16.c.
#pragma once
#include "products/gemm/gemm.h"

// The functions of gemm.h for such a product.
void PG_FN(r16_put_half_columns)(const r16_columns *c, const r16_product *p, r16_share share);
void PG_FN(r16_put_halves)(r16_panel *panel, const r16_product *p, int64_t tile, int64_t strip);
