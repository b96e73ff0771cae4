// The thread pool and executor on their own, for TSAN: shared and unshared ops, barriers inside ops, failures, growth,
// one plan that several threads run, a worker that loses its CPU for a while, and when short runs stay on one thread.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exec/exec.h"
#include "os/clock.h"
#include "os/thread.h"

enum { N = 4096 };

// Every thread adds its share, meets the others, then reads what they wrote.
static int neighbours(const pg_task *t, int ith, int nth) {
  float *x = (float *)t->dst.data, *y = (float *)t->src[0].data;
  for (int i = N * ith / nth; i < N * (ith + 1) / nth; i++) y[i] = x[i] + 1;
  pg_sync(t, nth);
  for (int i = N * ith / nth; i < N * (ith + 1) / nth; i++) x[i] = y[(i + N / 2) % N];
  return PG_OK;
}

// Chunks taken from the shared counter.
static int chunks(const pg_task *t, int ith, int nth) {
  float *x = (float *)t->dst.data;
  for (int c; (c = pg_next(t)) < 16;)
    for (int i = c * N / 16; i < (c + 1) * N / 16; i++) x[i] *= 0.5f;
  return PG_OK;
}

static int refuse(const pg_task *t, int ith, int nth) { return ith == nth - 1 ? pg_fail(t, PG_E_INDEX, 42) : PG_OK; }

static int run(int n_threads, int failing) {
  static float x[N], y[N];
  memset(x, 0, sizeof x);
  pg_op ops[64];
  int64_t counters[64];
  pg_plan p = {.ops = ops, .n_ops = 64, .chunks = counters};
  memset(ops, 0, sizeof ops);
  for (int i = 0; i < 64; i++) {
    ops[i].fn = failing && i == 40 ? refuse : i % 3 ? neighbours : chunks;
    ops[i].n_threads = i % 5 ? (i % 7 ? n_threads : 1 + i % n_threads) : 1;
    ops[i].task.dst.data = (char *)x;
    ops[i].task.src[0].data = (char *)y;
    ops[i].task.plan = &p;
    ops[i].task.index = i;
  }
  for (int r = 0; r < 40; r++) {
    const int status = pg_plan_run(&p, NULL, n_threads, 0);
    if (status != (failing ? PG_E_INDEX : PG_OK)) return 1;
    if (failing && (p.failed_op != 40 || p.bad_value != 42)) return 2;
    for (int i = 1; i < N; i++)
      if (x[i] != x[0]) return 3;
  }
  return 0;
}

// Counts itself in, and is wrong where it is not what this run of this plan should find: vars[0], then rising by one.
static int count(const pg_task *t, int ith, int nth) {
  int64_t *x = (int64_t *)t->dst.data;
  if (ith == 0) x[0] += 1;
  pg_sync(t, nth);
  for (int c; (c = pg_next(t)) < 8;) x[1 + c] += x[0];
  return PG_OK;
}

enum { CALLERS = 8, RUNS = 50 };

static struct {
  pg_plan plan;
  int n_threads;
  int64_t x[9], bound, wrong;
} both;

// The first op: what was bound for this run, and nothing that another left half done.
static int begin(const pg_task *t, int ith, int nth) {
  (void)t, (void)nth;
  if (ith) return PG_OK;
  for (int i = 0; i < 9; i++) both.x[i] = both.bound;
  return PG_OK;
}

static int finish(const pg_task *t, int ith, int nth) {
  (void)t, (void)nth;
  if (ith) return PG_OK;
  int64_t want = both.bound;
  for (int k = 1; k <= 6; k++) want += both.bound + k;
  both.wrong += both.x[0] != both.bound + 6;
  for (int i = 1; i < 9; i++) both.wrong += both.x[i] != want;
  return PG_OK;
}

static int32_t n_failed;

static void caller(void *arg) {
  const int64_t var = (int64_t)(size_t)arg * 1000;
  for (int r = 0; r < RUNS; r++)
    if (pg_plan_run(&both.plan, &var, both.n_threads, 1)) __atomic_add_fetch(&n_failed, 1, __ATOMIC_RELAXED);
}

// Threads that run one plan, each with a value of its own, take turns.
static int together(int n_threads) {
  pg_op ops[8];
  int64_t counters[8];
  memset(ops, 0, sizeof ops);
  for (int i = 0; i < 8; i++) {
    ops[i].fn = i == 0 ? begin : i == 7 ? finish : count;
    ops[i].n_threads = i % 7 ? n_threads : 1;
    ops[i].task.dst.data = (char *)both.x;
    ops[i].task.plan = &both.plan;
    ops[i].task.index = i;
  }
  const pg_bind bind = {.where = &both.bound, .stride = 1};
  both.plan = (pg_plan){.ops = ops, .n_ops = 8, .binds = &bind, .n_binds = 1, .chunks = counters};
  both.n_threads = n_threads;
  both.wrong = 0;
  pg_thread thread[CALLERS];
  for (size_t i = 0; i < CALLERS; i++)
    if (pg_thread_begin(&thread[i], caller, (void *)(i + 1))) return 1;
  for (int i = 0; i < CALLERS; i++) pg_thread_join(&thread[i]);
  return n_failed || both.wrong;
}

static struct {
  int32_t held; // the worker sleeps meanwhile, as if another process had its CPU
  pg_thread waker;
  int n_shared; // ops
} lapse;

static void pass(int64_t ns) {
  for (const int64_t from = pg_now_ns(); pg_now_ns() - from < ns;) pg_thread_yield();
}

static void let_go(void *arg) {
  (void)arg;
  pass(5000000);
  __atomic_store_n(&lapse.held, 0, __ATOMIC_SEQ_CST);
  pg_os_wake_all(&lapse.held);
}

static int hold(const pg_task *t, int ith, int nth) {
  (void)t, (void)ith, (void)nth;
  __atomic_store_n(&lapse.held, 1, __ATOMIC_SEQ_CST);
  return pg_thread_begin(&lapse.waker, let_go, NULL) ? PG_E_NOMEM : PG_OK;
}

static int lose(const pg_task *t, int ith, int nth) {
  (void)t, (void)nth;
  if (ith) pg_sleep_while(&lapse.held, 1);
  return PG_OK;
}

static int end_lapse(const pg_task *t, int ith, int nth) {
  (void)t, (void)ith, (void)nth;
  pg_thread_join(&lapse.waker);
  return PG_OK;
}

static int share(const pg_task *t, int ith, int nth) {
  (void)t;
  if (ith) return PG_OK;
  lapse.n_shared += nth == 2;
  pass(500000);
  return PG_OK;
}

enum { SHARES = 400 };

// A run of up to SHARES ops that parts[0..n_parts) take turns in.
static int run_of(int n_ops, int (*const *parts)(const pg_task *t, int ith, int nth), int n_parts) {
  static pg_op ops[SHARES]; // half a megabyte
  static int64_t counters[SHARES];
  pg_plan p = {.ops = ops, .n_ops = n_ops, .chunks = counters};
  memset(ops, 0, sizeof ops);
  for (int i = 0; i < n_ops; i++) {
    ops[i].fn = parts[i % n_parts];
    ops[i].n_threads = ops[i].fn == lose || ops[i].fn == share ? 2 : 1;
    ops[i].task.plan = &p;
    ops[i].task.index = i;
  }
  return pg_plan_run(&p, NULL, 2, 0);
}

// A worker that was late twice rests for some milliseconds, and then takes part in the run that has begun meanwhile,
// also when it fell asleep before that.
static int rejoins(int64_t ns_between) {
  int (*const lapses[])(const pg_task *t, int ith, int nth) = {hold, lose, end_lapse};
  int (*const shares[])(const pg_task *t, int ith, int nth) = {share};
  lapse.n_shared = 0;
  pg_pool_stop(); // new workers have not been late yet
  if (run_of(6, lapses, 3)) return 0;
  pass(ns_between);
  return !run_of(SHARES, shares, 1) && lapse.n_shared;
}

// Runs of a plan that take so long shared and alone, on a clock of its own, for so many seconds: how much longer the
// last half of them took than in the faster way, in parts of a thousand; -1 where most of them went the other.
static int lost(pg_pace *p, int64_t shared_ns, int64_t alone_ns, int64_t seconds, int late) {
  static int64_t clock = 0;
  const int64_t begin = clock, end = begin + seconds * 1000000000;
  int64_t n[2] = {0};
  while (clock < end) {
    const int is_alone = pg_pace_alone(p);
    const int64_t from = clock;
    clock += is_alone ? alone_ns : shared_ns;
    pg_pace_ran(p, 2, from, clock, late && !is_alone);
    if (from > begin + (end - begin) / 2) n[is_alone]++;
  }
  const int best = alone_ns < shared_ns;
  const int64_t fast = best ? alone_ns : shared_ns, slow = best ? shared_ns : alone_ns;
  return n[best] < n[!best] ? -1 : (int)(1000 * n[!best] * (slow - fast) / (fast * (n[0] + n[1])));
}

static int is_bad(int lost) { return lost < 0 || lost > 15; }

// The faster way is taken, also after it has changed, and looking for it costs about a hundredth; runs that take long
// are shared without a look where no thread was late.
static int paces(void) {
  pg_pace p = {0}, small = {0}, large = {0};
  if (is_bad(lost(&p, 300000, 500000, 40, 0))) return 1;
  if (is_bad(lost(&p, 3000000, 600000, 80, 0))) return 2;
  if (is_bad(lost(&p, 300000, 500000, 80, 0))) return 3;
  if (lost(&small, 98000, 100000, 20, 0) != -1) return 4; // what a second thread hardly helps, it leaves alone
  if (lost(&large, 13000000, 25000000, 40, 0) != 0) return 5;
  if (is_bad(lost(&large, 25000000, 13000000, 80, 1))) return 6;
  if (is_bad(lost(&large, 13000000, 25000000, 80, 0))) return 7;
  if (is_bad(lost(&large, 13000000, 25000000, 80, 1))) return 8;
  pg_pace wide = {0};
  int64_t clock = 0;
  for (int i = 0; i < 1000; i++, clock += 1000000000) { // 16 threads share what one takes too long for to find it out
    if (pg_pace_alone(&wide)) return 9;
    pg_pace_ran(&wide, 16, clock, clock + 1000000000, 1);
  }
  return 0;
}

int main(void) {
  const int bad_pace = paces();
  if (bad_pace) {
    printf("pool_test: pace, check %d\n", bad_pace);
    return 1;
  }
  for (int n = 1; n <= 4; n++)
    for (int failing = 0; failing < 2; failing++) {
      const int bad = run(n, failing);
      if (bad) {
        printf("pool_test: %d threads, failing %d: check %d\n", n, failing, bad);
        return 1;
      }
    }
  for (int n = 1; n <= 4; n++)
    if (together(n)) {
      printf("pool_test: %d callers of one plan with %d threads: wrong numbers\n", CALLERS, n);
      return 1;
    }
  for (int64_t ns = 0; ns <= 4000000; ns += 4000000) // while it is awake, and when it has fallen asleep
    if (!rejoins(ns)) {
      puts("pool_test: a worker that was late stayed away");
      return 1;
    }
  if (run(2, 0)) return 1; // fewer threads than workers
  pg_pool_stop();
  if (run(3, 0)) return 1; // and again after a stop
  pg_pool_stop();
  puts("pool_test: ok");
  return 0;
}
