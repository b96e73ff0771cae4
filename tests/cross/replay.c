// Run what tests/cross/record.py has recorded, and compare all memory: replay FILE. A level that this CPU lacks is left
// out. Each plan runs on one thread and on two.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pg.h"

enum { MAX_THREADS = 2, MAX_BLOCKS = 256, NAME = 64, ALIGN = 64 };

typedef struct block {
  uint64_t at, size, changes; // as recorded
  char *before, *after, *memory;
} block;

static FILE *in;

static void get(void *to, size_t n) {
  if (n && fread(to, n, 1, in) != 1) {
    puts("replay: the file is too short");
    exit(2);
  }
}

static uint64_t get_number(void) {
  uint64_t n;
  get(&n, sizeof n);
  return n;
}

static void *get_memory(uint64_t n) { // as aligned as any tensor
  char *p = malloc(n + ALIGN);
  if (!p) exit(2);
  return p + (ALIGN - (uintptr_t)p % ALIGN) % ALIGN;
}

static pg_kernel kernel_of(const char *symbol) {
  for (int level = 0; level < pg_isa_count(); level++) {
    int64_t n;
    const pg_row *rows = pg_isa_table(level, &n);
    for (int64_t i = 0; i < n; i++)
      if (!strcmp(rows[i].symbol, symbol)) return rows[i].fn;
  }
  printf("replay: no kernel %s\n", symbol);
  exit(2);
}

// The address here of what was at an address when the plan was recorded.
static char *place(const block *b, uint64_t n, const char *recorded) {
  const uint64_t at = (uintptr_t)recorded;
  if (!at) return NULL;
  for (uint64_t i = 0; i < n; i++)
    if (at >= b[i].at && at < b[i].at + b[i].size) return b[i].memory + (at - b[i].at);
  puts("replay: an address in no block");
  exit(2);
}

// The largest difference between two blocks, relative to the largest number: taken as floats, which most of them are.
static double distance(const block *b) {
  const float *x = (const float *)b->memory, *y = (const float *)b->after;
  double most = 0, largest = 1e-30;
  for (uint64_t i = 0; i < b->size / 4; i++) {
    if (!isfinite(y[i]) || fabsf(y[i]) > 1e6f || !memcmp(x + i, y + i, 4)) continue;
    if (fabs((double)x[i] - y[i]) > most) most = fabs((double)x[i] - y[i]);
    if (fabsf(y[i]) > largest) largest = fabsf(y[i]);
  }
  return most / largest;
}

// Returns the number of bytes that differ.
static uint64_t replay_plan(int n_plan) {
  char level[16], symbol[NAME];
  get(level, sizeof level);
  const uint64_t n_ops = get_number(), n_blocks = get_number(), work_size = get_number();
  if (n_blocks > MAX_BLOCKS) exit(2);
  block blocks[MAX_BLOCKS];
  pg_op *ops = get_memory(n_ops * sizeof *ops);
  int64_t *chunks = get_memory(n_ops * sizeof *chunks);
  char *symbols = get_memory(n_ops * NAME), *work = get_memory(work_size);
  for (uint64_t i = 0; i < n_ops; i++) {
    get(ops + i, sizeof *ops);
    get(symbol, NAME);
    memcpy(symbols + i * NAME, symbol, NAME);
  }
  for (uint64_t i = 0; i < n_blocks; i++) {
    block *b = blocks + i;
    b->at = get_number(), b->size = get_number(), b->changes = get_number();
    b->memory = get_memory(b->size);
    get(b->before = get_memory(b->size), b->size);
    if (b->changes) get(b->after = get_memory(b->size), b->size);
    if (!b->changes) b->after = b->before;
  }
  int here = 0;
  for (int i = 0; i < pg_isa_count(); i++) here |= !strcmp(pg_isa_name(i), level) && pg_isa_supported(i);
  if (!here) {
    printf("%3d %-10s not on this CPU\n", n_plan, level);
    return 0;
  }
  pg_plan plan = {.ops = ops, .n_ops = (int64_t)n_ops, .chunks = chunks, .work_size = (int64_t)work_size};
  for (uint64_t i = 0; i < n_ops; i++) {
    pg_task *t = &ops[i].task;
    ops[i].fn = kernel_of(symbols + i * NAME);
    t->work = work;
    t->plan = &plan;
    t->index = (int64_t)i;
    t->dst.data = place(blocks, n_blocks, t->dst.data);
    for (int k = 0; k < PG_MAX_SRC; k++) t->src[k].data = place(blocks, n_blocks, t->src[k].data);
  }
  uint64_t wrong = 0;
  double most = 0;
  for (int n_threads = 1; n_threads <= MAX_THREADS; n_threads *= 2) {
    for (uint64_t i = 0; i < n_blocks; i++) memcpy(blocks[i].memory, blocks[i].before, blocks[i].size);
    const int status = pg_plan_run(&plan, NULL, n_threads, 1);
    if (status) {
      printf("%3d %-10s status %d\n", n_plan, level, status);
      return 1;
    }
    for (uint64_t i = 0; i < n_blocks; i++) {
      for (uint64_t k = 0; k < blocks[i].size; k++) wrong += blocks[i].memory[k] != blocks[i].after[k];
      if (distance(blocks + i) > most) most = distance(blocks + i);
    }
  }
  printf("%3d %-10s %3d operations: %d bytes differ, by %.1e at most\n", n_plan, level, (int)n_ops, (int)wrong, most);
  return wrong;
}

int main(int argc, char **argv) {
  if (argc != 2 || !(in = fopen(argv[1], "rb"))) return 2;
  const int n = (int)get_number();
  uint64_t wrong = 0;
  for (int i = 0; i < n; i++) wrong += replay_plan(i);
  pg_pool_stop();
  puts(wrong ? "replay: bits differ" : "replay: the same bits");
  return wrong != 0;
}
