// macOS: waiting, the CPU time of threads, and what the kernel knows of the CPU.
#include <mach/mach.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/sysctl.h>

#include "os/cpu.h"
#include "os/thread.h"

// What os_sync_wait_on_address, new in macOS 14.4, is made of. It is in every macOS since 10.12, and in no header.
enum { UL_COMPARE_AND_WAIT = 1, ULF_WAKE_ALL = 0x100, ULF_NO_ERRNO = 0x1000000 };
extern int __ulock_wait(uint32_t operation, void *address, uint64_t value, uint32_t timeout_us);
extern int __ulock_wake(uint32_t operation, void *address, uint64_t value);

void pg_os_wait(const int32_t *word, int32_t value) {
  __ulock_wait(UL_COMPARE_AND_WAIT | ULF_NO_ERRNO, (void *)(uintptr_t)word, (uint32_t)value, 0);
}

void pg_os_wake_all(const int32_t *word) {
  __ulock_wake(UL_COMPARE_AND_WAIT | ULF_WAKE_ALL | ULF_NO_ERRNO, (void *)(uintptr_t)word, 0);
}

void pg_thread_stay(const pg_thread *t, const uint64_t *cpus) {}
void pg_thread_cpus(uint64_t *cpus) {}

int64_t pg_thread_cpu_ns(const pg_thread *t) {
  thread_basic_info_data_t info;
  mach_msg_type_number_t n = THREAD_BASIC_INFO_COUNT;
  const mach_port_t port = pthread_mach_thread_np((pthread_t)t->handle);
  if (thread_info(port, THREAD_BASIC_INFO, (thread_info_t)&info, &n) != KERN_SUCCESS) return 0;
  return (info.user_time.seconds + info.system_time.seconds) * 1000000000LL +
         (info.user_time.microseconds + info.system_time.microseconds) * 1000LL;
}

#if defined(__x86_64__)
int pg_os_try_tiles(int (*trial)(void)) { return 0; } // no Mac has tiles
#elif defined(__aarch64__)
static int cpu_has(const char *feature) {
  int has = 0;
  size_t n = sizeof has;
  return !sysctlbyname(feature, &has, &n, NULL, 0) && has;
}

int pg_os_has_dotprod(void) { return cpu_has("hw.optional.arm.FEAT_DotProd"); }

int pg_os_has_i8mm(void) { return cpu_has("hw.optional.arm.FEAT_I8MM"); }
#endif
