// The inner loop of products with many columns: a panel of rows times a group of columns. Both are copied for it, so
// that it reads memory in order: the lanes of a vector are rows, and an element of a column meets all lanes.
#pragma once
#include "kernel.h"

enum {
  PG_PANEL = 2 * VF_N, // rows of a panel
  PG_PANEL_K = 512,    // elements of a sum at a time
  PG_GROUP = VF_N == 16  ? 12
             : VF_N == 8 ? 6
                         : 4,    // columns of a group: with two vectors of rows, as many sums as fit the registers
  PG_GROUP_STEP = VF_N == 16 ? 2 : 1, // groups of fewer columns are filled up to a multiple of it
  PG_COLUMN = PG_PANEL_K + 16 // from one column of a group to the next: off the powers of two, which share cache sets
};

// How a group lies: one column after the other, PG_COLUMN floats apart; or [k][PG_GROUP].
enum pg_group { PG_BY_COLUMN, PG_BY_ELEMENT };

// y[j][0..rows) = or, with `add`, += the rows times column j of a group of n, over k elements. The rows lie in panels
// one after the other, each [k][PG_PANEL]; the last one is filled up. The sum over k is one chain of vf_fma.
void PG_FN(panels)(const float *a, int64_t rows, const float *b, enum pg_group lies, int64_t n, int64_t k,
                   float *const *y, int add);
