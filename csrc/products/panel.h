// The inner loop of products with many columns: a panel of rows times a group of columns. Both are copied for it, so
// that it reads memory in order: the lanes of a vector are rows, and an element of a column meets all lanes.
#pragma once
#include "kernel.h"
#include "products/f32_order.h"

enum {
  PG_PANEL = 2 * VF_N, // rows of a panel
  PG_PANEL_K = PG_CUT, // elements of a sum at a time
  PG_GROUP = VF_N == 16  ? 12
             : VF_N == 8 ? 6
                         : 4,         // columns of a group: with two vectors of rows, as many sums as fit the registers
  PG_GROUP_STEP = VF_N == 16 ? 2 : 1, // groups of fewer columns are filled up to a multiple of it
  PG_COLUMN = PG_PANEL_K + 16 // from one column of a group to the next: off the powers of two, which share cache sets
};

// How a group lies: one column after the other, PG_COLUMN floats apart; or [k][PG_GROUP].
enum pg_group { PG_BY_COLUMN, PG_BY_ELEMENT };

// Lines of memory to prefetch into the L2 cache in the course of a product, which would otherwise wait for them: `run`
// lines, then, after a jump, the same number again, and so on.
typedef struct pg_fetch {
  const char *at;
  int64_t step;            // bytes from one line to the next; 0: nothing is left to fetch
  int64_t run, left, jump; // lines at a time, those that are left of them, and the bytes of the jump
  int64_t n;               // lines still to come
} pg_fetch;

// `n` rows of `bytes`, `nb` apart.
static inline pg_fetch pg_fetch_of(const char *at, int64_t bytes, int64_t nb, int64_t n) {
  const char *first = (const char *)((uintptr_t)at & ~(uintptr_t)63);
  const int64_t run = (at + bytes - first + 63) / 64;
  return (pg_fetch){first, 64, run, run, nb - run * 64, n * run};
}

enum { PG_FETCHES = 3 };

// Floats from a panel to the next: off the powers of two, too.
static inline int64_t pg_panel_size(int64_t k) { return k * PG_PANEL + 16; }

// y[j][0..rows) = or, with `add`, += the rows times column j of a group of n, over k elements. The rows lie in panels
// pg_panel_size apart, each [k][PG_PANEL]; the last one is filled up. The sum over k is that of `chains` chains of
// vf_fma, added as vf_sum4 adds lanes: chain c has the elements c, c + chains, ... of the columns, and in the panels as
// many that lie together. There are one or VF_N chains; k is a multiple of that. What `fetch` says is prefetched
// meanwhile, the first memory first.
void PG_FN(panels)(const float *a, int64_t rows, const float *b, enum pg_group lies, int64_t n, int64_t k, int chains,
                   float *const *y, int add, pg_fetch fetch[PG_FETCHES]);
