// The persistent thread pool. The leader (who runs a plan) shares an op with those workers that are awake: it waits for
// those that have yet to wake up once, and lets one rest that again did not run when it should have.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include "exec/exec.h"

// What a worker's `claim` says: NAPPING, where it fell asleep again before an op ended in which it could not take part,
// may be claimed as IDLE may. From FIRST_CLAIM on: it takes part in every step from `from` on; each claim has another
// number.
enum { ASLEEP, NAPPING, WAKING, IDLE, QUIT, FIRST_CLAIM };
enum { AWAKE_NS = 500000 }; // between two runs: Python's part of a token takes less
enum { LATE_NS = 1000000 }; // less is what waking up takes, more a time slice of another
enum { REST_NS = 4000000 }; // half of the first rest ...
enum { MOST_RESTS = 7 };    // ... which doubles so often
enum { LOOK_AT = 8 };       // workers looked at

typedef struct worker {
  int32_t claim;
  int32_t claims; // how many there were
  int32_t from;   // first step to take part in ...
  int32_t rank;   // ... as thread `rank`
  int32_t done;   // last step it has done
  int32_t waits;  // at a barrier within the step
  int32_t rests;  // how often it rested of late
  int64_t until;  // it rests until then
  char pad[24];   // on a cache line of its own
} worker;

static struct {
  pthread_mutex_t turn; // one plan at a time
  pthread_t thread[PG_MAX_THREADS];
  int n_workers;
  int32_t running; // a plan that wants workers
  // the step under way, for its members
  pg_plan *plan;
  int64_t op;
  int32_t nth, n_members;
  char pad[64];
  int32_t step, step_sleepers;
  char pad2[64];
  int32_t arrived, arrived_sleepers; // members that have done the step
  char pad3[64];
  worker worker[PG_MAX_THREADS];
} pool = {.turn = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local worker *self; // of a worker
static _Thread_local pg_team *led; // by a leader

static int32_t load(const int32_t *x) { return __atomic_load_n(x, __ATOMIC_ACQUIRE); }

static void put(int32_t *x, int32_t value) { __atomic_store_n(x, value, __ATOMIC_RELAXED); }

static int32_t after(int32_t step) { return (int32_t)((uint32_t)step + 1); }

static int swap(int32_t *x, int32_t from, int32_t to) {
  return __atomic_compare_exchange_n(x, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);
}

// Waits, first awake and then asleep, until the worker is claimed, or is to quit.
static int32_t claimed(worker *w) {
  for (;;) {
    int32_t claim = load(&w->claim);
    for (const int64_t from = pg_now_ns(); claim == IDLE && pg_now_ns() - from < AWAKE_NS; claim = load(&w->claim))
      pg_cpu_pause();
    if (claim >= QUIT) return claim;
    if (claim == WAKING) {
      swap(&w->claim, WAKING, IDLE);
    } else {
      const int32_t nap = load(&pool.running) ? NAPPING : ASLEEP;
      if (claim != IDLE) {
        pg_sleep_while(&w->claim, claim);
      } else if (swap(&w->claim, IDLE, nap)) {
        pg_sleep_while(&w->claim, nap);
      }
    }
  }
}

static void *work(void *arg) {
  worker *w = self = arg;
  for (int32_t claim; (claim = claimed(w)) != QUIT;) {
    for (int32_t step = load(&w->from);; step = after(step)) {
      pg_wait_while(&pool.step, (int32_t)((uint32_t)step - 1), &pool.step_sleepers);
      if (load(&w->claim) != claim) break; // it was let go, and may not touch the step
      const int32_t rank = load(&w->rank), n = pool.n_members;
      if (rank < pool.nth) pg_plan_op(pool.plan, pool.op, rank, pool.nth);
      put(&w->done, step);
      if (__atomic_add_fetch(&pool.arrived, 1, __ATOMIC_SEQ_CST) == n) pg_wake(&pool.arrived, &pool.arrived_sleepers);
    }
  }
  return NULL;
}

// A forked child has none of the parent's threads: it starts with an empty pool.
static void in_child(void) {
  pthread_mutex_init(&pool.turn, NULL);
  pool.n_workers = pool.running = pool.step_sleepers = pool.arrived_sleepers = 0;
}

__attribute__((constructor)) static void follow_forks(void) { pthread_atfork(NULL, NULL, in_child); }

// Signals are for the threads of the program, not for workers; what a worker's own instructions raise stays with it.
static int start(int i) {
  worker *w = pool.worker + i;
  *w = (worker){.claim = WAKING, .claims = w->claims};
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

// -- the leader's part

int pg_pool_begin(pg_team *t, pg_plan *p) {
  pthread_mutex_lock(&pool.turn);
  t->n = t->late = t->met = t->n_rests = 0;
  t->wanted = (int32_t)p->n_threads - 1;
  t->began = pg_now_ns();
  led = t;
  pool.plan = p;
  __atomic_store_n(&pool.running, 1, __ATOMIC_SEQ_CST);
  const int status = grow(t->wanted);
  for (int i = 0; status == PG_OK && i < t->wanted; i++) {
    worker *w = pool.worker + i;
    if (w->until > t->began) continue;
    if (t->began - w->until > (int64_t)REST_NS << (w->rests + 1)) w->rests = 0;
    if (swap(&w->claim, ASLEEP, WAKING) || swap(&w->claim, NAPPING, WAKING)) pg_wake_all(&w->claim);
  }
  return status;
}

// Whether the worker rests now: not when it was late for the first time, which a moment's work of the system explains.
static int rest(pg_team *t, worker *w, int64_t now) {
  t->n_rests++;
  w->until = now + (w->rests ? (int64_t)REST_NS << w->rests : 0);
  if (w->rests < MOST_RESTS) w->rests++;
  return w->until > now;
}

// Waits for those that are waking up. One that takes longer than that does is to rest: something else has its CPU.
static void meet(pg_team *t) {
  const int64_t from = pg_now_ns();
  int64_t waited = 0;
  for (int i = 0; i < t->wanted; i++) {
    worker *w = pool.worker + i;
    if (w->until > t->began) continue;
    for (int k = 0; load(&w->claim) == WAKING && waited < LATE_NS; k++) {
      if (k < PG_SPINS) {
        pg_cpu_pause();
      } else {
        sched_yield(); // to the worker, where it waits for this very CPU
        waited = pg_now_ns() - from;
      }
    }
    if (load(&w->claim) == WAKING) rest(t, w, from + waited);
  }
  t->met = 1;
}

// Those who are awake, and are not to rest, join.
static void gather(pg_team *t) {
  for (int i = 0; i < t->wanted && t->n < t->wanted; i++) {
    worker *w = pool.worker + i;
    const int32_t claim = load(&w->claim);
    if ((claim != IDLE && claim != NAPPING) || w->until > t->began) continue;
    w->claims = (w->claims + 1) & 0xfffffff;
    put(&w->from, after(pool.step));
    put(&w->rank, t->n + 1);
    if (!swap(&w->claim, claim, FIRST_CLAIM + w->claims)) continue;
    if (claim == NAPPING) pg_wake_all(&w->claim);
    t->member[t->n++] = i;
  }
}

// All are let go: they see it with a step that nobody takes part in.
static void dismiss(pg_team *t) {
  for (int k = 0; k < t->n; k++) __atomic_store_n(&pool.worker[t->member[k]].claim, IDLE, __ATOMIC_SEQ_CST);
  if (t->n) {
    __atomic_store_n(&pool.step, after(pool.step), __ATOMIC_SEQ_CST);
    pg_wake(&pool.step, &pool.step_sleepers);
  }
  t->n = t->late = 0;
}

static int64_t cpu_ns(int i) {
  clockid_t clock;
  struct timespec ts;
  if (pthread_getcpuclockid(pool.thread[i], &clock) || clock_gettime(clock, &ts)) return 0;
  return ts.tv_sec * 1000000000LL + ts.tv_nsec;
}

// Waits for members that are late. One that did not run for half of that time, where the leader alone would not have
// taken longer, is to rest: something else has its CPU.
static void wait_late(pg_team *t, int32_t *word, int32_t value, int32_t *sleepers) {
  const int64_t from = pg_now_ns();
  int64_t cpu[LOOK_AT];
  int late[LOOK_AT], n = 0;
  for (int k = 0; k < t->n && n < LOOK_AT; k++) {
    const worker *w = pool.worker + t->member[k];
    if (load(&w->waits) || load(&w->done) == pool.step) continue;
    late[n] = t->member[k];
    cpu[n] = cpu_ns(late[n]);
    n++;
  }
  pg_wait_while(word, value, sleepers);
  const int64_t now = pg_now_ns(), waited = now - from;
  if (waited < LATE_NS || waited <= from - t->began) return;
  for (int i = 0; i < n; i++) {
    worker *w = pool.worker + late[i];
    if (cpu_ns(late[i]) - cpu[i] >= waited / 2) continue;
    if (rest(t, w, now)) t->late = 1;
  }
}

void pg_pool_wait(int32_t *word, int32_t value, int32_t *sleepers) {
  for (int i = 0; i < PG_SPINS; i++) {
    if (load(word) != value) return;
    pg_cpu_pause();
  }
  if (led && led->n) {
    wait_late(led, word, value, sleepers);
  } else {
    if (self) put(&self->waits, 1);
    pg_wait_while(word, value, sleepers);
    if (self) put(&self->waits, 0);
  }
}

void pg_pool_op(pg_team *t, pg_plan *p, int64_t i) {
  const int32_t most = (int32_t)p->ops[i].n_threads;
  if (t->n < t->wanted) {
    if (most > 1 && !t->met) meet(t);
    gather(t);
  }
  const int32_t nth = t->n < most ? t->n + 1 : most;
  if (t->n == 0) {
    pg_plan_op(p, i, 0, 1);
    return;
  }
  t->began = pg_now_ns();
  pool.op = i;
  pool.nth = nth;
  pool.n_members = t->n;
  put(&pool.arrived, 0);
  __atomic_store_n(&pool.step, after(pool.step), __ATOMIC_SEQ_CST);
  pg_wake(&pool.step, &pool.step_sleepers);
  pg_plan_op(p, i, 0, nth);
  for (int32_t n; (n = load(&pool.arrived)) != t->n;) pg_pool_wait(&pool.arrived, n, &pool.arrived_sleepers);
  if (t->late) dismiss(t);
}

void pg_pool_end(pg_team *t) {
  dismiss(t);
  __atomic_store_n(&pool.running, 0, __ATOMIC_SEQ_CST);
  led = NULL;
  pthread_mutex_unlock(&pool.turn);
}

void pg_pool_stop(void) {
  pthread_mutex_lock(&pool.turn);
  for (int i = 0; i < pool.n_workers; i++) {
    __atomic_store_n(&pool.worker[i].claim, QUIT, __ATOMIC_SEQ_CST);
    pg_wake_all(&pool.worker[i].claim);
  }
  for (int i = 0; i < pool.n_workers; i++) pthread_join(pool.thread[i], NULL);
  pool.n_workers = 0;
  pthread_mutex_unlock(&pool.turn);
}
