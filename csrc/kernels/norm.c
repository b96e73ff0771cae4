// norm, group_norm, rms_norm, l2_norm. dst may be the source: no restrict.
#include "simd/rms.h"

// Sums of d = x - shift, and of d^2.
typedef struct moments {
  double d, dd;
} moments;

static void add_moments(moments *m, const float *x, int64_t n, float shift) {
  const vf s = vf_set1(shift);
  int64_t i = 0;
  while (i + VF_N <= n) {
    const int64_t end = PG_MIN(n - VF_N, i + PIECE - VF_N);
    vf d0 = vf_zero(), d1 = vf_zero(), q0 = vf_zero(), q1 = vf_zero();
    for (; i + VF_N <= end; i += 2 * VF_N) {
      const vf a = vf_load(x + i) - s, b = vf_load(x + i + VF_N) - s;
      d0 += a;
      d1 += b;
      q0 = vf_fma(a, a, q0);
      q1 = vf_fma(b, b, q1);
    }
    for (; i <= end; i += VF_N) {
      const vf a = vf_load(x + i) - s;
      d0 += a;
      q0 = vf_fma(a, a, q0);
    }
    m->d += vf_sum(d0 + d1);
    m->dd += vf_sum(q0 + q1);
  }
  for (; i < n; i++) {
    const float d = x[i] - shift;
    m->d += d;
    m->dd += (double)d * d;
  }
}

static double sum_row(const float *x, int64_t n) {
  double sum = 0;
  int64_t i = 0;
  while (i + VF_N <= n) {
    const int64_t end = PG_MIN(n - VF_N, i + PIECE - VF_N);
    vf s = vf_zero();
    for (; i <= end; i += VF_N) s += vf_load(x + i);
    sum += vf_sum(s);
  }
  for (; i < n; i++) sum += x[i];
  return sum;
}

// y = (x - shift - rest) * scale. `rest` is what `shift` lost when the mean was rounded to f32.
static void put_row(float *y, const float *x, int64_t n, float shift, float rest, float scale) {
  int64_t i = 0;
  for (; i + VF_N <= n; i += VF_N) vf_store(y + i, (vf_load(x + i) - vf_set1(shift) - vf_set1(rest)) * vf_set1(scale));
  for (; i < n; i++) y[i] = (x[i] - shift - rest) * scale;
}

static void scale_row(float *y, const float *x, int64_t n, double scale) {
  int64_t i = 0;
  if (pg_fits_f32(scale * scale)) {
    for (; i + VF_N <= n; i += VF_N) vf_store(y + i, vf_load(x + i) * vf_set1((float)scale));
    for (; i < n; i++) y[i] = x[i] * (float)scale;
  }
  for (; i < n; i++) y[i] = (float)(x[i] * scale);
}

// Rows row0.. (n1 of them) of channels c0..c1 of sample i3.
typedef struct set {
  int64_t row0, n1, c0, c1, i3;
} set;

#define EACH_ROW(s)                                                                                                    \
  for (int64_t c = (s)->c0; c < (s)->c1; c++)                                                                          \
    for (int64_t r = (s)->row0; r < (s)->row0 + (s)->n1; r++)
#define ROW(t, s) ((float *)pg_row_at(t, r, c, (s)->i3))

// `standardise` in double, for numbers whose squares or differences overflow f32.
static void standardise_exactly(const pg_tensor *y, const pg_tensor *x, const set *s, double count, double eps) {
  const int64_t n = x->ne[0];
  double sum = 0, dd = 0;
  EACH_ROW(s) for (int64_t i = 0; i < n; i++) sum += ROW(x, s)[i];
  const double mean = sum / count;
  EACH_ROW(s) for (int64_t i = 0; i < n; i++) dd += (ROW(x, s)[i] - mean) * (ROW(x, s)[i] - mean);
  const double scale = 1 / sqrt(dd / count + eps);
  EACH_ROW(s) for (int64_t i = 0; i < n; i++) ROW(y, s)[i] = (float)((ROW(x, s)[i] - mean) * scale);
}

// A set minus its mean, divided by its deviation.
static void standardise(const pg_tensor *y, const pg_tensor *x, const set *s, double eps) {
  const int64_t n = x->ne[0];
  const double count = (double)(n * s->n1 * (s->c1 - s->c0));
  double sum = 0;
  EACH_ROW(s) sum += sum_row(ROW(x, s), n);
  const float shift = (float)(sum / count);
  moments m = {0, 0}; // about `shift`, so that digits do not cancel when the mean is large
  EACH_ROW(s) add_moments(&m, ROW(x, s), n, shift);
  const double rest = m.d / count, variance = m.dd / count - rest * rest, square = (variance < 0 ? 0 : variance) + eps;
  if (!pg_fits_f32(square)) {
    standardise_exactly(y, x, s, count, eps);
    return;
  }
  const float scale = (float)(1 / sqrt(square));
  EACH_ROW(s) put_row(ROW(y, s), ROW(x, s), n, shift, (float)rest, scale);
}

// Multiply rows of the result by the weight, and add the operand to add, when the task has them (operands.h).
static void multiply_add(const pg_task *t, pg_idx i, int multiply) {
  const pg_tensor *w = &t->src[PG_NORM_WEIGHT], *b = &t->src[PG_NORM_ADDED];
  const int64_t n = t->dst.ne[0];
  float *y = (float *)pg_row_at(&t->dst, i.i1, i.i2, i.i3);
  for (int64_t k = 0; multiply && w->data && k < n; k++) y[k] *= ((const float *)w->data)[k];
  if (!b->data) return;
  const float *added = (const float *)pg_row_at(b, i.i1 % b->ne[1], i.i2 % b->ne[2], i.i3 % b->ne[3]);
  for (int64_t k = 0; k < n; k++) y[k] += added[k];
}

int PG_FN(norm_f32)(const pg_task *t, int ith, int nth) {
  const pg_range r = pg_share(pg_n_rows(&t->dst), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(&t->dst, ir);
    standardise(&t->dst, &t->src[PG_NORM_X], &(set){i.i1, 1, i.i2, i.i2 + 1, i.i3}, t->param[PG_NORM_EPS]);
    multiply_add(t, i, 1);
  }
  return PG_OK;
}

int PG_FN(group_norm_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *x = &t->src[0];
  const int64_t n_groups = (int64_t)t->param[0], channels = x->ne[2], per_group = (channels + n_groups - 1) / n_groups;
  const int64_t filled = (channels + per_group - 1) / per_group; // the last groups may get no channel
  const pg_range r = pg_share(filled * x->ne[3], ith, nth);
  for (int64_t u = r.first; u < r.last; u++) {
    const int64_t c0 = u % filled * per_group, c1 = PG_MIN(c0 + per_group, channels);
    standardise(&t->dst, x, &(set){0, x->ne[1], c0, c1, u / filled}, t->param[1]);
  }
  return PG_OK;
}

int PG_FN(rms_norm_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *x = &t->src[PG_NORM_X];
  const float *weight = (const float *)t->src[PG_NORM_WEIGHT].data;
  const int64_t n = x->ne[0];
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    const float *px = (const float *)pg_row_at(x, i.i1, i.i2, i.i3);
    const double scale = pg_rms_scale(px, n, t->param[PG_NORM_EPS]);
    float *py = (float *)pg_row_at(y, i.i1, i.i2, i.i3);
    if (weight) {
      pg_scale_mul(py, px, scale, weight, n);
    } else {
      scale_row(py, px, n, scale);
    }
    multiply_add(t, i, 0);
  }
  return PG_OK;
}

int PG_FN(l2_norm_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *x = &t->src[0];
  const int64_t n = x->ne[0];
  const double eps = t->param[0];
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    const float *px = (const float *)pg_row_at(x, i.i1, i.i2, i.i3);
    const double length = sqrt(pg_sum_squares(px, n, eps * eps / (double)n));
    scale_row((float *)pg_row_at(y, i.i1, i.i2, i.i3), px, n, 1 / (length < eps ? eps : length));
  }
  return PG_OK;
}
