// Faults made on purpose: preloaded (LD_PRELOAD), it makes the n-th call of a kind fail. Nothing fails until
// `fault_arm` is called, through ctypes, where the operation that is tried begins.
//
//     gcc -shared -fPIC -O1 -o faults.so faults.c -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

// The order is that of KINDS in faults.py.
enum { ALLOC, MAP, OPEN, READ, WRITE, SPACE, SYNC, NAME, THREAD, N_KINDS };
enum { SHORT = -1 }; // as an error: reads and writes do half of what is asked

static long calls[N_KINDS], fail_at, fail_last;
static int armed, armed_kind, armed_error;
static uintptr_t spared_first, spared_end; // where a library lies ...
static size_t spared_least;                // ... whose smaller allocations are neither counted nor fail

// Small allocations fail in the thread that armed alone: a thread of Python that gets none as it begins leaves the one
// that started it waiting for ever (CPython's Thread.start), and one of an executor ends without a word.
static pthread_t armer;

// From now on calls are counted; those of `kind` from the n-th to the last (1 is the first) fail with `error`.
void fault_arm(int kind, long first, long last, int error) {
  memset(calls, 0, sizeof calls);
  armed_kind = kind, armed_error = error, fail_at = first, fail_last = last, armer = pthread_self();
  __atomic_store_n(&armed, 1, __ATOMIC_SEQ_CST);
}

void fault_disarm(void) { __atomic_store_n(&armed, 0, __ATOMIC_SEQ_CST); }

long fault_calls(int kind) { return calls[kind]; }

static int fails(int kind) {
  if (!__atomic_load_n(&armed, __ATOMIC_SEQ_CST)) return 0;
  const long n = __atomic_add_fetch(&calls[kind], 1, __ATOMIC_SEQ_CST);
  if (kind != armed_kind || n < fail_at || n > fail_last) return 0;
  if (armed_error > 0) errno = armed_error;
  return 1;
}

// Where in that library an allocation of any size is spared: those that `fault_learn` has seen.
static uintptr_t learned[64];
static int n_learned, learning;

// Whether the spared library asks for memory, by itself or through a function or two of the interpreter.
static int spared(size_t size) {
  static _Thread_local int looking;
  void *callers[6];
  if (looking) return 1;
  looking = 1;
  const int n = backtrace(callers, 6);
  looking = 0;
  for (int i = 0; i < n; i++) {
    const uintptr_t at = (uintptr_t)callers[i];
    if (at < spared_first || at >= spared_end) continue;
    if (size < spared_least) return 1;
    for (int k = 0; k < n_learned; k++)
      if (learned[k] == at) return 1;
    if (learning && n_learned < 64) learned[n_learned++] = at;
    return learning;
  }
  return 0;
}

// Between learn(1) and learn(0), note where the spared library makes larger allocations.
void fault_learn(int on) { learning = on; }

// Where the library lies whose allocations of less than `least` bytes are spared.
void fault_spare(uintptr_t first, uintptr_t end, size_t least) {
  spared(0); // the first call loads a library
  spared_first = first, spared_end = end, spared_least = least;
}

static int alloc_fails(size_t size) {
  if (!__atomic_load_n(&armed, __ATOMIC_SEQ_CST)) return 0;
  if (size < spared_least && !pthread_equal(pthread_self(), armer)) return 0;
  if (spared(size)) return 0;
  return fails(ALLOC);
}

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

void *malloc(size_t size) { return alloc_fails(size) ? NULL : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return alloc_fails(n * size) ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t size) { return alloc_fails(size) ? NULL : __libc_realloc(p, size); }
void *aligned_alloc(size_t alignment, size_t size) {
  return alloc_fails(size) ? NULL : __libc_memalign(alignment, size);
}
int posix_memalign(void **p, size_t alignment, size_t size) {
  if (alloc_fails(size) || !(*p = __libc_memalign(alignment, size))) return ENOMEM;
  return 0;
}

#define REAL(name) ((__typeof__(&name))real(#name, &name##_real))
static void *real(const char *name, void **found) {
  void *f = __atomic_load_n(found, __ATOMIC_ACQUIRE);
  if (!f) __atomic_store_n(found, f = dlsym(RTLD_NEXT, name), __ATOMIC_RELEASE);
  return f;
}

#define WRAP(kind, type, name, params, args)                                                                           \
  static void *name##_real;                                                                                            \
  type name params { return fails(kind) ? (type)-1 : REAL(name) args; }

// Small anonymous maps are the interpreter's own.
#define WRAP_MAP(name, off)                                                                                            \
  static void *name##_real;                                                                                            \
  void *name(void *p, size_t n, int prot, int flags, int fd, off at) {                                                 \
    return (fd >= 0 || n > 1 << 20) && fails(MAP) ? MAP_FAILED : REAL(name)(p, n, prot, flags, fd, at);                \
  }
WRAP_MAP(mmap, off_t)
WRAP_MAP(mmap64, off64_t)
WRAP(SPACE, int, ftruncate, (int fd, off_t n), (fd, n))
WRAP(SPACE, int, ftruncate64, (int fd, off64_t n), (fd, n))
WRAP(SYNC, int, fsync, (int fd), (fd))
WRAP(NAME, int, rename, (const char *a, const char *b), (a, b))
WRAP(NAME, int, renameat, (int i, const char *a, int j, const char *b), (i, a, j, b))
WRAP(NAME, int, linkat, (int i, const char *a, int j, const char *b, int flags), (i, a, j, b, flags))

static void *posix_fallocate_real, *posix_fallocate64_real, *pthread_create_real;
int posix_fallocate(int fd, off_t at, off_t n) { return fails(SPACE) ? armed_error : REAL(posix_fallocate)(fd, at, n); }
int posix_fallocate64(int fd, off64_t at, off64_t n) {
  return fails(SPACE) ? armed_error : REAL(posix_fallocate64)(fd, at, n);
}
int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *p) {
  return fails(THREAD) ? armed_error : REAL(pthread_create)(t, a, f, p);
}

// Opening: the third argument is there when a file may be made.
#define WRAP_OPEN(name, params, ...)                                                                                   \
  static void *name##_real;                                                                                            \
  int name params {                                                                                                    \
    va_list rest;                                                                                                      \
    va_start(rest, flags);                                                                                             \
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                      \
    va_end(rest);                                                                                                      \
    return fails(OPEN) ? -1 : REAL(name)(__VA_ARGS__, flags, mode);                                                    \
  }
WRAP_OPEN(open, (const char *path, int flags, ...), path)
WRAP_OPEN(open64, (const char *path, int flags, ...), path)
WRAP_OPEN(openat, (int at, const char *path, int flags, ...), at, path)
WRAP_OPEN(openat64, (int at, const char *path, int flags, ...), at, path)

// Reads and writes may also be short.
#define WRAP_BYTES(kind, name, params, args, short_args)                                                               \
  static void *name##_real;                                                                                            \
  ssize_t name params {                                                                                                \
    if (!fails(kind)) return REAL(name) args;                                                                          \
    return armed_error == SHORT ? REAL(name) short_args : -1;                                                          \
  }
#define HALF(n) ((n) > 1 ? (n) / 2 : (n))
WRAP_BYTES(READ, read, (int fd, void *p, size_t n), (fd, p, n), (fd, p, HALF(n)))
WRAP_BYTES(READ, pread, (int fd, void *p, size_t n, off_t at), (fd, p, n, at), (fd, p, HALF(n), at))
WRAP_BYTES(READ, pread64, (int fd, void *p, size_t n, off64_t at), (fd, p, n, at), (fd, p, HALF(n), at))
WRAP_BYTES(WRITE, write, (int fd, const void *p, size_t n), (fd, p, n), (fd, p, HALF(n)))
WRAP_BYTES(WRITE, pwrite, (int fd, const void *p, size_t n, off_t at), (fd, p, n, at), (fd, p, HALF(n), at))
WRAP_BYTES(WRITE, pwrite64, (int fd, const void *p, size_t n, off64_t at), (fd, p, n, at), (fd, p, HALF(n), at))

static struct iovec half(const struct iovec *v) { return (struct iovec){v->iov_base, HALF(v->iov_len)}; }
#define WRAP_VECTORS(kind, name, params, after)                                                                        \
  static void *name##_real;                                                                                            \
  ssize_t name params {                                                                                                \
    if (!fails(kind)) return REAL(name)(fd, v, n after);                                                               \
    const struct iovec some = half(v);                                                                                 \
    return armed_error == SHORT ? REAL(name)(fd, &some, 1 after) : -1;                                                 \
  }
#define AT , at
WRAP_VECTORS(READ, preadv, (int fd, const struct iovec *v, int n, off_t at), AT)
WRAP_VECTORS(READ, preadv64, (int fd, const struct iovec *v, int n, off64_t at), AT)
WRAP_VECTORS(WRITE, writev, (int fd, const struct iovec *v, int n), )
