// The persistent thread pool: workers wait for a new job, walk its plan, and report that they have left it.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>

#include "exec.h"

enum { JOB_STEP = 512 };

static struct {
  pthread_mutex_t turn; // one plan at a time
  pthread_t thread[PG_MAX_THREADS];
  int n_workers;
  int started; // atfork handler installed
  pg_plan *plan;
  int32_t quit;
  int32_t job_sleepers, done_sleepers;
  char pad[64];
  int32_t job; // number of the job * JOB_STEP + workers that take part in it; workers wait for it to change
  char pad2[64];
  int32_t done; // workers that have left the job
} pool = {.turn = PTHREAD_MUTEX_INITIALIZER};

typedef struct start {
  int id;
  int32_t job;
} start;

static void *worker(void *arg) {
  const start s = *(start *)arg;
  free(arg);
  int32_t seen = s.job;
  for (;;) {
    pg_wait_while(&pool.job, seen, &pool.job_sleepers);
    seen = __atomic_load_n(&pool.job, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&pool.quit, __ATOMIC_ACQUIRE)) return NULL;
    const int32_t wanted = seen % JOB_STEP;
    if (s.id >= wanted) continue;
    pg_plan_walk(__atomic_load_n(&pool.plan, __ATOMIC_ACQUIRE), s.id + 1);
    if (__atomic_add_fetch(&pool.done, 1, __ATOMIC_SEQ_CST) == wanted) pg_wake(&pool.done, &pool.done_sleepers);
  }
}

// A forked child has none of the parent's threads: it starts with an empty pool.
static void after_fork(void) {
  pthread_mutex_init(&pool.turn, NULL);
  pool.n_workers = 0;
  pool.job_sleepers = pool.done_sleepers = 0;
}

static int grow(int n_workers) {
  if (n_workers > PG_MAX_THREADS - 1) return PG_E_NOMEM;
  if (!pool.started) {
    pthread_atfork(NULL, NULL, after_fork);
    pool.started = 1;
  }
  while (pool.n_workers < n_workers) {
    start *s = malloc(sizeof *s);
    if (!s) return PG_E_NOMEM;
    *s = (start){pool.n_workers, __atomic_load_n(&pool.job, __ATOMIC_ACQUIRE)};
    if (pthread_create(&pool.thread[pool.n_workers], NULL, worker, s)) {
      free(s);
      return PG_E_NOMEM;
    }
    pool.n_workers++;
  }
  return PG_OK;
}

static void post_job(int32_t wanted) {
  const int32_t number = (pool.job / JOB_STEP + 1) % (INT32_MAX / JOB_STEP);
  __atomic_store_n(&pool.job, number * JOB_STEP + wanted, __ATOMIC_SEQ_CST);
  pg_wake(&pool.job, &pool.job_sleepers);
}

int pg_pool_run(pg_plan *p) {
  pthread_mutex_lock(&pool.turn);
  const int32_t wanted = (int32_t)p->n_threads - 1;
  const int status = grow(wanted);
  if (status == PG_OK) {
    __atomic_store_n(&pool.plan, p, __ATOMIC_RELEASE);
    __atomic_store_n(&pool.done, 0, __ATOMIC_RELEASE);
    post_job(wanted);
    pg_plan_walk(p, 0);
    for (int32_t n; (n = __atomic_load_n(&pool.done, __ATOMIC_ACQUIRE)) != wanted;)
      pg_wait_while(&pool.done, n, &pool.done_sleepers);
  }
  pthread_mutex_unlock(&pool.turn);
  return status;
}

int pg_pool_reserve(int n_threads) {
  pthread_mutex_lock(&pool.turn);
  const int status = grow(n_threads - 1);
  pthread_mutex_unlock(&pool.turn);
  return status;
}

void pg_pool_stop(void) {
  pthread_mutex_lock(&pool.turn);
  __atomic_store_n(&pool.quit, 1, __ATOMIC_RELEASE);
  post_job(0);
  for (int i = 0; i < pool.n_workers; i++) pthread_join(pool.thread[i], NULL);
  pool.n_workers = 0;
  __atomic_store_n(&pool.quit, 0, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&pool.turn);
}
