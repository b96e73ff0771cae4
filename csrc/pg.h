// The header of the C library: tensors, tasks, kernels, plans, the thread pool. vocab/vocab.h is the one for
// vocabularies.
// Nothing in this library aborts, exits or prints: every function that can fail returns a status.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum pg_status {
  PG_OK = 0,
  PG_E_INDEX = 1,   // a row index outside its range: pg_plan.bad_value holds it
  PG_E_NOMEM = 2,   // no memory for a thread or a buffer
  PG_E_ABORTED = 3, // the abort flag was raised, or SIGINT came, between two ops
  PG_E_TYPE = 4,    // no conversion for this type
  PG_E_NAN = 5,     // a NaN among numbers to be sorted
  PG_E_HOST = 6,    // a function of Python raised an exception
  PG_E_NESTED = 7,  // an op of this plan ran it again
  PG_E_LOST = 8,    // a file that the plan reads has become shorter
  PG_E_WORK = 9,    // nothing ran: for its variables the plan needs pg_plan.bad_value bytes of scratch memory
  PG_E_KERNEL = 10  // a kernel returned pg_plan.bad_value, any other number than PG_OK, without a word to pg_fail
};

enum { PG_MAX_SRC = 12, PG_MAX_PARAM = 16, PG_MAX_THREADS = 256, PG_MAX_CPUS = 4096 };

// GGUF type ids of the types that kernels name.
enum pg_type {
  PG_F32 = 0,
  PG_F16 = 1,
  PG_Q4_0 = 2,
  PG_Q4_1 = 3,
  PG_Q5_0 = 6,
  PG_Q5_1 = 7,
  PG_Q8_0 = 8,
  PG_Q2_K = 10,
  PG_Q3_K = 11,
  PG_Q4_K = 12,
  PG_Q5_K = 13,
  PG_Q6_K = 14,
  PG_IQ2_XXS = 16,
  PG_IQ2_XS = 17,
  PG_IQ3_XXS = 18,
  PG_IQ1_S = 19,
  PG_IQ4_NL = 20,
  PG_IQ3_S = 21,
  PG_IQ2_S = 22,
  PG_IQ4_XS = 23,
  PG_I8 = 24,
  PG_I16 = 25,
  PG_I32 = 26,
  PG_I64 = 27,
  PG_F64 = 28,
  PG_IQ1_M = 29,
  PG_BF16 = 30,
  PG_TQ1_0 = 34,
  PG_TQ2_0 = 35,
  PG_MXFP4 = 39,
  PG_NVFP4 = 40,
  PG_NONE = -1, // in kernels.def: no such source
  PG_ANY = -2   // in kernels.def: the kernel looks at the type itself, or does not care
};

// ne: elements per dimension, nb: byte strides; index 0 is the fastest dimension. data is NULL for an absent source.
typedef struct pg_tensor {
  char *data;
  int64_t ne[4];
  int64_t nb[4];
  int64_t type;
} pg_tensor;

struct pg_plan;

// One op, as a kernel sees it. Python fills these records (backends/cpu/lower.py knows the layout).
typedef struct pg_task {
  pg_tensor dst;
  pg_tensor src[PG_MAX_SRC];
  double param[PG_MAX_PARAM];
  char *work;           // scratch shared by all threads, 64-byte aligned
  int64_t work_size;    // its bytes, as the kernel's work function asked
  struct pg_plan *plan; // for pg_sync, pg_next and pg_fail
  int64_t index;        // of this op in the plan
} pg_task;

// A kernel does its share, thread `ith` of `nth`, and returns a status.
typedef int (*pg_kernel)(const pg_task *t, int ith, int nth);
// Scratch bytes that a kernel needs for this task on `nth` threads, and on any smaller number: an op may get fewer
// threads than it is planned for.
typedef int64_t (*pg_work)(const pg_task *t, int nth);

typedef struct pg_op {
  pg_kernel fn;
  int64_t n_threads; // how many threads take part at most (1: too small to share)
  pg_task task;
} pg_op;

// A number that changes from run to run without lowering again: each run sets *where = base + stride * vars[var].
typedef struct pg_bind {
  int64_t *where;
  int64_t base;
  int64_t stride;
  int64_t var;
} pg_bind;

// The scratch memory of an op whose sizes change from run to run.
typedef struct pg_need {
  pg_work work;
  int64_t op;
} pg_need;

// What has been measured of a plan's runs, on one thread and on several, see exec/pace.c.
typedef struct pg_pace {
  int32_t alone; // runs on one thread are at least as fast
  int32_t trial; // which run of a trial is next, from 1; 0: none is under way
  int64_t runs;  // runs so far, without those of trials
  int64_t least; // nanoseconds of the shortest run
  int64_t next;  // when the next trial may begin
  int64_t ns[2]; // nanoseconds of a trial's runs: shared, alone
} pg_pace;

// Fields that several threads touch while a plan runs are only reached through __atomic builtins.
typedef struct pg_plan {
  pg_op *ops;
  int64_t n_ops;
  const pg_bind *binds;
  int64_t n_binds;
  const pg_need *needs; // [n_needs]
  int64_t n_needs;
  int64_t work_size;           // bytes of scratch memory that the plan has ...
  int64_t work_threads;        // ... for so many threads
  const int32_t *const *files; // [n_files] of pg_guard: those that its ops read
  int64_t n_files;
  int64_t n_threads;
  int64_t at_home;    // its threads stay on memory nodes (pg_pool_place)
  int64_t *chunks;    // [n_ops] shared counters for pg_next
  int64_t *spans;     // [n_ops][n_threads][2] when a thread began and ended each op, or NULL: do not measure
  int64_t failed_op;  // where the first failure happened
  int64_t bad_value;  // its detail
  int32_t status;     // first failure
  int32_t abort;      // set it to stop the present run between two ops
  int32_t watch;      // SIGINT stops this run, too
  int32_t interrupts; // SIGINTs before this run
  int32_t busy;       // a thread runs this plan ...
  int32_t waiting;    // ... and others sleep until it has
  int32_t sleepers;   // threads that sleep in pg_sync
  int32_t arrived;    // pg_sync: threads that have arrived ...
  char pad[64];       // ... and the phase the others wait for, on a cache line of its own
  int32_t phase;
  pg_pace pace;
} pg_plan;

// -- for kernels
void pg_sync(const pg_task *t, int nth);                         // all `nth` threads of this op meet here
int64_t pg_next(const pg_task *t);                               // 0, 1, 2 ...: the next chunk of shared work
int pg_fail(const pg_task *t, enum pg_status s, int64_t detail); // note the first failure; returns s

// -- for the binding
typedef struct pg_row { // one row of a dispatch table
  const char *op;
  const char *symbol;
  int64_t dst, src0, src1;
  pg_kernel fn;
  pg_work work;
} pg_row;

int pg_isa_count(void);                            // levels compiled into this binary
const char *pg_isa_name(int level);                // "generic", "avx2", ... in rising order
int pg_isa_supported(int level);                   // can this CPU and OS run it
const pg_row *pg_isa_table(int level, int64_t *n); // its kernels
int64_t pg_work_size(const pg_row *row, const pg_task *t, int nth);

// Run a plan on `n_threads` threads at most. The caller is thread 0; workers take part as soon as they are awake.
// Threads that run the same plan take turns. Plans that share scratch memory or data must not run at the same time: the
// caller sees to that. A plan that is run from within an op runs on that thread alone. `watch`: SIGINT stops the run,
// too.
int pg_plan_run(pg_plan *p, const int64_t *vars, int n_threads, int watch);
void pg_pool_stop(void); // join all workers

// From now on, keep thread i of the n threads of a run on the CPUs of memory node i * n_nodes / n; thread 0, which runs
// the plan, only as long as it runs. The nodes' CPUs are bits: of node k in PG_MAX_CPUS / 64 words from
// cpus[k * PG_MAX_CPUS / 64] on. They must stay where they are. 0 nodes: threads run where the system puts them.
void pg_pool_place(const uint64_t *cpus, int64_t n_nodes);

// Guard `bytes` of a file that are mapped at `first`, until the guard is given back. When the file becomes shorter,
// reading the lost part gives zeros, and sets the number at the returned address to 1. NULL: no memory, or no file can
// be opened.
const int32_t *pg_guard(int fd, const void *first, int64_t bytes);
void pg_guard_again(void);           // set our handler of SIGBUS again, when another one was set since
int pg_is_lost(const int32_t *lost); // 1 there, or the file is shorter now
void pg_unguard(const int32_t *lost);

// Convert dense rows of `type` to n floats in all; and n_rows rows of n floats to `type`. `weights` (n of them, or
// NULL) say how much the error of each column counts. PG_E_TYPE: the type has no converter. Several threads may call
// them at a time.
int pg_dequantize(int level, int64_t type, const void *rows, float *dst, int64_t n);
int pg_quantize(int level, int64_t type, const float *src, const float *weights, void *rows, int64_t n_rows, int64_t n,
                int64_t row_bytes);

// Repack weights for the CPU, 16 rows at a time (products/r16/r16.h). pg_r16_bytes gives the bytes of a matrix with m
// rows of k elements; 0 for a type that cannot be repacked. The others pack groups first .. last - 1 of 16 rows, from
// rows of row_bytes each, and unpack them; several threads may do some groups each. PG_E_TYPE: the type cannot be
// unpacked, whatever the range is.
int64_t pg_r16_bytes(int64_t type, int64_t k, int64_t m);
void pg_r16_pack(int64_t type, const void *rows, int64_t row_bytes, int64_t k, int64_t m, void *dst, int64_t first,
                 int64_t last);
int pg_r16_unpack(int64_t type, const void *packed, int64_t k, int64_t m, void *rows, int64_t row_bytes, int64_t first,
                  int64_t last);

// Sampling with top-k, top-p, min-p and a temperature, in two steps; between them the caller takes exp of `exponents`.
// The first step finds the k largest of n logits, 0 < k <= n < 2^32, in descending order, equal ones in their order. It
// gives their places and their differences from the largest; and from [k] on, the differences divided by temp. `keys`
// is scratch memory; n_keys is at least k + 16. PG_E_NAN: a logit is NaN, or the largest logit or temp is infinite. The
// second step gives the row that u, 0 <= u < 1, falls on, among the rows that top_p (1: all) and min_p leave.
int pg_top_k(const float *logits, int64_t n, int64_t k, float temp, uint64_t *keys, int64_t n_keys, int64_t *ids,
             float *exponents);
int64_t pg_draw(const float *weights, int64_t k, double top_p, double min_p, double u);

// Work for measuring the limits of one thread (exec/peak.c): read n bytes at p (n a multiple of 4 KiB, p 64-byte
// aligned), or make n steps of multiplications of a kind. Returns the bytes or operations done; 0 when no level up to
// this one has such instructions.
enum pg_peak_kind { PG_PEAK_READ = 0, PG_PEAK_F32 = 1, PG_PEAK_INT8 = 2, PG_PEAK_BF16 = 3 };
double pg_peak(int level, enum pg_peak_kind kind, const void *p, int64_t n);
