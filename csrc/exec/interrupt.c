// Ctrl-C in a long run: while plans run that watch for it, SIGINT is counted before the handler of before is called;
// the executor compares the count with that at the start of the run, between two ops.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>

#include "exec/exec.h"

static struct {
  pthread_mutex_t lock;
  int watchers;
  struct sigaction old; // the handler that ours stands before: Python's
  int placed;           // ours was set, and has not been taken back: who was set since may call it
  int32_t count;
} sigint = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void on_sigint(int number, siginfo_t *info, void *context) {
  __atomic_add_fetch(&sigint.count, 1, __ATOMIC_RELAXED);
  if (sigint.old.sa_flags & SA_SIGINFO) {
    sigint.old.sa_sigaction(number, info, context);
  } else {
    sigint.old.sa_handler(number);
  }
}

static int is_ours(const struct sigaction *a) { return a->sa_flags & SA_SIGINFO && a->sa_sigaction == on_sigint; }

static int is_old(const struct sigaction *a) { return a->sa_sigaction == sigint.old.sa_sigaction; }

static int is_function(const struct sigaction *a) {
  return a->sa_flags & SA_SIGINFO || (a->sa_handler != SIG_DFL && a->sa_handler != SIG_IGN);
}

int32_t pg_interrupt_watch(void) {
  pthread_mutex_lock(&sigint.lock);
  struct sigaction now;
  sigaction(SIGINT, NULL, &now);
  const int calls_ours = sigint.placed && !is_old(&now); // perhaps; two that call each other would never end
  if (is_function(&now) && !is_ours(&now) && !calls_ours) {
    sigint.old = now;
    sigint.placed = 1;
    struct sigaction ours = now; // with its flags: a signal interrupts the system calls that it did before
    ours.sa_flags |= SA_SIGINFO;
    ours.sa_sigaction = on_sigint;
    sigaction(SIGINT, &ours, NULL);
  }
  sigint.watchers++;
  const int32_t count = pg_interrupts();
  pthread_mutex_unlock(&sigint.lock);
  return count;
}

// A handler that was set since is left in place.
static void restore(void) {
  struct sigaction now;
  sigaction(SIGINT, NULL, &now);
  if (is_ours(&now)) {
    sigaction(SIGINT, &sigint.old, NULL);
    sigint.placed = 0;
  }
}

void pg_interrupt_release(void) {
  pthread_mutex_lock(&sigint.lock);
  if (--sigint.watchers == 0) restore();
  pthread_mutex_unlock(&sigint.lock);
}

int32_t pg_interrupts(void) { return __atomic_load_n(&sigint.count, __ATOMIC_RELAXED); }

static void before_fork(void) { pthread_mutex_lock(&sigint.lock); }

static void after_fork(void) { pthread_mutex_unlock(&sigint.lock); }

// The threads whose plans ran are not in the child.
static void in_child(void) {
  sigint.watchers = 0;
  restore();
  after_fork();
}

__attribute__((constructor)) static void follow_forks(void) { pthread_atfork(before_fork, after_fork, in_child); }
