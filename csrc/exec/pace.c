// Whether runs of a plan are faster on one thread: because its ops are small, or because something else wants the CPUs,
// too, and threads that wait for each other wait for their turn there. Only the clock knows; so now and then some runs
// are made either way, in turn, and timed.
#include "exec/exec.h"

enum {
  WARM = 8,             // short runs before the first trial ...
  LONG_WARM = 32,       // ... and so many times the longer ones that a block alone may cost
  SHORT_NS = 1500000,   // shared runs that take longer are tried where threads were late: alone, they may take several
                        // times as long
  BLOCK = 9,            // short runs of one kind, the first of which finds threads asleep, or sends them there
  BLOCKS = 16,          // of either kind, in turn: enough to see that a thread is kept waiting at times
  LONG_BLOCK = 3,       // the same of longer ones ...
  LONG_BLOCKS = 4,      // ... which see that in each
  MARGIN = 16,          // threads share runs that take a part of so many less, and do something else otherwise
  PAUSE_NS = 100000000, // between trials, at least ...
  COST = 100            // ... and so many times what the last one cost
};

static int is_short(const pg_pace *p) { return p->least < SHORT_NS; }

static int block(const pg_pace *p) { return is_short(p) ? BLOCK : LONG_BLOCK; }

static int kind(const pg_pace *p) { return (p->trial - 1) / block(p) % 2; }

int pg_pace_alone(const pg_pace *p) { return p->trial ? kind(p) : p->alone; }

static void decide(pg_pace *p, int64_t now) {
  const int64_t gain = p->ns[1] - p->ns[0], cost = (gain < 0 ? -gain : gain) * block(p) / (block(p) - 1);
  p->alone = gain <= p->ns[1] / MARGIN;
  p->trial = 0;
  p->next = now + (COST * cost > PAUSE_NS ? COST * cost : PAUSE_NS);
}

void pg_pace_ran(pg_pace *p, int64_t n_threads, int64_t began, int64_t now, int late) {
  const int64_t ns = now - began;
  if (p->trial) {
    const int n = block(p), n_blocks = is_short(p) ? BLOCKS : LONG_BLOCKS;
    if ((p->trial - 1) % n) p->ns[kind(p)] += ns;
    const int pair = p->trial % (2 * n) == 0, clear = 2 * p->ns[0] > 3 * p->ns[1] || 2 * p->ns[1] > 3 * p->ns[0];
    if (p->trial++ == n * n_blocks || (pair && clear)) decide(p, now);
    return;
  }
  if (p->runs == 0 || ns < p->least) p->least = ns;
  if (p->runs++ < (is_short(p) ? WARM : LONG_WARM * LONG_BLOCK * (n_threads - 1))) return;
  if (now > p->next && (p->alone || late || (is_short(p) && ns < 4 * SHORT_NS))) {
    p->trial = 1;
    p->ns[0] = p->ns[1] = 0;
  }
}
