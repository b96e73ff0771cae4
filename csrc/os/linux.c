// Linux: waiting, the CPU time of threads, and what the kernel knows of the CPU.
#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "os/cpu.h"
#include "os/thread.h"

// Of <linux/futex.h>, which does not come with musl's headers.
enum { FUTEX_WAIT_PRIVATE = 128, FUTEX_WAKE_PRIVATE = 129 };

void pg_os_wait(const int32_t *word, int32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

void pg_os_wake_all(const int32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }

void pg_thread_stay(const pg_thread *t, const uint64_t *cpus) {
  pthread_setaffinity_np(t ? (pthread_t)t->handle : pthread_self(), PG_MAX_CPUS / 8, (const cpu_set_t *)cpus);
}

void pg_thread_cpus(uint64_t *cpus) {
  memset(cpus, 0, PG_MAX_CPUS / 8);
  pthread_getaffinity_np(pthread_self(), PG_MAX_CPUS / 8, (cpu_set_t *)cpus);
}

int64_t pg_thread_cpu_ns(const pg_thread *t) {
  clockid_t clock;
  struct timespec ts;
  if (pthread_getcpuclockid((pthread_t)t->handle, &clock) || clock_gettime(clock, &ts)) return 0;
  return ts.tv_sec * 1000000000LL + ts.tv_nsec;
}

#if defined(__x86_64__)
// Linux then allows tile registers in all threads of the process and in its children.
static int may_use_tiles(void) {
  enum { ARCH_GET_XCOMP_PERM = 0x1022, ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
  uint64_t permitted = 0;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 &&
         syscall(SYS_arch_prctl, ARCH_GET_XCOMP_PERM, &permitted) == 0 && (permitted >> XTILEDATA & 1);
}

static sigjmp_buf no_tiles;
static void on_sigill(int signal) { siglongjmp(no_tiles, 1); }

int pg_os_try_tiles(int (*trial)(void)) {
  const struct sigaction leave = {.sa_handler = on_sigill};
  struct sigaction before;
  volatile int works = 0;
  if (!may_use_tiles() || sigaction(SIGILL, &leave, &before)) return 0;
  if (!sigsetjmp(no_tiles, 1)) works = trial();
  sigaction(SIGILL, &before, NULL);
  return works;
}
#elif defined(__aarch64__)
int pg_os_has_dotprod(void) {
  enum { ASIMDDP = 1 << 20 };
  return (getauxval(AT_HWCAP) & ASIMDDP) != 0;
}

int pg_os_has_i8mm(void) {
  enum { I8MM = 1 << 13 };
  return (getauxval(AT_HWCAP2) & I8MM) != 0;
}
#endif
