// Run a lowered plan. The leader goes through the ops; a team of workers takes part in ops that can be shared.
#include <string.h>

#include "exec/exec.h"
#include "os/clock.h"
#include "os/interrupt.h"
#include "os/thread.h"

void pg_cpu_pause(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb"); // yield does nothing on most of them
#else
  __asm__ volatile("" ::: "memory");
#endif
}

void pg_sleep_while(const int32_t *word, int32_t value) {
  while (__atomic_load_n(word, __ATOMIC_SEQ_CST) == value) pg_os_wait(word, value);
}

void pg_wait_while(int32_t *word, int32_t value, int32_t *sleepers) {
  for (int i = 0; i < PG_SPINS; i++) {
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value) return;
    pg_cpu_pause();
  }
  __atomic_add_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
  pg_sleep_while(word, value);
  __atomic_sub_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
}

void pg_wake(int32_t *word, int32_t *sleepers) {
  if (__atomic_load_n(sleepers, __ATOMIC_SEQ_CST)) pg_os_wake_all(word);
}

void pg_sync(const pg_task *t, int nth) {
  if (nth <= 1) return;
  pg_plan *p = t->plan;
  const int32_t phase = __atomic_load_n(&p->phase, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&p->arrived, 1, __ATOMIC_ACQ_REL) == nth) {
    __atomic_store_n(&p->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&p->phase, phase ^ 1, __ATOMIC_SEQ_CST);
    pg_wake(&p->phase, &p->sleepers);
  } else {
    pg_pool_wait(&p->phase, phase, &p->sleepers);
  }
}

int64_t pg_next(const pg_task *t) { return __atomic_fetch_add(&t->plan->chunks[t->index], 1, __ATOMIC_RELAXED); }

static void plan_fail(pg_plan *p, int32_t status, int64_t op, int64_t detail) {
  int32_t none = PG_OK;
  if (__atomic_compare_exchange_n(&p->status, &none, status, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    p->failed_op = op;
    p->bad_value = detail;
  }
}

int pg_fail(const pg_task *t, enum pg_status s, int64_t detail) {
  plan_fail(t->plan, s, t->index, detail);
  return s;
}

static _Thread_local int walking; // this thread is running a plan

void pg_plan_op(pg_plan *p, int64_t i, int ith, int nth) {
  const pg_op *op = p->ops + i;
  int64_t *span = p->spans ? p->spans + (i * p->n_threads + ith) * 2 : NULL;
  walking++;
  if (span) span[0] = pg_now_ns();
  const int status = op->fn(&op->task, ith, nth);
  if (span) span[1] = pg_now_ns();
  walking--;
  if (status) plan_fail(p, PG_E_KERNEL, i, status); // an own kernel's numbers are not ours
}

// Run one op after the other. `team` (may be NULL) takes part in the ops that are worth sharing.
static void plan_walk(pg_plan *p, pg_team *team) {
  for (int64_t i = 0; i < p->n_ops; i++) {
    if (team && p->ops[i].n_threads > 1) {
      pg_pool_op(team, p, i);
    } else {
      pg_plan_op(p, i, 0, 1);
    }
    if (__atomic_load_n(&p->abort, __ATOMIC_RELAXED) || (p->watch && pg_interrupts() != p->interrupts))
      plan_fail(p, PG_E_ABORTED, i, 0);
    if (__atomic_load_n(&p->status, __ATOMIC_ACQUIRE)) return;
  }
}

// Let the next thread run the plan.
static void plan_end(pg_plan *p) {
  __atomic_store_n(&p->busy, 0, __ATOMIC_SEQ_CST);
  pg_wake(&p->busy, &p->waiting);
}

// Ask the ops of changing sizes for their scratch memory. Returns what they need, or 0 when they have enough.
static int64_t plan_lacks(pg_plan *p) {
  int64_t most = p->work_size;
  for (int64_t i = 0; i < p->n_needs; i++) {
    pg_task *t = &p->ops[p->needs[i].op].task;
    t->work_size = p->needs[i].work(t, (int)p->work_threads);
    if (t->work_size > most) most = t->work_size;
  }
  return most > p->work_size ? most : 0;
}

int pg_plan_run(pg_plan *p, const int64_t *vars, int n_threads, int watch) {
  if (walking && __atomic_load_n(&p->busy, __ATOMIC_ACQUIRE)) return PG_E_NESTED;
  while (__atomic_exchange_n(&p->busy, 1, __ATOMIC_ACQUIRE)) pg_wait_while(&p->busy, 1, &p->waiting);
  for (int64_t i = 0; i < p->n_binds; i++)
    *p->binds[i].where = p->binds[i].base + p->binds[i].stride * vars[p->binds[i].var];
  const int64_t lacks = plan_lacks(p);
  if (lacks) {
    p->bad_value = lacks;
    plan_end(p);
    return PG_E_WORK;
  }
  memset(p->chunks, 0, (size_t)p->n_ops * sizeof *p->chunks);
  p->status = p->arrived = p->phase = p->sleepers = 0;
  p->n_threads = n_threads;
  p->watch = watch;
  __atomic_store_n(&p->abort, 0, __ATOMIC_RELAXED);
  if (p->n_files) pg_guard_again();
  if (p->watch) p->interrupts = pg_interrupt_watch();
  int status = PG_OK;
  if (p->n_threads <= 1 || walking) {
    plan_walk(p, NULL);
  } else {
    const int64_t began = pg_now_ns();
    pg_team team = {.n_rests = 0};
    if (pg_pace_alone(&p->pace)) {
      plan_walk(p, NULL);
    } else {
      status = pg_pool_begin(&team, p);
      if (status == PG_OK) plan_walk(p, &team);
      pg_pool_end(&team);
    }
    pg_pace_ran(&p->pace, p->n_threads, began, pg_now_ns(), team.n_rests > 0);
  }
  if (p->watch) pg_interrupt_release();
  if (status == PG_OK) status = p->status;
  for (int64_t i = 0; status == PG_OK && i < p->n_files; i++) // a file was lost, so zeros were read
    if (pg_is_lost(p->files[i])) status = PG_E_LOST;
  plan_end(p);
  return status;
}
