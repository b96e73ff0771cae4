// im2col, im2col_3d: write the elements of each window of an image as a row. Their gradients: sum such rows into an
// image. col2im_1d: sum columns into a signal.
#include "kernels/window.h"

enum { PLACES = 16 }; // windows of a row at a time: this many rows of the result stay in the L1 cache

int64_t PG_FN(im2col_work)(const pg_task *t, int nth) {
  return t->dst.type == PG_F32 ? 0 : pg_times(t->dst.ne[0], PLACES * (int64_t)sizeof(float) * nth);
}

// x[j * n] = the element of the row at `row` (NULL: zeros) that tap kw of the width sees in place ow + j, for m places
// j.
#define TAP(type, value)                                                                                               \
  for (int64_t j = first; j < last; j++) {                                                                             \
    const type e = *(const type *)(row + (at + j * s) * w->nb[0]);                                                     \
    x[j * n] = value;                                                                                                  \
  }

static void put_tap(float *x, int64_t n, const window *w, int64_t type, const char *row, int64_t ow, int64_t kw,
                    int64_t m) {
  const int64_t s = w->s[0], at = pg_window_at(w, 0, ow, kw), size = row ? w->n[0] : 0;
  const int64_t first = PG_MIN(m, at < 0 ? (-at + s - 1) / s : 0);
  const int64_t last = at < size ? PG_MAX(first, PG_MIN(m, (size - at + s - 1) / s)) : first;
  for (int64_t j = 0; j < first; j++) x[j * n] = 0;
  for (int64_t j = last; j < m; j++) x[j * n] = 0;
  if (type == PG_F32) {
    TAP(float, e)
  } else if (type == PG_F16) {
    TAP(uint16_t, pg_f16_to_f32(e))
  } else {
    TAP(uint16_t, pg_bf16_to_f32(e))
  }
}
#undef TAP

// Rows [channels, depth, height, width] of the kernel's size; y: [batch * depth, height, width] of them, densely.
static int rows(const pg_task *t, int ith, int nth, const window *w) {
  const pg_tensor *b = &t->src[1], *y = &t->dst;
  const int64_t n = y->ne[0], blocks = (w->out[0] + PLACES - 1) / PLACES;
  float *work = (float *)t->work + ith * PLACES * n;
  const pg_range r = pg_share(w->batch * w->out[2] * w->out[1] * blocks, ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const int64_t ow = ir % blocks * PLACES, line = ir / blocks, oh = line % w->out[1], q = line / w->out[1];
    const int64_t od = q % w->out[2], ib = q / w->out[2], m = PG_MIN(PLACES, w->out[0] - ow);
    char *py = y->data + (line * w->out[0] + ow) * y->nb[1];
    float *x = y->type == PG_F32 ? (float *)py : work, *to = x;
    for (int64_t c = 0; c < w->channels; c++) {
      const char *plane = b->data + ib * w->nb_batch + c * w->nb_channel;
      for (int64_t kd = 0; kd < w->k[2]; kd++)
        for (int64_t kh = 0; kh < w->k[1]; kh++) {
          const char *row = pg_window_row(w, plane, oh, kh, od, kd);
          for (int64_t kw = 0; kw < w->k[0]; kw++) put_tap(to++, n, w, b->type, row, ow, kw, m);
        }
    }
    if (x == work)
      for (int64_t j = 0; j < m; j++) pg_put_f32(y, py + j * y->nb[1], 0, x + j * n, n);
  }
  return PG_OK;
}

// The windows of image b, whose rows `columns` has. param: s0, s1, p0, p1, d0, d1, is_2D
static window window_of(const double *param, const pg_tensor *a, const pg_tensor *b, const pg_tensor *columns) {
  const int is_2d = param[6] != 0;
  const double of_1d[3] = {param[0], param[2], param[4]};
  window w = pg_window(is_2d ? param : of_1d, is_2d ? 2 : 1, a, b, columns->ne + 1);
  const int channel = is_2d ? 2 : 1; // its dimension in b
  w.channels = b->ne[channel];
  w.nb_channel = b->nb[channel];
  w.batch = b->ne[channel + 1];
  w.nb_batch = b->nb[channel + 1];
  return w;
}

// param: IC, s0 .. s2, p0 .. p2, d0 .. d2. The channels of a batch follow each other in dimension 3.
static window window_3d_of(const double *param, const pg_tensor *a, const pg_tensor *b, const pg_tensor *columns) {
  const int64_t channels = (int64_t)param[0], batch = b->ne[3] / channels;
  const int64_t out[AXES] = {columns->ne[1], columns->ne[2], columns->ne[3] / batch};
  window w = pg_window(param + 1, 3, a, b, out);
  w.channels = channels;
  w.nb_channel = b->nb[3];
  w.batch = batch;
  w.nb_batch = b->nb[3] * channels;
  return w;
}

int PG_FN(im2col_any)(const pg_task *t, int ith, int nth) {
  const window w = window_of(t->param, &t->src[0], &t->src[1], &t->dst);
  return rows(t, ith, nth, &w);
}

int PG_FN(im2col_3d_any)(const pg_task *t, int ith, int nth) {
  const window w = window_3d_of(t->param, &t->src[0], &t->src[1], &t->dst);
  return rows(t, ith, nth, &w);
}

// A row of an image, x[0..w->n[0]) += what tap kw of the width of all windows of a row has of it: element `at` of the
// rows of g from `row` on, nb apart.
static void add_tap(float *x, const window *w, const char *row, int64_t nb, int64_t kw) {
  const int64_t s = w->s[0], at = pg_window_at(w, 0, 0, kw);
  const int64_t first = at < 0 ? (-at + s - 1) / s : 0, last = at < w->n[0] ? (w->n[0] - at + s - 1) / s : 0;
  for (int64_t j = first; j < PG_MIN(last, w->out[0]); j++) x[at + j * s] += *(const float *)(row + j * nb);
}

// Image dst from rows g, src[1]. A thread has rows of the image, those of all channels one after the other, because
// they lie side by side in g.
static int image(const pg_task *t, int ith, int nth, const window *w) {
  const pg_tensor *g = &t->src[1];
  const int64_t taps = w->k[0] * w->k[1] * w->k[2];
  const pg_range r = pg_share(w->channels * w->n[1] * w->n[2] * w->batch, ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const int64_t c = ir % w->channels, line = ir / w->channels, h = line % w->n[1], q = line / w->n[1];
    const int64_t d = q % w->n[2], ib = q / w->n[2];
    float *x = (float *)(t->dst.data + ib * w->nb_batch + c * w->nb_channel + d * w->nb[2] + h * w->nb[1]);
    memset(x, 0, (size_t)w->n[0] * sizeof *x);
    for (int64_t kd = 0; kd < w->k[2]; kd++) {
      const int64_t from_d = d - pg_window_at(w, 2, 0, kd), od = from_d / w->s[2];
      if (from_d < 0 || from_d % w->s[2] || od >= w->out[2]) continue;
      for (int64_t kh = 0; kh < w->k[1]; kh++) {
        const int64_t from_h = h - pg_window_at(w, 1, 0, kh), oh = from_h / w->s[1];
        if (from_h < 0 || from_h % w->s[1] || oh >= w->out[1]) continue;
        // places of depth and batch share a dimension in volumes; images have one place of depth
        const char *row = pg_row_at(g, 0, oh, ib * w->out[2] + od);
        const int64_t tap = c * taps + (kd * w->k[1] + kh) * w->k[0];
        for (int64_t kw = 0; kw < w->k[0]; kw++) add_tap(x, w, row + (tap + kw) * g->nb[0], g->nb[1], kw);
      }
    }
  }
  return PG_OK;
}

// param: ne0 .. ne3, then those of im2col. In signals, dimension 2 of the rows is the batch.
int PG_FN(im2col_back_any)(const pg_task *t, int ith, int nth) {
  pg_task of = *t;
  const pg_tensor *g = &t->src[1];
  const window w = window_of(t->param + 4, &t->src[0], &t->dst, g);
  if (t->param[4 + 6] == 0) of.src[1].nb[3] = g->nb[2];
  return image(&of, ith, nth, &w);
}

int PG_FN(im2col_3d_back_any)(const pg_task *t, int ith, int nth) {
  const window w = window_3d_of(t->param + 4, &t->src[0], &t->dst, &t->src[1]);
  return image(t, ith, nth, &w);
}

enum { STRIP = 1024 }; // elements of the signal at a time

// param: s0, oc, p0. Column i holds, for each channel, k elements that are added from i * s0 - p0 on.
int PG_FN(col2im_1d_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *a = &t->src[0], *y = &t->dst;
  const int64_t s = (int64_t)t->param[0], p = (int64_t)t->param[2], n = y->ne[0], k = a->ne[0] / y->ne[1];
  const int64_t strips = (n + STRIP - 1) / STRIP;
  float sum[STRIP], column[STRIP];
  const pg_range r = pg_share(strips * y->ne[1], ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const int64_t c = ir / strips, first = ir % strips * STRIP, last = PG_MIN(first + STRIP, n);
    memset(sum, 0, sizeof sum);
    const int64_t begin = PG_MAX(0, (first + p - k + s) / s); // the first column that reaches `first`
    for (int64_t i = begin; i < a->ne[1] && i * s - p < last; i++) {
      const int64_t at = i * s - p, from = PG_MAX(first, at), to = PG_MIN(last, at + k);
      if (from >= to) continue;
      pg_get_f32(column, a, a->data + i * a->nb[1], c * k + from - at, to - from);
      for (int64_t j = 0; j < to - from; j++) sum[from - first + j] += column[j];
    }
    pg_put_f32(y, pg_row_at(y, c, 0, 0), first, sum, last - first);
  }
  return PG_OK;
}
