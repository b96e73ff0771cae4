// Runs a lowered plan: every thread walks the op records, a barrier stands between two ops that share work.
#define _GNU_SOURCE
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "exec/exec.h"

enum { SPINS = 2000 }; // some 20-50 us before a thread goes to sleep

void pg_cpu_pause(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  __asm__ volatile("" ::: "memory");
#endif
}

void pg_wait_while(int32_t *word, int32_t value, int32_t *sleepers) {
  for (int i = 0; i < SPINS; i++) {
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value) return;
    pg_cpu_pause();
  }
  __atomic_add_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(word, __ATOMIC_SEQ_CST) == value)
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
  __atomic_sub_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
}

void pg_wake(int32_t *word, int32_t *sleepers) {
  if (__atomic_load_n(sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

// All threads meet; the last one publishes the status that all of them will act on, so that none leaves alone.
static void barrier(pg_plan *p, int nth) {
  const int32_t phase = __atomic_load_n(&p->phase, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&p->arrived, 1, __ATOMIC_ACQ_REL) == nth) {
    __atomic_store_n(&p->stop, __atomic_load_n(&p->status, __ATOMIC_ACQUIRE), __ATOMIC_RELAXED);
    __atomic_store_n(&p->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&p->phase, phase + 1, __ATOMIC_SEQ_CST);
    pg_wake(&p->phase, &p->sleepers);
  } else {
    pg_wait_while(&p->phase, phase, &p->sleepers);
  }
}

void pg_sync(const pg_task *t, int nth) {
  if (nth > 1) barrier(t->plan, nth);
}

int pg_next(const pg_task *t) { return __atomic_fetch_add(&t->plan->chunks[t->index], 1, __ATOMIC_RELAXED); }

static void fail(pg_plan *p, int32_t status, int64_t op, int64_t detail) {
  int32_t none = PG_OK;
  if (__atomic_compare_exchange_n(&p->status, &none, status, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    p->failed_op = op;
    p->bad_value = detail;
  }
}

int pg_fail(const pg_task *t, enum pg_status s, int64_t detail) {
  fail(t->plan, s, t->index, detail);
  return s;
}

static int64_t now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return ts.tv_sec * 1000000000LL + ts.tv_nsec;
}

static _Thread_local int walking; // this thread is at work in a plan

static void walk(pg_plan *p, int ith, int nth) {
  for (int64_t i = 0; i < p->n_ops; i++) {
    const pg_op *op = p->ops + i;
    const int shared = nth > 1 && op->n_threads > 1;
    if (ith == 0 || shared) {
      int64_t *span = p->spans ? p->spans + (i * p->n_threads + ith) * 2 : NULL;
      if (span) span[0] = now_ns();
      const int status = op->fn(&op->task, ith, shared ? nth : 1);
      if (status) fail(p, status, i, 0);
      if (span) span[1] = now_ns();
      if (ith == 0 && (__atomic_load_n(&p->abort, __ATOMIC_RELAXED) || (p->watch && pg_interrupts() != p->interrupts)))
        fail(p, PG_E_ABORTED, i, 0);
    }
    if (nth == 1) {
      if (p->status) return;
    } else if (shared || i + 1 == p->n_ops ||
               p->ops[i + 1].n_threads > 1) { // a run of small ops needs no barrier inside
      barrier(p, nth);
      if (__atomic_load_n(&p->stop, __ATOMIC_RELAXED)) return;
    }
  }
}

void pg_plan_walk(pg_plan *p, int ith, int nth) {
  walking++;
  walk(p, ith, nth);
  walking--;
}

int pg_plan_run(pg_plan *p, const int64_t *vars) {
  if (walking && __atomic_load_n(&p->busy, __ATOMIC_ACQUIRE)) return PG_E_NESTED;
  while (__atomic_exchange_n(&p->busy, 1, __ATOMIC_ACQUIRE)) pg_wait_while(&p->busy, 1, &p->waiting);
  for (int64_t i = 0; i < p->n_binds; i++)
    *p->binds[i].where = p->binds[i].base + p->binds[i].stride * vars[p->binds[i].var];
  memset(p->chunks, 0, (size_t)p->n_ops * sizeof *p->chunks);
  p->status = p->stop = p->arrived = p->phase = p->sleepers = 0;
  __atomic_store_n(&p->abort, 0, __ATOMIC_RELAXED);
  if (p->watch) p->interrupts = pg_interrupt_watch();
  int status = PG_OK;
  if (p->n_threads <= 1 || walking) {
    pg_plan_walk(p, 0, 1);
  } else {
    status = pg_pool_run(p);
  }
  if (p->watch) pg_interrupt_release();
  if (status == PG_OK) status = p->status;
  __atomic_store_n(&p->busy, 0, __ATOMIC_SEQ_CST);
  pg_wake(&p->busy, &p->waiting);
  return status;
}
