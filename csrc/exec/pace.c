// Whether short runs of a plan are faster on one thread: because its ops are small, or because something else wants the
// CPUs, too, and threads that wait for each other wait for their turn there. Only the clock knows; so now and then some
// runs are made either way, in turn, and timed.
#include "exec/exec.h"

enum {
  WARM = 8,             // runs before the first trial
  SHORT_NS = 1500000,   // where none is shorter no trial is made: alone they may cost several times as much
  LONG_NS = 6000000,    // nor where one is as long: there is more to do than before
  BLOCK = 9,            // runs of one kind, the first of which finds threads asleep, or sends them there
  BLOCKS = 16,          // of either kind, in turn: enough to see that a thread is kept waiting at times
  MARGIN = 16,          // threads share runs that take a part of so many less, and do something else otherwise
  PAUSE_NS = 100000000, // between trials; doubles with each that changes nothing ...
  MOST_PAUSES = 6       // ... so often
};

static int kind(const pg_pace *p) { return (p->trial - 1) / BLOCK % 2; }

int pg_pace_alone(const pg_pace *p) { return p->trial ? kind(p) : p->alone; }

static void decide(pg_pace *p, int64_t now) {
  const int alone = p->ns[1] - p->ns[1] / MARGIN <= p->ns[0];
  if (alone != p->alone) {
    p->alone = alone;
    p->pauses = 0;
  } else if (p->pauses < MOST_PAUSES) {
    p->pauses++;
  }
  p->trial = 0;
  p->decided = now;
}

void pg_pace_ran(pg_pace *p, int64_t began, int64_t now, int late) {
  const int64_t ns = now - began;
  if (p->runs == 0 || ns < p->least) p->least = ns;
  if (p->runs < WARM) {
    p->runs++;
  } else if (p->trial) {
    if ((p->trial - 1) % BLOCK) p->ns[kind(p)] += ns;
    const int pair = p->trial % (2 * BLOCK) == 0, clear = 2 * p->ns[0] > 3 * p->ns[1] || 2 * p->ns[1] > 3 * p->ns[0];
    if (p->trial++ == BLOCK * BLOCKS || (pair && clear)) decide(p, now);
  } else if ((p->alone || (p->least < SHORT_NS && ns < LONG_NS)) && now - p->decided > (int64_t)PAUSE_NS
                                                                                           << (late ? 0 : p->pauses)) {
    p->trial = 1;
    p->ns[0] = p->ns[1] = 0;
  }
}
