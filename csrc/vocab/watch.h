// Notice Ctrl-C while a long text is read: once in many steps, compare the number of SIGINTs with that at the start.
#pragma once
#include "os/interrupt.h"
#include "vocab/vocab.h"

enum { WATCH_STEPS = 1 << 20 };

typedef struct {
  int64_t steps; // so far, since the last look
  int32_t before;
  int on;
} text_watch;

static inline text_watch watch_begin(int on) {
  return (text_watch){.steps = 0, .before = on ? pg_interrupt_watch() : 0, .on = on};
}

static inline int watch_stops(text_watch *w, int64_t steps) {
  w->steps += steps;
  if (!w->on || w->steps < WATCH_STEPS) return 0;
  w->steps = 0;
  return pg_interrupts() != w->before;
}

// The return value of a function with `watch`: PG_STOPPED after SIGINT, else n.
static inline int64_t watch_end(const text_watch *w, int64_t n) {
  if (w->on) pg_interrupt_release();
  return n;
}
