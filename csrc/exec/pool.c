// The persistent thread pool: each worker waits for a job of its own, walks its plan, and reports that it has left it.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>

#include "exec/exec.h"

typedef struct worker {
  int32_t job; // number of its latest job; the worker waits for it to change
  int32_t sleepers;
  int32_t seen; // of the jobs before it was started
  char pad[52]; // on a cache line of its own
} worker;

static struct {
  pthread_mutex_t turn; // one plan at a time
  pthread_t thread[PG_MAX_THREADS];
  int n_workers;
  pg_plan *plan;
  int32_t quit;
  int32_t done_sleepers;
  char pad[64];
  int32_t done; // workers that have left the job
  char pad2[64];
  worker worker[PG_MAX_THREADS];
} pool = {.turn = PTHREAD_MUTEX_INITIALIZER};

static void *work(void *arg) {
  worker *w = arg;
  for (int32_t seen = w->seen;;) {
    pg_wait_while(&w->job, seen, &w->sleepers);
    seen = __atomic_load_n(&w->job, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&pool.quit, __ATOMIC_ACQUIRE)) return NULL;
    pg_plan *p = __atomic_load_n(&pool.plan, __ATOMIC_ACQUIRE);
    const int32_t wanted = (int32_t)p->n_threads - 1;
    pg_plan_walk(p, (int)(w - pool.worker) + 1, wanted + 1);
    if (__atomic_add_fetch(&pool.done, 1, __ATOMIC_SEQ_CST) == wanted) pg_wake(&pool.done, &pool.done_sleepers);
  }
}

// A forked child has none of the parent's threads: it starts with an empty pool.
static void in_child(void) {
  pthread_mutex_init(&pool.turn, NULL);
  pool.n_workers = pool.quit = pool.done_sleepers = 0;
}

__attribute__((constructor)) static void follow_forks(void) { pthread_atfork(NULL, NULL, in_child); }

// Signals are for the threads of the program, not for workers; what a worker's own instructions raise stays with it.
static int start(int i) {
  worker *w = pool.worker + i;
  w->seen = w->job;
  w->sleepers = 0;
  sigset_t blocked, before;
  sigfillset(&blocked);
  const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
  for (size_t k = 0; k < sizeof own / sizeof *own; k++) sigdelset(&blocked, own[k]);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  const int failed = pthread_create(&pool.thread[i], NULL, work, w);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return failed ? PG_E_NOMEM : PG_OK;
}

static int grow(int n_workers) {
  if (n_workers > PG_MAX_THREADS - 1) return PG_E_NOMEM;
  for (; pool.n_workers < n_workers; pool.n_workers++)
    if (start(pool.n_workers)) return PG_E_NOMEM;
  return PG_OK;
}

// A new job for the first n workers; the others sleep on.
static void post_job(int n) {
  for (int i = 0; i < n; i++) __atomic_store_n(&pool.worker[i].job, pool.worker[i].job ^ 1, __ATOMIC_RELEASE);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  for (int i = 0; i < n; i++) pg_wake(&pool.worker[i].job, &pool.worker[i].sleepers);
}

int pg_pool_run(pg_plan *p) {
  pthread_mutex_lock(&pool.turn);
  const int32_t wanted = (int32_t)p->n_threads - 1;
  const int status = grow(wanted);
  if (status == PG_OK) {
    __atomic_store_n(&pool.plan, p, __ATOMIC_RELEASE);
    __atomic_store_n(&pool.done, 0, __ATOMIC_RELEASE);
    post_job(wanted);
    pg_plan_walk(p, 0, wanted + 1);
    for (int32_t n; (n = __atomic_load_n(&pool.done, __ATOMIC_ACQUIRE)) != wanted;)
      pg_wait_while(&pool.done, n, &pool.done_sleepers);
  }
  pthread_mutex_unlock(&pool.turn);
  return status;
}

void pg_pool_stop(void) {
  pthread_mutex_lock(&pool.turn);
  __atomic_store_n(&pool.quit, 1, __ATOMIC_RELEASE);
  post_job(pool.n_workers);
  for (int i = 0; i < pool.n_workers; i++) pthread_join(pool.thread[i], NULL);
  pool.n_workers = 0;
  __atomic_store_n(&pool.quit, 0, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&pool.turn);
}
