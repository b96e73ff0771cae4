// Between the plan executor and the thread pool.
#pragma once
#include "pg.h"

void pg_plan_walk(pg_plan *p, int ith, int nth); // thread ith's walk through the plan
int pg_pool_run(pg_plan *p);                     // the walk on p->n_threads threads of the pool
void pg_cpu_pause(void);
void pg_wait_while(int32_t *word, int32_t value, int32_t *sleepers); // spin a while, then sleep, until *word != value
void pg_wake(int32_t *word, int32_t *sleepers);                      // after *word has changed: wake who sleeps on it

// SIGINT while a long plan runs (interrupt.c): calls nest, and the handler of before is called as well.
int32_t pg_interrupt_watch(void); // returns pg_interrupts()
void pg_interrupt_release(void);
int32_t pg_interrupts(void); // how often it came while a plan watched
