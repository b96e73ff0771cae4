// The interface between the plan executor and the thread pool.
#pragma once
#include "pg.h"

enum { PG_SPINS = 2000 }; // pauses before a waiting thread goes to sleep, about 10 us

void pg_plan_op(pg_plan *p, int64_t i, int ith, int nth); // thread ith's share of op i
void pg_cpu_pause(void);
void pg_sleep_while(const int32_t *word, int32_t value);             // until *word != value
void pg_wait_while(int32_t *word, int32_t value, int32_t *sleepers); // the same, but spin for a while first
void pg_wake(int32_t *word, int32_t *sleepers); // call it after changing *word: wakes the threads that sleep on it

// The leader of a plan and the workers that take part. Workers join and leave between two ops.
typedef struct pg_team {
  int32_t wanted, n; // number of workers: the most, and now
  int32_t late;      // some members must rest
  int32_t n_rests;   // how often a worker was late in this run
  int32_t met;       // the leader has waited for the workers that were asleep
  int64_t began;     // when the op began
  int64_t run_began; // when the run began
  int16_t member[PG_MAX_THREADS];
  uint64_t cpus[PG_MAX_CPUS / 64]; // of the leader, before it went to its memory node
} pg_team;
int pg_pool_begin(pg_team *t, pg_plan *p); // until pg_pool_end, no other plan runs with a team
void pg_pool_op(pg_team *t, pg_plan *p, int64_t i);
void pg_pool_end(pg_team *t);
void pg_pool_wait(int32_t *word, int32_t value, int32_t *sleepers); // as pg_wait_while, within an op of a team

// Decide whether the next run of a plan uses one thread; and note how long a run took (`late`: workers were late).
int pg_pace_alone(const pg_pace *p);
void pg_pace_ran(pg_pace *p, int64_t n_threads, int64_t began, int64_t now, int late);
