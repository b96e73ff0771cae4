// dst = s hypot(a, b): rows are shared between the threads; any strides.
#include <math.h>

#include "pg.h"

static float *at(const pg_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
  return (float *)(t->data + i0 * t->nb[0] + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3]);
}

int own_hypot_f32(const pg_task *t, int ith, int nth) {
  const int64_t *ne = t->dst.ne, n_rows = ne[1] * ne[2] * ne[3];
  for (int64_t r = ith; r < n_rows; r += nth) {
    const int64_t i1 = r % ne[1], i2 = r / ne[1] % ne[2], i3 = r / ne[1] / ne[2];
    for (int64_t i = 0; i < ne[0]; i++) {
      const float a = *at(&t->src[0], i, i1, i2, i3), b = *at(&t->src[1], i, i1, i2, i3);
      *at(&t->dst, i, i1, i2, i3) = (float)t->param[0] * hypotf(a, b);
    }
  }
  return PG_OK;
}
