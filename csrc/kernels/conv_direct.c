// conv_2d_direct, conv_2d_dw_direct, conv_3d_direct: compute a strip of a row of the result at a time. The rows of the
// image that it depends on are laid out once for CHANNELS output channels (conv_sum.h).
#include "kernels/conv_sum.h"
#include "kernels/window.h"

enum { CHANNELS = 64, RUN = 256 };

// A convolution. Each group of `channels` input channels makes `n_out` output channels, with its own kernels. There is
// one group, or in a depthwise convolution one for each channel.
typedef struct conv {
  window w;
  int64_t groups, n_out, nb_group;                 // of the image
  int64_t nb_tap[4], nb_kernel, nb_kernel_group;   // of the kernel: along its three axes and channels; per output
  int64_t y_group, y_out, y_row, y_depth, y_batch; // byte strides of the result
  int64_t taps, blocks, row, outs;                 // floats per row laid out; `blocks` of `outs` kernels per group
  int64_t step; // floats between the places where neighbouring taps begin to read: the dilation, or STRIP when each tap
                // has a row of its own
  float *weight; // [groups][blocks][taps][outs]
  int32_t *at;   // [taps]
  float *x;      // [channels][depth][height][row], one per thread
} conv;

static int64_t x_size(const conv *c) {
  return pg_times(pg_times(c->w.channels, c->w.k[2]), pg_times(c->w.k[1], c->row));
}

static int64_t weight_size(const conv *c) {
  return pg_times(pg_times(c->groups, c->blocks), pg_times(c->taps, c->outs));
}

// Compute the fields that follow from `w` and n_out.
static void complete(conv *c) {
  const window *w = &c->w;
  c->taps = w->channels * w->k[2] * w->k[1] * w->k[0];
  c->outs = c->n_out == 1 ? 1 : OUTS;
  c->blocks = (c->n_out + c->outs - 1) / c->outs;
  c->step = w->s[0] == 1 && w->d[0] < STRIP ? w->d[0] : STRIP;
  c->row = STRIP + (w->k[0] - 1) * c->step;
}

static void use(conv *c, char *work, int ith) {
  c->weight = (float *)work;
  c->at = (int32_t *)(c->weight + weight_size(c));
  c->x = (float *)(c->at + c->taps) + ith * x_size(c);
}

static conv conv_2d(const pg_task *t) {
  const pg_tensor *a = &t->src[0], *b = &t->src[1], *y = &t->dst;
  conv c = {.w = pg_window(t->param, 2, a, b, y->ne), .groups = 1, .n_out = a->ne[3]};
  c.w.channels = b->ne[2];
  c.w.nb_channel = b->nb[2];
  c.w.batch = b->ne[3];
  c.w.nb_batch = b->nb[3];
  memcpy(c.nb_tap, (int64_t[4]){a->nb[0], a->nb[1], 0, a->nb[2]}, sizeof c.nb_tap);
  c.nb_kernel = a->nb[3];
  c.y_out = y->nb[2];
  c.y_row = y->nb[1];
  c.y_batch = y->nb[3];
  complete(&c);
  return c;
}

static conv conv_2d_dw(const pg_task *t) {
  conv c = conv_2d(t);
  c.groups = c.w.channels;
  c.n_out = c.w.channels = 1;
  c.nb_group = c.w.nb_channel;
  c.nb_kernel_group = c.nb_kernel;
  c.y_group = c.y_out;
  complete(&c);
  return c;
}

// param 9 .. 11: input channels, batch, output channels, which share dimension 3
static conv conv_3d(const pg_task *t) {
  const pg_tensor *a = &t->src[0], *b = &t->src[1], *y = &t->dst;
  conv c = {.w = pg_window(t->param, 3, a, b, y->ne), .groups = 1, .n_out = (int64_t)t->param[11]};
  c.w.channels = (int64_t)t->param[9];
  c.w.nb_channel = b->nb[3];
  c.w.batch = (int64_t)t->param[10];
  c.w.nb_batch = b->nb[3] * c.w.channels;
  memcpy(c.nb_tap, a->nb, sizeof c.nb_tap);
  c.nb_kernel = a->nb[3] * c.w.channels;
  c.y_out = y->nb[3];
  c.y_row = y->nb[1];
  c.y_depth = y->nb[2];
  c.y_batch = y->nb[3] * c.n_out;
  complete(&c);
  return c;
}

// to[i * outs] = tap i of the kernel at p, i over width, height, depth, channels: dense runs at a time.
static void put_kernel(const conv *c, const pg_tensor *a, const char *p, float *to) {
  const int64_t n[4] = {c->w.k[0], c->w.k[1], c->w.k[2], c->w.channels};
  int64_t run = n[0];
  int merged = 1;
  for (; merged < 4 && (n[merged] == 1 || c->nb_tap[merged] == run * c->nb_tap[0]); merged++) run *= n[merged];
  for (int64_t i = 0; i < c->taps; i += run) {
    const char *from = p;
    for (int64_t axis = merged, q = i / run; axis < 4; q /= n[axis++]) from += q % n[axis] * c->nb_tap[axis];
    float f[RUN];
    for (int64_t k = 0; k < run; k += RUN) {
      const int64_t m = PG_MIN(RUN, run - k);
      pg_get_f32(f, a, from, k, m);
      for (int64_t j = 0; j < m; j++) to[(i + k + j) * c->outs] = f[j];
    }
  }
}

static void put_weights(const conv *c, const pg_tensor *a, int ith, int nth) {
  const pg_range r = pg_share(c->groups * c->blocks, ith, nth);
  for (int64_t ib = r.first; ib < r.last; ib++) {
    const int64_t group = ib / c->blocks, first = ib % c->blocks * c->outs;
    float *to = c->weight + ib * c->taps * c->outs;
    for (int64_t o = 0; o < c->outs; o++) {
      if (first + o < c->n_out) {
        put_kernel(c, a, a->data + group * c->nb_kernel_group + (first + o) * c->nb_kernel, to + o);
      } else {
        for (int64_t i = 0; i < c->taps; i++) to[i * c->outs + o] = 0;
      }
    }
  }
}

static void put_offsets(const conv *c) {
  const int64_t n = c->w.k[0];
  for (int64_t i = 0; i < c->taps; i++) c->at[i] = (int32_t)(i / n * c->row + i % n * c->step);
}

// All rows that n places of the window see, from place `ow` of row (oh, od) on.
static void put_rows(const conv *c, const pg_tensor *b, const char *image, int64_t ow, int64_t oh, int64_t od,
                     int64_t n) {
  const window *w = &c->w;
  float *x = c->x;
  for (int64_t ic = 0; ic < w->channels; ic++)
    for (int64_t kd = 0; kd < w->k[2]; kd++)
      for (int64_t kh = 0; kh < w->k[1]; kh++, x += c->row) {
        const char *row = pg_window_row(w, image + ic * w->nb_channel, oh, kh, od, kd);
        if (c->step < STRIP) {
          pg_fill(x, pg_padded(n) + (w->k[0] - 1) * w->d[0], b, row, w->n[0], pg_window_at(w, 0, ow, 0), 1);
        } else {
          for (int64_t kw = 0; kw < w->k[0]; kw++)
            pg_fill(x + kw * STRIP, pg_padded(n), b, row, w->n[0], pg_window_at(w, 0, ow, kw), w->s[0]);
        }
      }
}

static int convolve(const pg_task *t, int ith, int nth, const conv *c) {
  const pg_tensor *b = &t->src[1];
  const window *w = &c->w;
  put_weights(c, &t->src[0], ith, nth);
  if (ith == 0) put_offsets(c);
  pg_sync(t, nth);
  const int64_t strips = (w->out[0] + STRIP - 1) / STRIP, parts = (c->n_out + CHANNELS - 1) / CHANNELS;
  const int64_t per_image = parts * strips * w->out[1] * w->out[2];
  const pg_range r = pg_share(per_image * c->groups * w->batch, ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const int64_t ow = ir % strips * STRIP, part = ir / strips % parts, q = ir / strips / parts;
    const int64_t oh = q % w->out[1], od = q / w->out[1] % w->out[2], image = ir / per_image;
    const int64_t group = image % c->groups, ib = image / c->groups, n = PG_MIN(STRIP, w->out[0] - ow);
    put_rows(c, b, b->data + ib * w->nb_batch + group * c->nb_group, ow, oh, od, n);
    char *py = t->dst.data + ib * c->y_batch + group * c->y_group + od * c->y_depth + oh * c->y_row + ow * 4;
    const int64_t last = PG_MIN((part + 1) * CHANNELS, c->n_out);
    for (int64_t o = part * CHANNELS; o < last; o += c->outs) {
      float y[OUTS * STRIP];
      const float *weight = c->weight + (group * c->blocks + o / c->outs) * c->taps * c->outs;
      pg_sum_shifted(y, weight, c->x, c->at, c->taps, n, (int)c->outs);
      for (int64_t j = 0; j < PG_MIN(c->outs, last - o); j++) memcpy(py + (o + j) * c->y_out, y + j * STRIP, n * 4);
    }
  }
  return PG_OK;
}

static int64_t work_of(const conv *c, int nth) {
  const int64_t floats = pg_plus(pg_plus(weight_size(c), c->taps), pg_times(nth, x_size(c)));
  return pg_in_32_bits(x_size(c), pg_times(floats, sizeof(float)));
}

#define OP(name)                                                                                                       \
  int64_t PG_FN(name##_direct_work)(const pg_task *t, int nth) {                                                       \
    const conv c = name(t);                                                                                            \
    return work_of(&c, nth);                                                                                           \
  }                                                                                                                    \
  int PG_FN(name##_direct_any)(const pg_task *t, int ith, int nth) {                                                   \
    conv c = name(t);                                                                                                  \
    use(&c, t->work, ith);                                                                                             \
    return convolve(t, ith, nth, &c);                                                                                  \
  }
OP(conv_2d)
OP(conv_2d_dw)
OP(conv_3d)
