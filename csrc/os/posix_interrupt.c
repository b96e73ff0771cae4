// Stop a long run on Ctrl-C. While a plan watches, our handler counts SIGINT and then calls the handler that was set
// before. Between two ops the executor compares the count with the count at the start of the run.
#define _GNU_SOURCE
#include <signal.h>
#include <stddef.h>

#include "os/interrupt.h"
#include "os/thread.h"

static struct {
  pg_lock lock;
  int watchers;
  struct sigaction old; // the handler before ours, usually Python's
  int placed;           // our handler was set and not taken back: a handler that was set later may call it
  int32_t count;
} sigint;

static void on_sigint(int number, siginfo_t *info, void *context) {
  __atomic_add_fetch(&sigint.count, 1, __ATOMIC_RELAXED);
  if (sigint.old.sa_flags & SA_SIGINFO) {
    sigint.old.sa_sigaction(number, info, context);
  } else {
    sigint.old.sa_handler(number);
  }
}

static int sigint_is_ours(const struct sigaction *a) {
  return a->sa_flags & SA_SIGINFO && a->sa_sigaction == on_sigint;
}

static int sigint_is_old(const struct sigaction *a) { return a->sa_sigaction == sigint.old.sa_sigaction; }

static int sigint_is_function(const struct sigaction *a) {
  return a->sa_flags & SA_SIGINFO || (a->sa_handler != SIG_DFL && a->sa_handler != SIG_IGN);
}

int32_t pg_interrupt_watch(void) {
  pg_lock_take(&sigint.lock);
  struct sigaction now;
  sigaction(SIGINT, NULL, &now);
  const int calls_ours = sigint.placed && !sigint_is_old(&now); // perhaps: two that call each other would never end
  if (sigint_is_function(&now) && !sigint_is_ours(&now) && !calls_ours) {
    sigint.old = now;
    sigint.placed = 1;
    struct sigaction ours = now; // keeps its flags, so that the same system calls are interrupted as before
    ours.sa_flags |= SA_SIGINFO;
    ours.sa_sigaction = on_sigint;
    sigaction(SIGINT, &ours, NULL);
  }
  sigint.watchers++;
  const int32_t count = pg_interrupts();
  pg_lock_give(&sigint.lock);
  return count;
}

// Put the old handler back, unless other code has set its own since.
static void sigint_restore(void) {
  struct sigaction now;
  sigaction(SIGINT, NULL, &now);
  if (sigint_is_ours(&now)) {
    sigaction(SIGINT, &sigint.old, NULL);
    sigint.placed = 0;
  }
}

void pg_interrupt_release(void) {
  pg_lock_take(&sigint.lock);
  if (--sigint.watchers == 0) sigint_restore();
  pg_lock_give(&sigint.lock);
}

int32_t pg_interrupts(void) { return __atomic_load_n(&sigint.count, __ATOMIC_RELAXED); }

static void sigint_before_fork(void) { pg_lock_take(&sigint.lock); }

static void sigint_after_fork(void) { pg_lock_give(&sigint.lock); }

// A forked child has no running plans: the threads that ran them are not in it.
static void sigint_in_child(void) {
  sigint.watchers = 0;
  sigint_restore();
  sigint_after_fork();
}

__attribute__((constructor)) static void sigint_follow_forks(void) {
  pg_on_fork(sigint_before_fork, sigint_after_fork, sigint_in_child);
}
