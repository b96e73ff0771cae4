// The order in which products with the precision of f32 add, the same in every way through them. So the bits of a
// column do not depend on the columns beside it, on parts, or on threads; the level, k and whether the weights are
// floats decide.
//
// - Rows of up to PG_SHORT floats: one chain of vf_fma along k (product_short.c).
// - All others: k is cut every PG_CUT elements. Within a cut, lane l of a vector has a chain of vf_fma over the
// elements
//   l, l + VF_N, ...; the lanes are added as vf_sum4 does. Then come the sums of the cuts, one after the other.
// - Products across rows (out_prod): a chain per cut (product_many.c). Their cuts are shorter.
#pragma once
#include "kernel.h"
#include "simd/simd.h"

enum { PG_SHORT = 64, PG_CUT = 512 }; // a cut is a multiple of every block size

// These sources are compiled twice for AVX-512. With PG_PAIRS two numbers of bf16 stand in the place of each float, of
// rows and of columns (product_pairs.c): all that is said of elements is then said of pairs.
#ifdef PG_PAIRS
#define PG_PRODUCT(name) PG_FN(name##_pairs)
PG_INLINE vf vf_multiply(vf a, vf b, vf sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#else
#define PG_PRODUCT(name) PG_FN(name)
PG_INLINE vf vf_multiply(vf a, vf b, vf sum) { return vf_fma(a, b, sum); }
#endif
