// Gradients of norm, group_norm, rms_norm, l2_norm: src[0] is that of the result, src[1] the source of the norm. dst
// may be a source: no restrict.
#include "simd/rms.h"

// Sums over a row, with d = x - shift.
typedef struct sums {
  double d, dd, g, gd;
} sums;

static void add_sums(sums *s, const float *g, const float *x, int64_t n, float shift) {
  const vf sh = vf_set1(shift);
  int64_t i = 0;
  while (i + VF_N <= n) {
    const int64_t end = PG_MIN(n - VF_N, i + PIECE - VF_N);
    vf sd = vf_zero(), sdd = vf_zero(), sg = vf_zero(), sgd = vf_zero();
    for (; i <= end; i += VF_N) {
      const vf d = vf_load(x + i) - sh, a = vf_load(g + i);
      sd += d;
      sdd = vf_fma(d, d, sdd);
      sg += a;
      sgd = vf_fma(a, d, sgd);
    }
    s->d += vf_sum(sd);
    s->dd += vf_sum(sdd);
    s->g += vf_sum(sg);
    s->gd += vf_sum(sgd);
  }
  for (; i < n; i++) {
    const float d = x[i] - shift;
    s->d += d;
    s->dd += (double)d * d;
    s->g += g[i];
    s->gd += (double)g[i] * d;
  }
}

// y = g * scale - off - (x - shift - rest) * slope
static void put_row(float *y, const float *g, const float *x, int64_t n, float scale, float off, float shift,
                    float rest, float slope) {
  int64_t i = 0;
  for (; i + VF_N <= n; i += VF_N) {
    const vf d = vf_load(x + i) - vf_set1(shift) - vf_set1(rest);
    vf_store(y + i, vf_fma(vf_load(g + i), vf_set1(scale), vf_fma(d, vf_set1(-slope), vf_set1(-off))));
  }
  for (; i < n; i++) y[i] = g[i] * scale - off - (x[i] - shift - rest) * slope;
}

// Rows row0 .. (n1 of them) of channels c0 .. c1 of sample i3: what has one mean and one deviation.
typedef struct set {
  int64_t row0, n1, c0, c1, i3;
} set;

#define EACH_ROW(s)                                                                                                    \
  for (int64_t c = (s)->c0; c < (s)->c1; c++)                                                                          \
    for (int64_t r = (s)->row0; r < (s)->row0 + (s)->n1; r++)
#define ROW(t, s) ((float *)pg_row_at(t, r, c, (s)->i3))

enum { FEW = 16 }; // terms that may cancel to nothing: the gradient of one element by itself is 0

// set_back in double, for numbers whose squares overflow f32, and for few.
static void set_back_exactly(const pg_task *t, const set *s, double count, double eps, int centred) {
  const pg_tensor *y = &t->dst, *g = &t->src[0], *x = &t->src[1];
  const int64_t n = x->ne[0];
  double sum = 0, dd = 0, sg = 0, gd = 0;
  EACH_ROW(s) for (int64_t i = 0; i < n; i++) sum += ROW(x, s)[i];
  const double mean = centred ? sum / count : 0;
  EACH_ROW(s) for (int64_t i = 0; i < n; i++) {
    const double d = ROW(x, s)[i] - mean, a = ROW(g, s)[i];
    dd += d * d;
    sg += a;
    gd += a * d;
  }
  const double scale = 1 / sqrt(dd / count + eps), slope = gd / count * scale * scale, off = centred ? sg / count : 0;
  EACH_ROW(s)
  for (int64_t i = 0; i < n; i++) ROW(y, s)[i] = (float)((ROW(g, s)[i] - off - (ROW(x, s)[i] - mean) * slope) * scale);
}

// With y = (x - mean) r, r = 1 / sqrt(mean square + eps): r (g - mean(g) - y mean(g y)). Not centred: means are 0.
static void set_back(const pg_task *t, const set *s, double eps, int centred) {
  const pg_tensor *y = &t->dst, *g = &t->src[0], *x = &t->src[1];
  const int64_t n = x->ne[0];
  const double count = (double)(n * s->n1 * (s->c1 - s->c0));
  if (count < FEW) {
    set_back_exactly(t, s, count, eps, centred);
    return;
  }
  float shift = 0;
  if (centred) {
    sums m = {0};
    EACH_ROW(s) add_sums(&m, ROW(g, s), ROW(x, s), n, 0);
    shift = (float)(m.d / count);
  }
  sums m = {0}; // about `shift`, so that digits do not cancel when the mean is large
  EACH_ROW(s) add_sums(&m, ROW(g, s), ROW(x, s), n, shift);
  const double rest = centred ? m.d / count : 0, square = PG_MAX(m.dd / count - rest * rest, 0) + eps;
  if (!pg_fits_f32(square)) {
    set_back_exactly(t, s, count, eps, centred);
    return;
  }
  const double scale = 1 / sqrt(square), off = centred ? m.g / count * scale : 0;
  const double gd = rest == 0 || isinf(m.gd) ? m.gd : m.gd - rest * m.g, slope = gd / count * scale * scale * scale;
  EACH_ROW(s)
  put_row(ROW(y, s), ROW(g, s), ROW(x, s), n, (float)scale, (float)off, shift, (float)rest, (float)slope);
}

static int rows(const pg_task *t, int ith, int nth, int centred) {
  const pg_range r = pg_share(pg_n_rows(&t->dst), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(&t->dst, ir);
    set_back(t, &(set){i.i1, 1, i.i2, i.i2 + 1, i.i3}, t->param[0], centred);
  }
  return PG_OK;
}

int PG_FN(norm_back_f32)(const pg_task *t, int ith, int nth) { return rows(t, ith, nth, 1); }
int PG_FN(rms_norm_back_f32)(const pg_task *t, int ith, int nth) { return rows(t, ith, nth, 0); }

int PG_FN(group_norm_back_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *x = &t->src[1];
  const int64_t n_groups = (int64_t)t->param[0], channels = x->ne[2], per_group = (channels + n_groups - 1) / n_groups;
  const int64_t filled = (channels + per_group - 1) / per_group; // the last groups may get no channel
  const pg_range r = pg_share(filled * x->ne[3], ith, nth);
  for (int64_t u = r.first; u < r.last; u++) {
    const int64_t c0 = u % filled * per_group, c1 = PG_MIN(c0 + per_group, channels);
    set_back(t, &(set){0, x->ne[1], c0, c1, u / filled}, t->param[1], 1);
  }
  return PG_OK;
}

// With y = x / length: (g - y (g y)) / length; below eps, where the length does not count, g / eps.
int PG_FN(l2_norm_back_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *g = &t->src[0], *x = &t->src[1];
  const int64_t n = x->ne[0];
  const double eps = t->param[0];
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    float *py = (float *)pg_row_at(y, i.i1, i.i2, i.i3);
    const float *pg = (const float *)pg_row_at(g, i.i1, i.i2, i.i3),
                *px = (const float *)pg_row_at(x, i.i1, i.i2, i.i3);
    const double square = pg_sum_squares(px, n, 0), length = sqrt(square);
    if (length < eps) {
      put_row(py, pg, px, n, (float)(1 / eps), 0, 0, 0, 0);
      continue;
    }
    double gx = 0;
    if (n >= FEW && pg_fits_f32(square / (double)n)) {
      sums m = {0};
      add_sums(&m, pg, px, n, 0);
      gx = m.gd;
      put_row(py, pg, px, n, (float)(1 / length), 0, 0, 0, (float)(gx / square / length));
    } else {
      for (int64_t k = 0; k < n; k++) gx += (double)pg[k] * px[k];
      for (int64_t k = 0; k < n; k++) py[k] = (float)((pg[k] - px[k] * (gx / square)) / length);
    }
  }
  return PG_OK;
}
