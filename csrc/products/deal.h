// Deal work out to threads in chunks of units (groups of rows, tiles or parts). Each thread begins with a large chunk,
// one stream of memory; together these are three quarters of the work. The rest is shared in small chunks, so that a
// thread that was interrupted does less.
#pragma once
#include "kernel.h"

typedef struct pg_deal {
  int64_t n, large, small, n_large, n_chunks;
} pg_deal;

static inline pg_deal pg_deal_of(int64_t n, int nth) {
  enum { SMALL_CHUNKS = 4 }; // per thread
  if (nth == 1) return (pg_deal){n, n, 1, 1, 1};
  const int64_t large = n * 3 / 4 / nth, rest = n - large * nth, n_large = large ? nth : 0;
  const int64_t small = PG_MAX(1, rest / (SMALL_CHUNKS * nth));
  return (pg_deal){n, large, small, n_large, n_large + (rest + small - 1) / small};
}

static inline pg_range pg_chunk_of(const pg_deal *d, int64_t i) {
  if (i < d->n_large) return (pg_range){i * d->large, (i + 1) * d->large};
  const int64_t first = d->n_large * d->large + (i - d->n_large) * d->small;
  return (pg_range){first, PG_MIN(first + d->small, d->n)};
}
