// The persistent thread pool. The thread that runs a plan is its leader; it shares each op with the workers that are
// awake. It waits once per run for workers that are still waking up. A worker that lost its CPU to another process
// rests for a while: otherwise every op would wait for it (docs/threads.md has measurements).
#include "exec/exec.h"
#include "os/clock.h"
#include "os/thread.h"

// The states of a worker, in its `claim`. NAPPING: it fell asleep while a plan runs that it may still join; the leader
// may claim it as if it were IDLE. FIRST_CLAIM and greater: it takes part in every step, beginning with `from`. Each
// claim has another number, so that a worker notices when it was let go and claimed again.
enum { ASLEEP, NAPPING, WAKING, IDLE, QUIT, FIRST_CLAIM };
enum { AWAKE_NS = 500000 };    // how long a worker stays awake between two runs: longer than Python's part of a token
enum { LATE_NS = 1000000 };    // waking up takes less than this; a time slice of another process takes more
enum { REST_NS = 4000000 };    // half of the first rest; each further rest is twice as long ...
enum { MOST_RESTS = 7 };       // ... up to this many times
enum { STEADY_NS = 32000000 }; // a worker that keeps up for so long in a run has its CPU: its rests become shorter
enum { LOOK_AT = 8 };          // the CPU time is looked up for at most this many late workers

typedef struct worker {
  int32_t claim;
  int32_t claims; // the number of the last claim
  int32_t from;   // first step to take part in
  int32_t rank;   // which thread of an op it is
  int32_t done;   // last step it has done
  int32_t waits;  // it waits at a barrier within the step
  int32_t rests;  // how often it was late lately
  int64_t until;  // end of its rest
  char pad[24];   // each worker has a cache line of its own
} worker;

static struct {
  pg_lock turn; // one plan at a time
  pg_thread thread[PG_MAX_THREADS];
  int n_workers;
  const uint64_t *home;    // the CPUs of each memory node, see pg_pool_place
  int32_t n_homes, placed; // for how many threads a run had when the workers got their CPUs
  int32_t running;         // a plan runs that wants workers
  // the step under way: one op, and the workers that take part in it (members)
  pg_plan *plan;
  int64_t op;
  int32_t nth, n_members;
  char pad[64];
  int32_t step, step_sleepers;
  char pad2[64];
  int32_t arrived, arrived_sleepers; // how many members have done the step
  char pad3[64];
  worker worker[PG_MAX_THREADS];
} pool;

static _Thread_local worker *self; // set in a worker
static _Thread_local pg_team *led; // set in a leader

static int32_t pool_load(const int32_t *x) { return __atomic_load_n(x, __ATOMIC_ACQUIRE); }

static void pool_store(int32_t *x, int32_t value) { __atomic_store_n(x, value, __ATOMIC_RELAXED); }

static int32_t next_step(int32_t step) { return (int32_t)((uint32_t)step + 1); }

static int pool_swap(int32_t *x, int32_t from, int32_t to) {
  return __atomic_compare_exchange_n(x, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);
}

// Wait until the worker is claimed or must quit: first awake, then asleep. Returns the claim.
static int32_t worker_await_claim(worker *w) {
  for (;;) {
    int32_t claim = pool_load(&w->claim);
    for (const int64_t from = pg_now_ns(); claim == IDLE && pg_now_ns() - from < AWAKE_NS; claim = pool_load(&w->claim))
      pg_cpu_pause();
    if (claim >= QUIT) return claim;
    if (claim == WAKING) {
      pool_swap(&w->claim, WAKING, IDLE);
    } else {
      const int32_t nap = pool_load(&pool.running) ? NAPPING : ASLEEP;
      if (claim != IDLE) {
        pg_sleep_while(&w->claim, claim);
      } else if (pool_swap(&w->claim, IDLE, nap)) {
        pg_sleep_while(&w->claim, nap);
      }
    }
  }
}

static void worker_main(void *arg) {
  worker *w = self = arg;
  for (int32_t claim; (claim = worker_await_claim(w)) != QUIT;) {
    for (int32_t step = pool_load(&w->from);; step = next_step(step)) {
      pg_wait_while(&pool.step, (int32_t)((uint32_t)step - 1), &pool.step_sleepers);
      if (pool_load(&w->claim) != claim) break; // it was let go, and must not touch the step
      const int32_t rank = pool_load(&w->rank), n = pool.n_members;
      if (rank < pool.nth) pg_plan_op(pool.plan, pool.op, rank, pool.nth);
      pool_store(&w->done, step);
      if (__atomic_add_fetch(&pool.arrived, 1, __ATOMIC_SEQ_CST) == n) pg_wake(&pool.arrived, &pool.arrived_sleepers);
    }
  }
}

// A forked child has none of the parent's threads: it starts with an empty pool.
static void pool_in_child(void) {
  pool.turn = (pg_lock){0};
  pool.n_workers = pool.placed = pool.running = pool.step_sleepers = pool.arrived_sleepers = 0;
}

__attribute__((constructor)) static void pool_follow_forks(void) { pg_on_fork(NULL, NULL, pool_in_child); }

static int worker_start(int i) {
  worker *w = pool.worker + i;
  *w = (worker){.claim = WAKING, .claims = w->claims};
  return pg_thread_begin(&pool.thread[i], worker_main, w) ? PG_E_NOMEM : PG_OK;
}

static int pool_grow(int n_workers) {
  if (n_workers > PG_MAX_THREADS - 1) return PG_E_NOMEM;
  for (; pool.n_workers < n_workers; pool.n_workers++)
    if (worker_start(pool.n_workers)) return PG_E_NOMEM;
  return PG_OK;
}

// -- memory nodes

static const uint64_t *home_of(int thread, int n_threads) {
  return pool.home + (int64_t)thread * pool.n_homes / n_threads * PG_CPU_WORDS;
}

// Send the workers of a run, and its leader, to the CPUs of their nodes.
static void pool_go_home(pg_team *t) {
  const int n = t->wanted + 1;
  if (pool.placed != n)
    for (int i = 0; i < t->wanted; i++) pg_thread_stay(&pool.thread[i], home_of(i + 1, n));
  pool.placed = n;
  pg_thread_cpus(t->cpus);
  pg_thread_stay(NULL, home_of(0, n));
}

// -- the leader's part

static void worker_wake(worker *w) {
  if (pool_swap(&w->claim, ASLEEP, WAKING) || pool_swap(&w->claim, NAPPING, WAKING)) pg_os_wake_all(&w->claim);
}

int pg_pool_begin(pg_team *t, pg_plan *p) {
  pg_lock_take(&pool.turn);
  t->n = t->late = t->met = t->n_rests = 0;
  t->wanted = (int32_t)p->n_threads - 1;
  t->began = t->run_began = pg_now_ns();
  led = t;
  pool.plan = p;
  __atomic_store_n(&pool.running, 1, __ATOMIC_SEQ_CST);
  const int status = pool_grow(t->wanted);
  p->at_home = pool.n_homes > 0 && status == PG_OK;
  if (p->at_home) pool_go_home(t);
  for (int i = 0; status == PG_OK && i < t->wanted; i++) {
    worker *w = pool.worker + i;
    if (w->until > t->began) continue;
    if (t->began - w->until > (int64_t)REST_NS << (w->rests + 1)) w->rests = 0;
    worker_wake(w);
  }
  return status;
}

// Note that a worker was late. Returns whether it rests now; it does not after the first time, because the system may
// just have had something short to do.
static int worker_rest(pg_team *t, worker *w, int64_t now) {
  t->n_rests++;
  w->until = now + (w->rests ? (int64_t)REST_NS << w->rests : 0);
  if (w->rests < MOST_RESTS) w->rests++;
  return w->until > now;
}

// Wait for the workers that are waking up. A worker that takes longer than that normally takes must rest: another
// process has its CPU.
static void team_meet(pg_team *t) {
  const int64_t from = pg_now_ns();
  int64_t waited = 0;
  for (int i = 0; i < t->wanted; i++) {
    worker *w = pool.worker + i;
    if (w->until > t->began) continue;
    for (int k = 0; pool_load(&w->claim) == WAKING && waited < LATE_NS; k++) {
      if (k < PG_SPINS) {
        pg_cpu_pause();
      } else {
        pg_thread_yield(); // perhaps the worker waits for this very CPU
        waited = pg_now_ns() - from;
      }
    }
    if (pool_load(&w->claim) == WAKING) worker_rest(t, w, from + waited);
  }
  t->met = 1;
}

// Let workers join: those that are awake and do not rest. One that is asleep, because its rest was not over when the
// run began, is woken for a later op.
static void team_gather(pg_team *t) {
  for (int i = 0; i < t->wanted && t->n < t->wanted; i++) {
    worker *w = pool.worker + i;
    if (w->until > t->began) continue;
    const int32_t claim = pool_load(&w->claim);
    if (claim == ASLEEP) worker_wake(w);
    if (claim != IDLE && claim != NAPPING) continue;
    w->claims = (w->claims + 1) & 0xfffffff;
    pool_store(&w->from, next_step(pool.step));
    pool_store(&w->rank, t->n + 1);
    if (!pool_swap(&w->claim, claim, FIRST_CLAIM + w->claims)) continue;
    if (claim == NAPPING) pg_os_wake_all(&w->claim);
    t->member[t->n++] = i;
  }
  // When all take part, each one gets the share of work that it always gets: its memory is near.
  if (t->n == t->wanted)
    for (int k = 0; k < t->n; k++) pool_store(&pool.worker[t->member[k]].rank, t->member[k] + 1);
}

// Let all members go: they notice that the next step has no members.
static void team_dismiss(pg_team *t) {
  for (int k = 0; k < t->n; k++) __atomic_store_n(&pool.worker[t->member[k]].claim, IDLE, __ATOMIC_SEQ_CST);
  if (t->n) {
    __atomic_store_n(&pool.step, next_step(pool.step), __ATOMIC_SEQ_CST);
    pg_wake(&pool.step, &pool.step_sleepers);
  }
  t->n = t->late = 0;
}

// Wait for members that are late. A member must rest when it did not run for half of that time, and the leader alone
// would have finished the op as soon: then another process has the member's CPU.
static void team_wait_late(pg_team *t, int32_t *word, int32_t value, int32_t *sleepers) {
  const int64_t from = pg_now_ns();
  int64_t cpu[LOOK_AT];
  int late[LOOK_AT], n = 0;
  for (int k = 0; k < t->n && n < LOOK_AT; k++) {
    const worker *w = pool.worker + t->member[k];
    if (pool_load(&w->waits) || pool_load(&w->done) == pool.step) continue;
    late[n] = t->member[k];
    cpu[n] = pg_thread_cpu_ns(&pool.thread[late[n]]);
    n++;
  }
  pg_wait_while(word, value, sleepers);
  const int64_t now = pg_now_ns(), waited = now - from;
  if (waited < LATE_NS || waited <= from - t->began) return;
  for (int i = 0; i < n; i++) {
    worker *w = pool.worker + late[i];
    if (pg_thread_cpu_ns(&pool.thread[late[i]]) - cpu[i] >= waited / 2) continue;
    if (worker_rest(t, w, now)) t->late = 1;
  }
}

void pg_pool_wait(int32_t *word, int32_t value, int32_t *sleepers) {
  for (int i = 0; i < PG_SPINS; i++) {
    if (pool_load(word) != value) return;
    pg_cpu_pause();
  }
  if (led && led->n) {
    team_wait_late(led, word, value, sleepers);
  } else {
    if (self) pool_store(&self->waits, 1);
    pg_wait_while(word, value, sleepers);
    if (self) pool_store(&self->waits, 0);
  }
}

void pg_pool_op(pg_team *t, pg_plan *p, int64_t i) {
  const int32_t most = (int32_t)p->ops[i].n_threads;
  if (t->n < t->wanted) {
    t->began = pg_now_ns(); // a rest may be over by now, although the run is not
    if (most > 1 && !t->met) team_meet(t);
    team_gather(t);
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
  pool_store(&pool.arrived, 0);
  __atomic_store_n(&pool.step, next_step(pool.step), __ATOMIC_SEQ_CST);
  pg_wake(&pool.step, &pool.step_sleepers);
  pg_plan_op(p, i, 0, nth);
  for (int32_t n; (n = pool_load(&pool.arrived)) != t->n;) pg_pool_wait(&pool.arrived, n, &pool.arrived_sleepers);
  if (t->late) team_dismiss(t);
}

// Let workers that have kept up for a while rest less the next time: another pool in this process may have spun for
// some milliseconds after its own work, as OpenMP's do.
static void team_forgive(pg_team *t) {
  const int64_t now = pg_now_ns();
  for (int k = 0; k < t->n; k++) {
    worker *w = pool.worker + t->member[k];
    const int64_t since = w->until > t->run_began ? w->until : t->run_began;
    if (now - since > STEADY_NS) w->rests /= 2;
  }
}

void pg_pool_end(pg_team *t) {
  team_forgive(t);
  team_dismiss(t);
  if (pool.plan->at_home) pg_thread_stay(NULL, t->cpus);
  __atomic_store_n(&pool.running, 0, __ATOMIC_SEQ_CST);
  led = NULL;
  pg_lock_give(&pool.turn);
}

static void pool_stop(void) {
  for (int i = 0; i < pool.n_workers; i++) {
    __atomic_store_n(&pool.worker[i].claim, QUIT, __ATOMIC_SEQ_CST);
    pg_os_wake_all(&pool.worker[i].claim);
  }
  for (int i = 0; i < pool.n_workers; i++) pg_thread_join(&pool.thread[i]);
  pool.n_workers = pool.placed = 0;
}

void pg_pool_stop(void) {
  pg_lock_take(&pool.turn);
  pool_stop();
  pg_lock_give(&pool.turn);
}

void pg_pool_place(const uint64_t *cpus, int64_t n_nodes) {
  pg_lock_take(&pool.turn);
  pool_stop(); // new workers have all CPUs again
  pool.home = cpus;
  pool.n_homes = (int32_t)n_nodes;
  pg_lock_give(&pool.turn);
}
