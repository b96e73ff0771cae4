// dst = a + b, where b may have dimensions of 1. BUG plants one error.
#include <string.h>

#include "pg.h"

enum { NONE, TAIL, STRIDE, PAST_THE_END, NOT_A_NUMBER, BROADCAST, THREADS, IN_PLACE, READS_BEYOND, STATUS, SCRATCH };

int returned = PG_E_TYPE; // by `status`

static float *at(const pg_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
  return (float *)(t->data + i0 % t->ne[0] * t->nb[0] + i1 % t->ne[1] * t->nb[1] + i2 % t->ne[2] * t->nb[2] +
                   i3 % t->ne[3] * t->nb[3]);
}

static int add(const pg_task *t, int ith, int nth, int bug) {
  const pg_tensor *dst = &t->dst, *a = &t->src[0], *b = &t->src[1];
  const int64_t *ne = dst->ne, n_rows = ne[1] * ne[2] * ne[3];
  if (bug == STATUS && ne[0] > 2) return returned;
  if (bug == SCRATCH) memset(t->work + ith * t->work_size / nth, 0, (size_t)(4 * ne[0] + ne[0] / 3));
  int64_t n = ne[0];
  if (bug == TAIL && n % 4 == 3) n--; // a vector at a time, and of the rest at most two
  const int64_t per_thread = n_rows / nth;
  for (int64_t k = 0; k < (bug == THREADS ? per_thread : n_rows); k++) {
    const int64_t r = bug == THREADS ? ith * per_thread + k : k;
    if (bug != THREADS && r % nth != ith) continue;
    const int64_t i1 = r % ne[1], i2 = r / ne[1] % ne[2], i3 = r / ne[1] / ne[2];
    if (bug == IN_PLACE)
      for (int64_t i = 0; i < n; i++) *at(dst, i, i1, i2, i3) = 0;
    for (int64_t i = 0; i < n; i++) {
      float x = *at(a, i, i1, i2, i3), y = *at(b, i, bug == BROADCAST ? 0 : i1, i2, i3);
      if (bug == STRIDE) x = *(float *)((char *)at(a, 0, i1, i2, i3) + 4 * i);
      if (bug == NOT_A_NUMBER && x != x) x = 0;
      if (bug == READS_BEYOND && i % 4 == 3) y = ((float *)at(b, i, i1, i2, i3))[1];
      *at(dst, i, i1, i2, i3) = x + y;
    }
    if (bug == PAST_THE_END && r == n_rows - 1)
      for (int64_t i = n; i % 4; i++) at(dst, n - 1, i1, i2, i3)[i - n + 1] = 0;
  }
  return PG_OK;
}

#define KERNEL(name, bug)                                                                                              \
  int name(const pg_task *t, int ith, int nth) { return add(t, ith, nth, bug); }
KERNEL(none, NONE)
KERNEL(tail, TAIL)
KERNEL(stride, STRIDE)
KERNEL(past_the_end, PAST_THE_END)
KERNEL(not_a_number, NOT_A_NUMBER)
KERNEL(broadcast, BROADCAST)
KERNEL(threads, THREADS)
KERNEL(in_place, IN_PLACE)
KERNEL(reads_beyond, READS_BEYOND)
KERNEL(status, STATUS)
KERNEL(scratch, SCRATCH)
int64_t a_row(const pg_task *t, int nth) { return nth * 4 * t->dst.ne[0]; }
