// Linux and macOS: threads, forks, the clock.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <time.h>

#include "os/clock.h"
#include "os/thread.h"

static void *thread_main(void *arg) {
  const pg_thread *t = arg;
  t->run(t->arg);
  return NULL;
}

// The thread blocks all signals except those that its own instructions raise.
int pg_thread_begin(pg_thread *t, void (*run)(void *arg), void *arg) {
  t->run = run;
  t->arg = arg;
  sigset_t blocked, before;
  sigfillset(&blocked);
  const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
  for (size_t k = 0; k < sizeof own / sizeof *own; k++) sigdelset(&blocked, own[k]);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  pthread_t thread;
  const int failed = pthread_create(&thread, NULL, thread_main, t);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!failed) t->handle = (uintptr_t)thread;
  return failed;
}

void pg_thread_join(pg_thread *t) { pthread_join((pthread_t)t->handle, NULL); }

void pg_thread_yield(void) { sched_yield(); }

void pg_on_fork(void (*before)(void), void (*parent)(void), void (*child)(void)) {
  pthread_atfork(before, parent, child);
}

int64_t pg_now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return ts.tv_sec * 1000000000LL + ts.tv_nsec;
}
