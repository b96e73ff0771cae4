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
