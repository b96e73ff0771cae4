// cross_entropy_loss and cross_entropy_ids, and their gradients.
#include "simd/rows.h"
#include "simd/vmath.h"

enum { PIECE = 64 * VF_N }; // elements whose f32 sum is added to a double

// The largest of a row's logits, and the sum of exp(x - top) of the others. What exp gives the largest, 1, is not added
// here: when the others are small, they are all of the loss, and a sum in f32 would lose them.
typedef struct row_sum {
  float top;
  double others;
} row_sum;

static row_sum sum_row(const float *x, int64_t n) {
  const vf zero = vf_zero();
  vf tops = vf_set1(-INFINITY);
  int64_t i = 0;
  for (; i + VF_N <= n; i += VF_N) tops = vf_max(tops, vf_load(x + i));
  float top = vf_hmax(tops);
  for (; i < n; i++) top = PG_MAX(top, x[i]);
  double sum = 0, equal = 0; // `equal`: how many are the largest
  for (i = 0; i + VF_N <= n;) {
    const int64_t end = PG_MIN(n - VF_N, i + PIECE - VF_N);
    vf part = zero, part_equal = zero;
    for (; i <= end; i += VF_N) {
      const vf less = vf_load(x + i) - vf_set1(top);
      part += vf_if_lt(less, zero, vf_exp(less), less); // not less than 0: 0 or NaN
      part_equal += vf_if_lt(less, zero, zero, vf_set1(1.0f));
    }
    sum += vf_sum(part);
    equal += vf_sum(part_equal);
  }
  for (; i < n; i++) {
    const double less = (double)x[i] - top;
    sum += less < 0 ? exp(less) : less;
    equal += less < 0 ? 0 : 1;
  }
  return (row_sum){top, sum + (equal - 1)};
}

// The index of the largest of n logits.
static int64_t index_of(const float *x, int64_t n, float top) {
  const vf below = vf_set1(nextafterf(top, -INFINITY));
  int64_t i = 0;
  while (i + VF_N <= n && !vf_any_lt(below, vf_load(x + i))) i += VF_N;
  while (i < n - 1 && x[i] != top) i++;
  return i;
}

int64_t PG_FN(cross_entropy_loss_work)(const pg_task *t, int nth) {
  return pg_times(pg_n_rows(&t->src[0]), sizeof(double));
}

// Labels of 0 do not count, whatever their logits are.
int PG_FN(cross_entropy_loss_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *a = &t->src[0], *b = &t->src[1];
  const int64_t n = a->ne[0], rows = pg_n_rows(a);
  double *part = (double *)t->work;
  const pg_range r = pg_share(rows, ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx at = pg_unravel(a, ir);
    const float *x = (const float *)pg_row_at(a, at.i1, at.i2, at.i3);
    const float *p = (const float *)pg_row_at(b, at.i1, at.i2, at.i3);
    const row_sum s = sum_row(x, n);
    const double log_sum = log1p(s.others);
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
      if (p[i] != 0) sum += p[i] * (((double)x[i] - s.top) - log_sum);
    part[ir] = sum;
  }
  pg_sync(t, nth);
  if (ith == 0) {
    double sum = 0;
    for (int64_t ir = 0; ir < rows; ir++) sum += part[ir];
    *(float *)t->dst.data = (float)(-sum / (double)rows);
  }
  return PG_OK;
}

// src[0]: the gradient of the loss; dst = (softmax(src[1]) times the sum of labels - labels) times that over rows.
int PG_FN(cross_entropy_loss_back_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *d = &t->dst, *a = &t->src[1], *b = &t->src[2];
  const int64_t n = d->ne[0], rows = pg_n_rows(d);
  const double g_row = *(const float *)t->src[0].data / (double)rows;
  const vf g = vf_set1((float)g_row);
  const pg_range r = pg_share(rows, ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx at = pg_unravel(d, ir);
    float *y = (float *)pg_row_at(d, at.i1, at.i2, at.i3);
    const float *x = (const float *)pg_row_at(a, at.i1, at.i2, at.i3);
    const float *p = (const float *)pg_row_at(b, at.i1, at.i2, at.i3);
    const row_sum s = sum_row(x, n);
    const int64_t k = index_of(x, n, s.top);
    const double p_others = pg_sum_f32(p, k) + pg_sum_f32(p + k + 1, n - k - 1);
    const float factor = (float)((p[k] + p_others) / (1 + s.others));
    const double of_top = g_row * ((p_others - p[k] * s.others) / (1 + s.others)); // before p is written over
    int64_t i = 0;
    for (; i + VF_N <= n; i += VF_N) {
      const vf e = vf_exp(vf_load(x + i) - vf_set1(s.top));
      vf_store(y + i, vf_fma(e, vf_set1(factor), -vf_load(p + i)) * g);
    }
    if (i < n) {
      float tail[VF_N];
      const int m = (int)(n - i);
      const vf e = vf_exp(vf_load_n(x + i, m) - vf_set1(s.top));
      vf_store(tail, vf_fma(e, vf_set1(factor), -vf_load_n(p + i, m)) * g);
      memcpy(y + i, tail, (size_t)m * sizeof(float));
    }
    y[k] = (float)of_top; // the difference of two numbers of about 1 when the model is sure
  }
  return PG_OK;
}

// The class that ids has for row i of the logits; negative: the row does not count.
static int64_t class_of(const pg_tensor *ids, pg_idx i) {
  return *(const int32_t *)(ids->data + i.i1 * ids->nb[0] + i.i2 * ids->nb[1] + i.i3 * ids->nb[2]);
}

int64_t PG_FN(cross_entropy_ids_work)(const pg_task *t, int nth) {
  return pg_times(pg_n_rows(&t->src[0]), sizeof(double));
}

int PG_FN(cross_entropy_ids_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *a = &t->src[0], *ids = &t->src[1];
  const int64_t n = a->ne[0], rows = pg_n_rows(a);
  double *part = (double *)t->work;
  const pg_range r = pg_share(rows, ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx at = pg_unravel(a, ir);
    const int64_t id = class_of(ids, at);
    if (id >= n) pg_fail(t, PG_E_INDEX, id); // and go on: other threads wait
    part[ir] = 0;
    if (id < 0 || id >= n) continue;
    const float *x = (const float *)pg_row_at(a, at.i1, at.i2, at.i3);
    const row_sum s = sum_row(x, n);
    part[ir] = log1p(s.others) - ((double)x[id] - s.top);
  }
  pg_sync(t, nth);
  if (ith == 0) {
    double sum = 0;
    int64_t counted = 0;
    for (int64_t ir = 0; ir < rows; ir++) {
      sum += part[ir];
      counted += class_of(ids, pg_unravel(a, ir)) >= 0;
    }
    *(float *)t->dst.data = counted ? (float)(sum / (double)counted) : 0.0f;
  }
  return PG_OK;
}

// src[0]: the gradient of the loss; dst = (softmax(src[1]) - 1 in the row's class) times that over the rows that count.
int PG_FN(cross_entropy_ids_back_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *d = &t->dst, *a = &t->src[1], *ids = &t->src[2];
  const int64_t n = d->ne[0], rows = pg_n_rows(d);
  int64_t counted = 0;
  for (int64_t ir = 0; ir < rows; ir++) counted += class_of(ids, pg_unravel(d, ir)) >= 0;
  const float g = counted ? (float)(*(const float *)t->src[0].data / (double)counted) : 0.0f;
  const pg_range r = pg_share(rows, ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx at = pg_unravel(d, ir);
    float *y = (float *)pg_row_at(d, at.i1, at.i2, at.i3);
    const float *x = (const float *)pg_row_at(a, at.i1, at.i2, at.i3);
    const int64_t id = class_of(ids, at);
    if (id >= n) return pg_fail(t, PG_E_INDEX, id);
    if (id < 0) {
      memset(y, 0, (size_t)n * sizeof(float));
      continue;
    }
    const row_sum s = sum_row(x, n);
    const double sum = 1 + s.others, p_less_1 = x[id] == s.top ? -s.others / sum : exp((double)x[id] - s.top) / sum - 1;
    const float factor = (float)(g / sum);
    const float of_class = (float)(g * p_less_1);
    int64_t i = 0;
    for (; i + VF_N <= n; i += VF_N) vf_store(y + i, vf_exp(vf_load(x + i) - vf_set1(s.top)) * vf_set1(factor));
    if (i < n) {
      float tail[VF_N];
      const int m = (int)(n - i);
      vf_store(tail, vf_exp(vf_load_n(x + i, m) - vf_set1(s.top)) * vf_set1(factor));
      memcpy(y + i, tail, (size_t)m * sizeof(float));
    }
    y[id] = of_class;
  }
  return PG_OK;
}
