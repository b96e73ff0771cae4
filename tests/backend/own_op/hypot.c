// dst = s hypot(a, b): rows are shared between the threads; any strides.
#include <math.h>

#include "pg.h"

int own_hypot_f32(const pg_task *t, int ith, int nth) {
  const pg_tensor *dst = &t->dst, *a = &t->src[0], *b = &t->src[1];
  const int64_t n_rows = dst->ne[1] * dst->ne[2] * dst->ne[3];
  for (int64_t r = ith; r < n_rows; r += nth) {
    const int64_t i1 = r % dst->ne[1], i2 = r / dst->ne[1] % dst->ne[2], i3 = r / dst->ne[1] / dst->ne[2];
    for (int64_t i = 0; i < dst->ne[0]; i++) {
      const float x = *(const float *)(a->data + i * a->nb[0] + i1 * a->nb[1] + i2 * a->nb[2] + i3 * a->nb[3]);
      const float y = *(const float *)(b->data + i * b->nb[0] + i1 * b->nb[1] + i2 * b->nb[2] + i3 * b->nb[3]);
      *(float *)(dst->data + i * dst->nb[0] + i1 * dst->nb[1] + i2 * dst->nb[2] + i3 * dst->nb[3]) =
          (float)t->param[0] * hypotf(x, y);
    }
  }
  return PG_OK;
}
