// Find out whether a plan runs faster on one thread, so that more threads are never slower than one. One thread is
// faster when ops are small, and when other processes want the CPUs: then threads that wait for each other wait for
// time slices. Only the clock can tell, so now and then some runs are made both ways, in turn, and timed
// (docs/threads.md has measurements).
#include "exec/exec.h"

enum {
  SHORT_NS = 1500000, // longer runs are tried only when workers were late: a trial costs them more
  WARM = 8,           // short runs before the first trial
  LONG_WARM = 32,     // long runs before the first trial: for each run of a block, which may be slower
  BLOCK = 9,          // short runs of one kind; the first is not counted, because workers wake up or fall asleep in it
  BLOCKS = 16,     // blocks of a trial, shared and alone in turn: enough to notice workers that are only sometimes late
  LONG_BLOCK = 3,  // the same for long runs
  LONG_BLOCKS = 4, // fewer, because each is long enough to notice late workers
  MARGIN = 16,     // runs are shared when that saves more than a sixteenth
  PAUSE_NS = 100000000, // the least time between two trials
  COST = 100            // ... and at least this many times the cost of the last trial
};

static int pace_is_short(const pg_pace *p) { return p->least < SHORT_NS; }

static int pace_block(const pg_pace *p) { return pace_is_short(p) ? BLOCK : LONG_BLOCK; }

static int pace_kind(const pg_pace *p) { return (p->trial - 1) / pace_block(p) % 2; }

int pg_pace_alone(const pg_pace *p) { return p->trial ? pace_kind(p) : p->alone; }

// End a trial: take the faster way, and pause.
static void pace_decide(pg_pace *p, int64_t now) {
  const int64_t gain = p->ns[1] - p->ns[0], cost = (gain < 0 ? -gain : gain) * pace_block(p) / (pace_block(p) - 1);
  p->alone = gain <= p->ns[1] / MARGIN;
  p->trial = 0;
  p->next = now + (COST * cost > PAUSE_NS ? COST * cost : PAUSE_NS);
}

void pg_pace_ran(pg_pace *p, int64_t n_threads, int64_t began, int64_t now, int late) {
  const int64_t ns = now - began;
  if (p->trial) {
    const int n = pace_block(p), n_blocks = pace_is_short(p) ? BLOCKS : LONG_BLOCKS;
    if ((p->trial - 1) % n) p->ns[pace_kind(p)] += ns;
    const int pair = p->trial % (2 * n) == 0, clear = 2 * p->ns[0] > 3 * p->ns[1] || 2 * p->ns[1] > 3 * p->ns[0];
    if (p->trial++ == n * n_blocks || (pair && clear)) pace_decide(p, now);
    return;
  }
  if (p->runs == 0 || ns < p->least) p->least = ns;
  if (p->runs++ < (pace_is_short(p) ? WARM : LONG_WARM * LONG_BLOCK * (n_threads - 1))) return;
  if (now > p->next && (p->alone || late || (pace_is_short(p) && ns < 4 * SHORT_NS))) {
    p->trial = 1;
    p->ns[0] = p->ns[1] = 0;
  }
}
