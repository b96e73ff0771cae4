// Windows that slide over images: the geometry of convolutions, read from the parameters of a task.
#pragma once
#include "simd/rows.h"

enum { AXES = 3 }; // width, height, depth

// Batches of channels of planes. The kernel has k[] elements, d[] apart; the window moves by s[] over n[] elements with
// p[] zeros on each side, and has out[] places. A plane of the image starts at batch * nb_batch + channel * nb_channel.
typedef struct window {
  int64_t n[AXES], k[AXES], s[AXES], p[AXES], d[AXES], out[AXES], nb[AXES];
  int64_t channels, batch, nb_channel, nb_batch;
} window;

// Parameters s[n_axes], p[n_axes], d[n_axes] from `param` on; sizes and strides from the first dimensions of kernel a,
// image b and result (`out`: its ne from the width on). Axes beyond have one place.
static inline window pg_window(const double *param, int n_axes, const pg_tensor *a, const pg_tensor *b,
                               const int64_t *out) {
  window w = {.channels = 1, .batch = 1};
  for (int i = 0; i < AXES; i++) {
    const int in = i < n_axes;
    w.n[i] = in ? b->ne[i] : 1;
    w.k[i] = in ? a->ne[i] : 1;
    w.out[i] = in ? out[i] : 1;
    w.nb[i] = in ? b->nb[i] : 0;
    w.s[i] = in ? (int64_t)param[i] : 1;
    w.p[i] = in ? (int64_t)param[n_axes + i] : 0;
    w.d[i] = in ? (int64_t)param[2 * n_axes + i] : 1;
  }
  return w;
}

// The index along axis i of element `tap` of the window at `place`. Below 0, and from n[i] on, elements are zeros.
static inline int64_t pg_window_at(const window *w, int i, int64_t place, int64_t tap) {
  return place * w->s[i] + tap * w->d[i] - w->p[i];
}

static inline int pg_window_in(const window *w, int i, int64_t at) { return at >= 0 && at < w->n[i]; }

// The row of the image that a window at `place` (height, depth) sees with taps kh, kd; NULL: zeros.
static inline const char *pg_window_row(const window *w, const char *plane, int64_t oh, int64_t kh, int64_t od,
                                        int64_t kd) {
  const int64_t h = pg_window_at(w, 1, oh, kh), d = pg_window_at(w, 2, od, kd);
  return pg_window_in(w, 1, h) && pg_window_in(w, 2, d) ? plane + h * w->nb[1] + d * w->nb[2] : NULL;
}
