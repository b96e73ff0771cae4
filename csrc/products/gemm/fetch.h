// Prefetch in the course of a computation, which would otherwise wait for the memory of the next panel.
#pragma once
#include "kernel.h"

// Memory that is prefetched in the course of a computation: `run` cache lines that lie `step` bytes apart, then, after
// a jump, the same number again, and so on.
typedef struct r16_fetch {
  const char *at;
  int64_t step, run, jump;
} r16_fetch;

// No prefetch, for weights as they are stored: they are fetched when they are unpacked.
PG_INLINE r16_fetch r16_no_fetch(const void *panel) { return (r16_fetch){.at = (const char *)panel}; }

// The same for a panel whose next memory was fetched. Not by assignment, which gcc makes a copy through the stack, from
// parts that have not arrived there: every tile would wait for it.
PG_INLINE void r16_stop_fetch(r16_fetch *f, const void *panel) {
  f->at = (const char *)panel;
  f->step = f->run = f->jump = 0;
}

// The memory to prefetch next (r16_fetch), and the lines left until it jumps.
typedef struct fetching {
  const char *next;
  int64_t left;
} fetching;

PG_INLINE fetching fetching_of(const r16_fetch *f) { return (fetching){f->at, f->run}; }

PG_INLINE void fetch_two(const r16_fetch *f, fetching *at) {
  __builtin_prefetch(at->next);
  __builtin_prefetch(at->next + f->step);
  at->next += 2 * f->step;
  if ((at->left -= 2) == 0) {
    at->next += f->jump;
    at->left = f->run;
  }
}
