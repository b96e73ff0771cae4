// Ctrl-C in a long run: while a plan runs, SIGINT also raises a flag that the executor reads between two ops.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>

#include "exec.h"

static struct {
  pthread_mutex_t lock;
  int watchers;
  struct sigaction old; // Python's handler: called as before
  int32_t raised;
} sigint = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void on_sigint(int number, siginfo_t *info, void *context) {
  __atomic_store_n(&sigint.raised, 1, __ATOMIC_RELAXED);
  if (sigint.old.sa_flags & SA_SIGINFO) {
    sigint.old.sa_sigaction(number, info, context);
  } else if (sigint.old.sa_handler != SIG_IGN && sigint.old.sa_handler != SIG_DFL) {
    sigint.old.sa_handler(number);
  }
}

void pg_interrupt_watch(void) {
  pthread_mutex_lock(&sigint.lock);
  if (sigint.watchers == 0) {
    sigaction(SIGINT, NULL, &sigint.old);
    const int python_handles_it =
        sigint.old.sa_flags & SA_SIGINFO || (sigint.old.sa_handler != SIG_DFL && sigint.old.sa_handler != SIG_IGN);
    if (python_handles_it) {
      struct sigaction ours = {.sa_sigaction = on_sigint, .sa_flags = SA_SIGINFO | SA_RESTART};
      sigemptyset(&ours.sa_mask);
      sigaction(SIGINT, &ours, NULL);
    }
    __atomic_store_n(&sigint.raised, 0, __ATOMIC_RELAXED);
  }
  sigint.watchers++;
  pthread_mutex_unlock(&sigint.lock);
}

void pg_interrupt_release(void) {
  pthread_mutex_lock(&sigint.lock);
  if (--sigint.watchers == 0) sigaction(SIGINT, &sigint.old, NULL);
  pthread_mutex_unlock(&sigint.lock);
}

int pg_interrupted(void) { return __atomic_load_n(&sigint.raised, __ATOMIC_RELAXED); }
