// Locks: a number that says whether a thread has the lock, and whether others may sleep until it is given back.
#include "os/thread.h"

enum { FREE, TAKEN, WAITED_FOR };

void pg_lock_take(pg_lock *lock) {
  int32_t state = FREE;
  if (__atomic_compare_exchange_n(&lock->state, &state, TAKEN, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return;
  while (__atomic_exchange_n(&lock->state, WAITED_FOR, __ATOMIC_ACQUIRE) != FREE) pg_os_wait(&lock->state, WAITED_FOR);
}

void pg_lock_give(pg_lock *lock) {
  if (__atomic_exchange_n(&lock->state, FREE, __ATOMIC_RELEASE) == WAITED_FOR) pg_os_wake_all(&lock->state);
}

void pg_do_once(pg_once *once, void (*work)(void)) {
  if (__atomic_load_n(&once->done, __ATOMIC_ACQUIRE)) return;
  pg_lock_take(&once->lock);
  if (!once->done) {
    work();
    __atomic_store_n(&once->done, 1, __ATOMIC_RELEASE);
  }
  pg_lock_give(&once->lock);
}
