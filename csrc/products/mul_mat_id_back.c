// Gradients of mul_mat_id: by its columns (as as stored, any type), and by its matrices. The columns of one expert are
// multiplied side by side, so that each of its rows is read once for some of them.
#include "formats/storage.h"
#include "products/experts.h"
#include "simd/units.h"

enum { STRIP = 256, COLUMNS = 16, ROWS = 8 }; // elements (a multiple of every block size), columns, rows at a time

static void add_scaled(float *restrict y, const float *restrict x, float f, int64_t n) {
  const vf v = vf_set1(f);
  int64_t i = 0;
  for (; i + VF_N <= n; i += VF_N) vf_store(y + i, vf_fma(vf_load(x + i), v, vf_load(y + i)));
  for (; i < n; i++) y[i] += x[i] * f;
}

// What threads share: strips of an expert's columns. `list` has the columns by expert, `end` where each one's end.
typedef struct job {
  int32_t *list, *end;
  int64_t n_expert;
} job;

static int job_of(const pg_task *t, int64_t n_expert, int ith, job *j) {
  const int64_t bytes = pg_sorted_bytes_of(&t->src[2], n_expert);
  j->n_expert = n_expert;
  j->list = (int32_t *)(t->work + ith * bytes);
  j->end = j->list + t->src[2].ne[0] * t->src[2].ne[1];
  return pg_sort_columns_of(t, n_expert, j->list, j->end);
}

static float gradient_at(const pg_task *t, int64_t m, int32_t c) {
  const pg_tensor *b = &t->src[1];
  const int64_t n_used = b->ne[1];
  return *(const float *)(b->data + m * b->nb[0] + c % n_used * b->nb[1] + c / n_used * b->nb[2]);
}

int64_t PG_FN(mul_mat_id_back_b_work)(const pg_task *t, int nth) {
  return pg_times(nth, pg_sorted_bytes_of(&t->src[2], t->src[0].ne[2]));
}

// y[i0 .. i0 + n, c] of n_cols columns c of expert e = sum over m of as[.., m, e] b[m, c]
static void strip_of_columns(const pg_task *t, int64_t e, int64_t i0, int64_t n, const int32_t *list, int64_t n_cols) {
  const pg_tensor *y = &t->dst, *as = &t->src[0];
  const pg_to_f32 to_f32 = PG_FN(to_f32)(as->type);
  const char *row = as->data + e * as->nb[2] + i0 / pg_block_size(as->type) * as->nb[0];
  float sum[COLUMNS][STRIP], x[STRIP];
  memset(sum, 0, sizeof sum);
  for (int64_t m = 0; m < as->ne[1]; m++, row += as->nb[1]) {
    to_f32(row, x, n);
    for (int64_t k = 0; k < n_cols; k++) add_scaled(sum[k], x, gradient_at(t, m, list[k]), n);
  }
  for (int64_t k = 0; k < n_cols; k++) {
    const int64_t c = list[k], u = c % y->ne[1], token = c / y->ne[1];
    memcpy(y->data + u * y->nb[1] + token * y->nb[2] + i0 * 4, sum[k], (size_t)n * sizeof(float));
  }
}

int PG_FN(mul_mat_id_back_b_any)(const pg_task *t, int ith, int nth) {
  job j;
  const int status = job_of(t, t->src[0].ne[2], ith, &j);
  if (status) return status; // all threads see the same ids
  const int64_t n = t->dst.ne[0], strips = (n + STRIP - 1) / STRIP;
  int64_t all = 0, unit = 0;
  for (int64_t e = 0; e < j.n_expert; e++) all += (j.end[e] - (e ? j.end[e - 1] : 0) + COLUMNS - 1) / COLUMNS * strips;
  const pg_range r = pg_share(all, ith, nth);
  for (int64_t e = 0; e < j.n_expert; e++)
    for (int64_t c = e ? j.end[e - 1] : 0; c < j.end[e]; c += COLUMNS)
      for (int64_t i0 = 0; i0 < n; i0 += STRIP, unit++)
        if (unit >= r.first && unit < r.last)
          strip_of_columns(t, e, i0, PG_MIN(STRIP, n - i0), j.list + c, PG_MIN(COLUMNS, j.end[e] - c));
  return PG_OK;
}

int64_t PG_FN(mul_mat_id_back_as_work)(const pg_task *t, int nth) {
  return pg_times(nth, pg_sorted_bytes_of(&t->src[2], t->dst.ne[2]));
}

// y[i0 .. i0 + n, m0 .. m0 + rows, e] = sum over e's columns c of a[.., c] b[m, c]
static void strip_of_rows(const pg_task *t, const job *j, int64_t e, int64_t i0, int64_t n, int64_t m0, int64_t rows) {
  const pg_tensor *y = &t->dst, *a = &t->src[0];
  const int64_t n_used = t->src[1].ne[1];
  float sum[ROWS][STRIP] = {{0}};
  for (int64_t k = e ? j->end[e - 1] : 0; k < j->end[e]; k++) {
    const int32_t c = j->list[k];
    const float *x = (const float *)(a->data + c % n_used % a->ne[1] * a->nb[1] + c / n_used * a->nb[2]) + i0;
    for (int64_t m = 0; m < rows; m++) add_scaled(sum[m], x, gradient_at(t, m0 + m, c), n);
  }
  for (int64_t m = 0; m < rows; m++)
    memcpy(y->data + (m0 + m) * y->nb[1] + e * y->nb[2] + i0 * 4, sum[m], (size_t)n * sizeof(float));
}

int PG_FN(mul_mat_id_back_as_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst;
  job j;
  const int status = job_of(t, y->ne[2], ith, &j);
  if (status) return status;
  const int64_t n = y->ne[0], strips = (n + STRIP - 1) / STRIP, groups = (y->ne[1] + ROWS - 1) / ROWS;
  const pg_range r = pg_share(strips * groups * j.n_expert, ith, nth);
  for (int64_t unit = r.first; unit < r.last; unit++) {
    const int64_t i0 = unit % strips * STRIP, m0 = unit / strips % groups * ROWS;
    strip_of_rows(t, &j, unit / strips / groups, i0, PG_MIN(STRIP, n - i0), m0, PG_MIN(ROWS, y->ne[1] - m0));
  }
  return PG_OK;
}
