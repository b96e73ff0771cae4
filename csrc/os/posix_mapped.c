// Survive mapped files that shrink: reading a page that is gone would end the process by SIGBUS. Our handler maps zeros
// in place of that page and all pages after it, and notes the loss. Readers check the note afterwards.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/thread.h"
#include "pg.h"

typedef struct mapped { // reused, but never freed: the handler may walk the list at any time
  int32_t lost;         // must be the first member: callers hold its address
  int fd;
  int64_t bytes;
  uintptr_t first, end; // first 0: not in use
  struct mapped *next;
} mapped;

static mapped *list;
static pg_lock lock;
static struct sigaction before;
static uintptr_t page_size;

static int mapped_put_zeros(uintptr_t address) {
  for (mapped *m = __atomic_load_n(&list, __ATOMIC_ACQUIRE); m; m = m->next) {
    const uintptr_t first = __atomic_load_n(&m->first, __ATOMIC_ACQUIRE);
    if (!first || address < first || address >= m->end) continue;
    const uintptr_t page = address / page_size * page_size;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    if (mmap((void *)page, m->end - page, PROT_READ, flags, -1, 0) == MAP_FAILED) return 0;
    __atomic_store_n(&m->lost, 1, __ATOMIC_RELEASE);
    return 1;
  }
  return 0;
}

static _Thread_local int handed_on; // this thread is in the handler before ours

static void on_sigbus(int number, siginfo_t *info, void *context) {
  const int saved = errno;
  if (mapped_put_zeros((uintptr_t)info->si_addr)) {
    errno = saved; // on return, the read is repeated
  } else if (handed_on ||
             (!(before.sa_flags & SA_SIGINFO) && (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN))) {
    signal(SIGBUS, SIG_DFL); // on return, the read is repeated and ends the process
  } else {
    handed_on = 1; // that handler may call ours
    if (before.sa_flags & SA_SIGINFO) {
      before.sa_sigaction(number, info, context);
    } else {
      before.sa_handler(number);
    }
    handed_on = 0;
  }
}

static int sigbus_is_placed(struct sigaction *now) {
  sigaction(SIGBUS, NULL, now);
  return now->sa_flags & SA_SIGINFO && now->sa_sigaction == on_sigbus;
}

// Set our handler again when other code has set its own, or put back the one it found.
static void sigbus_place_handler(void) {
  struct sigaction now;
  if (sigbus_is_placed(&now)) return;
  before = now;
  struct sigaction ours = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
  sigemptyset(&ours.sa_mask);
  sigaction(SIGBUS, &ours, NULL);
}

void pg_guard_again(void) {
  struct sigaction now;
  if (sigbus_is_placed(&now)) return;
  pg_lock_take(&lock);
  sigbus_place_handler();
  pg_lock_give(&lock);
}

const int32_t *pg_guard(int fd, const void *first, int64_t bytes) {
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return NULL;
  pg_lock_take(&lock);
  mapped *m = list;
  while (m && m->first) m = m->next;
  if (!m && (m = calloc(1, sizeof *m))) {
    m->next = list;
    __atomic_store_n(&list, m, __ATOMIC_RELEASE);
  }
  if (m) {
    page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
    sigbus_place_handler();
    m->lost = 0;
    m->fd = own;
    m->bytes = bytes;
    m->end = ((uintptr_t)first + (uintptr_t)bytes + page_size - 1) / page_size * page_size;
    __atomic_store_n(&m->first, (uintptr_t)first, __ATOMIC_RELEASE);
  }
  pg_lock_give(&lock);
  if (m) return &m->lost;
  close(own);
  return NULL;
}

int pg_is_lost(const int32_t *lost) {
  mapped *m = (mapped *)(uintptr_t)lost;
  struct stat now;
  if (fstat(m->fd, &now) || now.st_size < m->bytes)
    __atomic_store_n(&m->lost, 1, __ATOMIC_RELEASE); // stays set, even when the file grows again
  return __atomic_load_n(&m->lost, __ATOMIC_ACQUIRE);
}

void pg_unguard(const int32_t *lost) {
  mapped *m = (mapped *)(uintptr_t)lost;
  pg_lock_take(&lock);
  close(m->fd);
  __atomic_store_n(&m->first, 0, __ATOMIC_RELEASE);
  pg_lock_give(&lock);
}

// A child that is forked while another thread has the lock would wait for that thread, which the child lacks.
static void mapped_before_fork(void) { pg_lock_take(&lock); }

static void mapped_after_fork(void) { pg_lock_give(&lock); }

__attribute__((constructor)) static void mapped_follow_forks(void) {
  pg_on_fork(mapped_before_fork, mapped_after_fork, mapped_after_fork);
}
