// The inner loop of products of stored weights: dot products of PG_MR rows of a with a few columns of b.
#pragma once
#include "kernel.h"
#include "products/f32_order.h"

enum { PG_MR = 4, PG_NR = VF_N == 16 ? 6 : VF_N == 8 ? 3 : 2 }; // as many sums as fit the registers
enum { PG_TALL = 8 };                                           // rows of a tall tile

// y[j][0..PG_MR) = the rows a[0..PG_MR) times the column b[j], over k elements; with `add`, added to what y holds.
// The weights are used as they are stored, the columns are dense f32, and sums are in the order of f32_order.h.
typedef void (*pg_tile)(float *const *y, const char *const *a, const float *const *b, int64_t k, int add);

// The kernels for a weight type, entry n - 1 for n columns (n <= PG_NR); NULL: convert the weights to F32 first.
const pg_tile *PG_FN(tiles)(int64_t type);

// PG_TALL rows times one column; NULL: tiles are as fast.
pg_tile PG_FN(tall_tile)(int64_t type);
// PG_MR rows times one column, one row after the other, in the order of AVX-512: for the levels that have it, and
// compiled with AVX2 for those of AMD's CPUs. NULL: there is none.
pg_tile PG_FN(tile_in_turn)(int64_t type);
pg_tile PG_CAT(tile_in_turn, __, avx2)(int64_t type);
