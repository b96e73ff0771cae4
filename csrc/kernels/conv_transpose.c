// conv_transpose_1d, conv_transpose_2d_p0. Element x of a row of the result, x = q * stride + phase, is the sum over j
// of element q - j of the image times tap j * stride + phase of the kernel. So each phase is a sum of shifted rows.
// Phases without a tap are zeros.
#include "kernels/conv_sum.h"

enum { CHANNELS = 64 };

// Signals are images of one row, whose height has stride 1.
typedef struct conv {
  int64_t w, h, channels, batch, out, kw, kh, sw, sh, yw, yh; // sizes and strides of image, kernel and result
  int64_t nb_row, nb_channel, nb_batch, nb_kh, nb_out, nb_in, y_row, y_out, y_batch;
  int64_t jw, jh;            // taps per phase along width and height, at most
  int64_t pw, ph;            // phases that have taps
  int64_t taps, blocks, row; // floats per row laid out; blocks of OUTS kernels
  float *weight;             // [ph][pw][blocks][taps][OUTS]
  int32_t *at;               // [2][taps]
  float *x;                  // [jh][channels][row], one per thread
} conv;

static int64_t weight_size(const conv *c) {
  return pg_times(pg_times(c->ph, c->pw), pg_times(c->blocks, c->taps * OUTS));
}

static int64_t x_size(const conv *c) { return pg_times(pg_times(c->channels, c->jh), c->row); }

static conv conv_of(const pg_task *t, int is_2d) {
  const pg_tensor *a = &t->src[0], *b = &t->src[1], *y = &t->dst;
  const int64_t s = (int64_t)t->param[0];
  const int d = is_2d ? 2 : 1; // the dimension of the channels
  conv c = {.w = b->ne[0],
            .h = is_2d ? b->ne[1] : 1,
            .channels = b->ne[d],
            .batch = b->ne[d + 1],
            .out = a->ne[d],
            .kw = a->ne[0],
            .kh = is_2d ? a->ne[1] : 1,
            .sw = s,
            .sh = is_2d ? s : 1,
            .yw = y->ne[0],
            .yh = is_2d ? y->ne[1] : 1,
            .nb_row = is_2d ? b->nb[1] : 0,
            .nb_channel = b->nb[d],
            .nb_batch = b->nb[d + 1],
            .nb_kh = is_2d ? a->nb[1] : 0,
            .nb_out = a->nb[d],
            .nb_in = a->nb[d + 1],
            .y_row = is_2d ? y->nb[1] : 0,
            .y_out = y->nb[d],
            .y_batch = y->nb[d + 1]};
  c.jw = (c.kw + c.sw - 1) / c.sw;
  c.jh = (c.kh + c.sh - 1) / c.sh;
  c.pw = PG_MIN(c.sw, c.kw);
  c.ph = PG_MIN(c.sh, c.kh);
  c.taps = c.channels * c.jh * c.jw;
  c.blocks = (c.out + OUTS - 1) / OUTS;
  c.row = STRIP + c.jw - 1;
  return c;
}

static void use(conv *c, char *work, int ith) {
  c->weight = (float *)work;
  c->at = (int32_t *)(c->weight + weight_size(c));
  c->x = (float *)(c->at + 2 * c->taps) + ith * x_size(c);
}

// Taps of this phase along an axis: those at phase, phase + stride ... below k.
static int64_t taps_of(int64_t k, int64_t stride, int64_t phase) {
  return k > phase ? (k - phase + stride - 1) / stride : 0;
}

// Taps in the order in which `at` lists them: along the height, along the width (jw of them), channels.
static void put_weights(const conv *c, const pg_tensor *a, int ith, int nth) {
  const pg_range r = pg_share(c->ph * c->pw * c->blocks, ith, nth);
  for (int64_t ib = r.first; ib < r.last; ib++) {
    const int64_t phase = ib / c->blocks, ph = phase / c->pw, pw = phase % c->pw, first = ib % c->blocks * OUTS;
    float *to = c->weight + ib * c->taps * OUTS;
    for (int64_t kh = ph; kh < c->kh; kh += c->sh)
      for (int64_t kw = pw; kw < c->kw; kw += c->sw)
        for (int64_t ic = 0; ic < c->channels; ic++)
          for (int64_t o = first; o < first + OUTS; o++, to++) {
            *to = 0;
            if (o < c->out) pg_get_f32(to, a, a->data + ic * c->nb_in + o * c->nb_out + kh * c->nb_kh, kw, 1);
          }
  }
}

// One list for phases of jw taps along the width, one for those of one tap less.
static void put_offsets(const conv *c) {
  for (int64_t less = 0; less < 2; less++) {
    int32_t *at = c->at + less * c->taps;
    for (int64_t jh = 0; jh < c->jh; jh++)
      for (int64_t jw = 0; jw < c->jw - less; jw++)
        for (int64_t ic = 0; ic < c->channels; ic++)
          *at++ = (int32_t)((jh * c->channels + ic) * c->row + c->jw - 1 - jw);
  }
}

// Lay out the rows that row `yh` of the result depends on: elements q .. q + n, and the elements before that taps
// reach.
static void put_rows(const conv *c, const pg_tensor *b, const char *image, int64_t q, int64_t yh, int64_t n) {
  float *x = c->x;
  for (int64_t jh = 0; jh < c->jh; jh++) {
    const int64_t h = yh / c->sh - jh;
    const char *row = h >= 0 && h < c->h ? image + h * c->nb_row : NULL;
    for (int64_t ic = 0; ic < c->channels; ic++, x += c->row)
      pg_fill(x, pg_padded(n) + c->jw - 1, b, row ? row + ic * c->nb_channel : NULL, c->w, q - (c->jw - 1), 1);
  }
}

// y[(q0 + j) * sw + pw] of the row at py
static void put_phase(const conv *c, float *py, const float *y, int64_t q0, int64_t pw, int64_t n) {
  for (int64_t j = 0; j < n; j++) py[(q0 + j) * c->sw + pw] = y[j];
}

// The taps of a phase, in the order of `at`: along the height those that meet a row of the image, along the width all.
typedef struct taps {
  int64_t n_h, n_w, n; // n: with channels
  const int32_t *at;
  const float *weight; // of the first block
} taps;

static taps taps_at(const conv *c, int64_t yh, int64_t pw) {
  const int64_t q = yh / c->sh, ph = yh % c->sh, first = PG_MAX(0, q - (c->h - 1));
  taps s = {.n_h = PG_MIN(taps_of(c->kh, c->sh, ph), q + 1) - first, .n_w = taps_of(c->kw, c->sw, pw)};
  if (s.n_h <= 0 || s.n_w <= 0) return (taps){0};
  const int64_t skip = first * s.n_w * c->channels;
  s.n = s.n_h * s.n_w * c->channels;
  s.at = (s.n_w == c->jw ? c->at : c->at + c->taps) + skip;
  s.weight = c->weight + (ph * c->pw + pw) * c->blocks * c->taps * OUTS + skip * OUTS;
  return s;
}

// Near the ends of a row some taps meet zeros instead of elements, and 0 times an infinite weight is NaN. Elements of
// OUTS rows y, from q0 on, that became NaN are summed again, over the taps that meet an element.
static void mend_ends(const conv *c, const taps *s, const float *weight, float *y, int64_t q0, int64_t n) {
  if (q0 >= s->n_w - 1 && q0 + n <= c->w) return;
  for (int64_t j = 0; j < n; j++) {
    const int64_t q = q0 + j, from = PG_MAX(0, q - (c->w - 1)), to = PG_MIN(s->n_w, q + 1);
    int finite = 1;
    for (int o = 0; o < OUTS; o++) finite &= isfinite(y[o * STRIP + j]) != 0;
    if (finite || (from == 0 && to == s->n_w)) continue;
    for (int o = 0; o < OUTS; o++) {
      float sum = 0;
      for (int64_t i = 0; i < s->n; i++) {
        const int64_t jw = i / c->channels % s->n_w;
        if (jw >= from && jw < to) sum += weight[i * OUTS + o] * c->x[s->at[i] + j];
      }
      y[o * STRIP + j] = sum;
    }
  }
}

static int convolve(const pg_task *t, int ith, int nth, const conv *c) {
  const pg_tensor *b = &t->src[1];
  put_weights(c, &t->src[0], ith, nth);
  if (ith == 0) put_offsets(c);
  pg_sync(t, nth);
  const int64_t steps = (c->yw + c->sw - 1) / c->sw, strips = (steps + STRIP - 1) / STRIP;
  const int64_t parts = (c->out + CHANNELS - 1) / CHANNELS, phases = PG_MIN(c->sw, c->yw);
  const pg_range r = pg_share(parts * strips * c->yh * c->batch, ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const int64_t q0 = ir % strips * STRIP, part = ir / strips % parts, yh = ir / strips / parts % c->yh;
    const int64_t ib = ir / strips / parts / c->yh, last = PG_MIN((part + 1) * CHANNELS, c->out);
    if (yh % c->sh < c->ph) put_rows(c, b, b->data + ib * c->nb_batch, q0, yh, PG_MIN(STRIP, steps - q0));
    char *py = t->dst.data + ib * c->y_batch + yh * c->y_row;
    for (int64_t pw = 0; pw < phases; pw++) {
      const int64_t n = PG_MIN(STRIP, (c->yw - pw + c->sw - 1) / c->sw - q0); // of this phase in this strip
      const taps s = taps_at(c, yh, pw);
      for (int64_t o = part * CHANNELS; o < last; o += OUTS) {
        float y[OUTS * STRIP];
        const float *weight = s.n ? s.weight + o / OUTS * c->taps * OUTS : NULL;
        pg_sum_shifted(y, weight, c->x, s.at, s.n, n, OUTS);
        mend_ends(c, &s, weight, y, q0, n);
        for (int64_t j = 0; j < PG_MIN(OUTS, last - o); j++)
          put_phase(c, (float *)(py + (o + j) * c->y_out), y + j * STRIP, q0, pw, n);
      }
    }
  }
  return PG_OK;
}

#define OP(name, is_2d)                                                                                                \
  int64_t PG_FN(name##_work)(const pg_task *t, int nth) {                                                              \
    const conv c = conv_of(t, is_2d);                                                                                  \
    const int64_t floats = pg_plus(pg_plus(weight_size(&c), 2 * c.taps), pg_times(nth, x_size(&c)));                   \
    return pg_in_32_bits(x_size(&c), pg_times(floats, sizeof(float)));                                                 \
  }                                                                                                                    \
  int PG_FN(name##_any)(const pg_task *t, int ith, int nth) {                                                          \
    conv c = conv_of(t, is_2d);                                                                                        \
    use(&c, t->work, ith);                                                                                             \
    return convolve(t, ith, nth, &c);                                                                                  \
  }
OP(conv_transpose_1d, 0)
OP(conv_transpose_2d_p0, 1)
