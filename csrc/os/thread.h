// Threads, locks, and waiting until a number in memory changes. posix.c and windows.c have the threads, linux.c,
// macos.c and windows.c the waiting; locks (lock.c) are made of it.
#pragma once
#include "pg.h"

typedef struct pg_lock { // {0}: nobody has it
  int32_t state;
} pg_lock;
void pg_lock_take(pg_lock *lock);
void pg_lock_give(pg_lock *lock);

typedef struct pg_once { // {0}: not done yet
  pg_lock lock;
  int32_t done;
} pg_once;
void pg_do_once(pg_once *once, void (*work)(void)); // other callers wait until the first one has done it

typedef struct pg_thread { // stays where it is until the thread has ended
  uintptr_t handle;
  void (*run)(void *arg);
  void *arg;
} pg_thread;
// Begin a thread that calls run(arg). It leaves the process's signals to other threads. Returns 0, or another number
// when the system has no more threads.
int pg_thread_begin(pg_thread *t, void (*run)(void *arg), void *arg);
void pg_thread_join(pg_thread *t);

// CPUs that a thread may run on, as bits: CPU c is bit c % 64 of word c / 64. On macOS and Windows these do
// nothing.
enum { PG_CPU_WORDS = PG_MAX_CPUS / 64 };
void pg_thread_stay(const pg_thread *t, const uint64_t *cpus); // NULL: the calling thread
void pg_thread_cpus(uint64_t *cpus);                           // of the calling thread

int64_t pg_thread_cpu_ns(const pg_thread *t); // how long it has run on a CPU; only differences mean something
void pg_thread_yield(void);                   // let another thread have this CPU

// Sleep as long as *word == value. It may return early, so callers look again.
void pg_os_wait(const int32_t *word, int32_t value);
void pg_os_wake_all(const int32_t *word); // call it after changing *word: wakes all threads that sleep on it

// Functions to be called around a fork of this process, in the parent before and after it, and in the child. NULL:
// none.
void pg_on_fork(void (*before)(void), void (*parent)(void), void (*child)(void));
