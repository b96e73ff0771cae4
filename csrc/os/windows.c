// Windows: all that the library asks of it. No process forks there, and no file becomes shorter while it is mapped.
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include "os/clock.h"
#include "os/cpu.h"
#include "os/interrupt.h"
#include "os/thread.h"
#include "pg.h"

static DWORD WINAPI thread_main(void *arg) {
  const pg_thread *t = arg;
  t->run(t->arg);
  return 0;
}

int pg_thread_begin(pg_thread *t, void (*run)(void *arg), void *arg) {
  t->run = run;
  t->arg = arg;
  t->handle = (uintptr_t)CreateThread(NULL, 0, thread_main, t, 0, NULL);
  return t->handle == 0;
}

void pg_thread_join(pg_thread *t) {
  WaitForSingleObject((HANDLE)t->handle, INFINITE);
  CloseHandle((HANDLE)t->handle);
}

// Windows counts the time of threads in steps of 16 ms, too coarse for what is asked here: whether a thread has run
// during the last milliseconds. This answers that it has.
int64_t pg_thread_cpu_ns(const pg_thread *t) { return pg_now_ns(); }

void pg_thread_stay(const pg_thread *t, const uint64_t *cpus) {}
void pg_thread_cpus(uint64_t *cpus) {}

void pg_thread_yield(void) { SwitchToThread(); }

void pg_on_fork(void (*before)(void), void (*parent)(void), void (*child)(void)) {}

void pg_os_wait(const int32_t *word, int32_t value) {
  WaitOnAddress((volatile void *)(uintptr_t)word, &value, sizeof value, INFINITE);
}

void pg_os_wake_all(const int32_t *word) { WakeByAddressAll((void *)(uintptr_t)word); }

int64_t pg_now_ns(void) {
  LARGE_INTEGER now, per_second;
  QueryPerformanceCounter(&now);
  QueryPerformanceFrequency(&per_second);
  const int64_t n = now.QuadPart, f = per_second.QuadPart;
  return n / f * 1000000000 + n % f * 1000000000 / f;
}

// -- Ctrl-C: Windows calls all handlers, the latest first, until one of them says that it has dealt with it.

static pg_lock lock;
static int watchers;
static int32_t interrupts;

static BOOL WINAPI on_ctrl_c(DWORD event) {
  if (event == CTRL_C_EVENT) __atomic_add_fetch(&interrupts, 1, __ATOMIC_RELAXED);
  return FALSE; // the handlers before ours, usually Python's, are called, too
}

int32_t pg_interrupt_watch(void) {
  pg_lock_take(&lock);
  if (watchers++ == 0) SetConsoleCtrlHandler(on_ctrl_c, TRUE);
  pg_lock_give(&lock);
  return pg_interrupts();
}

void pg_interrupt_release(void) {
  pg_lock_take(&lock);
  if (--watchers == 0) SetConsoleCtrlHandler(on_ctrl_c, FALSE);
  pg_lock_give(&lock);
}

int32_t pg_interrupts(void) { return __atomic_load_n(&interrupts, __ATOMIC_RELAXED); }

// -- mapped files: Windows refuses to make them shorter, so nothing is ever lost

static const int32_t never_lost;

const int32_t *pg_guard(int fd, const void *first, int64_t bytes) { return &never_lost; }

void pg_guard_again(void) {}

int pg_is_lost(const int32_t *lost) { return 0; }

void pg_unguard(const int32_t *lost) {}

// -- the CPU

#if defined(__x86_64__)
int pg_os_try_tiles(int (*trial)(void)) { return 0; } // not asked for: nobody has run them on Windows
#elif defined(__aarch64__)
int pg_os_has_dotprod(void) {
  enum { V82_DP = 43 }; // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
  return IsProcessorFeaturePresent(V82_DP);
}

int pg_os_has_i8mm(void) {
  enum { V82_I8MM = 66 }; // PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE
  return IsProcessorFeaturePresent(V82_I8MM);
}
#endif
