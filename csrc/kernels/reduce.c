// Sums and order along rows; sums over repeats (repeat_back).
#include "simd/rows.h"
#include "kernels/order.h"

enum { STRIP = 2048 }; // elements at a time; partial sums do not depend on the number of threads

// Sum of elements k .. k + n of a row, n <= STRIP.
static double sum_strip(const pg_tensor *t, const char *row, int64_t k, int64_t n) {
  if (pg_is_f32_row(t)) return pg_sum_f32((const float *)row + k, n);
  float s[STRIP];
  pg_get_f32(s, t, row, k, n);
  return pg_sum_f32(s, n);
}

static int64_t strips_of(const pg_tensor *t) { return (t->ne[0] + STRIP - 1) / STRIP * pg_n_rows(t); }

int64_t PG_FN(sum_work)(const pg_task *t, int nth) { return pg_times(strips_of(&t->src[0]), sizeof(double)); }

int PG_FN(sum_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *a = &t->src[0];
  const int64_t n = a->ne[0], per_row = (n + STRIP - 1) / STRIP, strips = strips_of(a);
  double *part = (double *)t->work;
  const pg_range r = pg_share(strips, ith, nth);
  for (int64_t s = r.first; s < r.last; s++) {
    const pg_idx i = pg_unravel(a, s / per_row);
    const int64_t k = s % per_row * STRIP;
    part[s] = sum_strip(a, pg_row_at(a, i.i1, i.i2, i.i3), k, PG_MIN(STRIP, n - k));
  }
  pg_sync(t, nth);
  if (ith == 0) {
    double total = 0;
    for (int64_t s = 0; s < strips; s++) total += part[s];
    const float y = (float)total;
    pg_put_f32(&t->dst, t->dst.data, 0, &y, 1);
  }
  return PG_OK;
}

enum { REPEATED = 64, ADDED = 64 }; // elements of dst at a time; rows whose f32 sum is added to a double

// y[0..n) = the sum over all repeats of elements k .. k + n of dst's row i in src[0].
static void sum_repeats(const pg_task *t, pg_idx i, int64_t k, int64_t n, double *y) {
  const pg_tensor *a = &t->src[0], *d = &t->dst;
  const int dense = pg_is_f32_row(a);
  float part[REPEATED] = {0}, row[REPEATED];
  int64_t added = 0;
  for (int64_t j = 0; j < n; j++) y[j] = 0;
  for (int64_t i3 = i.i3; i3 < a->ne[3]; i3 += d->ne[3])
    for (int64_t i2 = i.i2; i2 < a->ne[2]; i2 += d->ne[2])
      for (int64_t i1 = i.i1; i1 < a->ne[1]; i1 += d->ne[1]) {
        const char *pa = pg_row_at(a, i1, i2, i3);
        for (int64_t i0 = k; i0 < a->ne[0]; i0 += d->ne[0]) {
          const float *x = dense ? (const float *)pa + i0 : row;
          if (!dense) pg_get_f32(row, a, pa, i0, n);
          for (int64_t j = 0; j < n; j++) part[j] += x[j];
          if (++added < ADDED) continue;
          for (int64_t j = 0; j < n; j++) y[j] += part[j];
          memset(part, 0, sizeof part);
          added = 0;
        }
      }
  for (int64_t j = 0; j < n; j++) y[j] += part[j];
}

int PG_FN(repeat_back_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *a = &t->src[0], *d = &t->dst;
  const int64_t n = d->ne[0], strips = (n + REPEATED - 1) / REPEATED;
  const pg_range r = pg_share(strips * pg_n_rows(d), ith, nth);
  for (int64_t u = r.first; u < r.last; u++) {
    const pg_idx i = pg_unravel(d, u / strips);
    const int64_t k = u % strips * REPEATED, m = PG_MIN(REPEATED, n - k);
    float *y = (float *)pg_row_at(d, i.i1, i.i2, i.i3) + k;
    double sum[REPEATED] = {0};
    if (n > 1) {
      sum_repeats(t, i, k, m, sum);
    } else { // whole rows
      for (int64_t i3 = i.i3; i3 < a->ne[3]; i3 += d->ne[3])
        for (int64_t i2 = i.i2; i2 < a->ne[2]; i2 += d->ne[2])
          for (int64_t i1 = i.i1; i1 < a->ne[1]; i1 += d->ne[1])
            for (int64_t i0 = 0; i0 < a->ne[0]; i0 += STRIP)
              sum[0] += sum_strip(a, pg_row_at(a, i1, i2, i3), i0, PG_MIN(STRIP, a->ne[0] - i0));
    }
    for (int64_t j = 0; j < m; j++) y[j] = (float)sum[j];
  }
  return PG_OK;
}

int64_t PG_FN(count_work)(const pg_task *t, int nth) { return nth * (int64_t)sizeof(int64_t); }

int PG_FN(count_equal_i64)(const pg_task *t, int ith, int nth) {
  const pg_tensor *a = &t->src[0], *b = &t->src[1];
  int64_t *counts = (int64_t *)t->work, n = 0;
  const pg_range r = pg_share(pg_n_rows(a), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(a, ir);
    const char *pa = pg_row_at(a, i.i1, i.i2, i.i3), *pb = pg_row_at(b, i.i1, i.i2, i.i3);
    for (int64_t k = 0; k < a->ne[0]; k++)
      n += *(const int32_t *)(pa + k * a->nb[0]) == *(const int32_t *)(pb + k * b->nb[0]);
  }
  counts[ith] = n;
  pg_sync(t, nth);
  for (int i = 1; ith == 0 && i < nth; i++) n += counts[i];
  if (ith == 0) *(int64_t *)t->dst.data = n;
  return PG_OK;
}

static int row_sums(const pg_task *t, int ith, int nth, double divisor) {
  const pg_tensor *a = &t->src[0];
  const pg_range r = pg_share(pg_n_rows(a), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(a, ir);
    const char *row = pg_row_at(a, i.i1, i.i2, i.i3);
    double total = 0;
    for (int64_t k = 0; k < a->ne[0]; k += STRIP) total += sum_strip(a, row, k, PG_MIN(STRIP, a->ne[0] - k));
    *(float *)pg_row_at(&t->dst, i.i1, i.i2, i.i3) = (float)(total / divisor);
  }
  return PG_OK;
}

int PG_FN(sum_rows_f32)(const pg_task *t, int ith, int nth) { return row_sums(t, ith, nth, 1.0); }
int PG_FN(mean_f32)(const pg_task *t, int ith, int nth) { return row_sums(t, ith, nth, (double)t->src[0].ne[0]); }

// Sums of integers wrap.
int PG_FN(sum_rows_i64)(const pg_task *t, int ith, int nth) {
  const pg_tensor *a = &t->src[0];
  const pg_range r = pg_share(pg_n_rows(a), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(a, ir);
    const char *row = pg_row_at(a, i.i1, i.i2, i.i3);
    uint64_t total = 0;
    for (int64_t k = 0; k < a->ne[0]; k++) {
      const char *p = row + k * a->nb[0];
      total += a->type == PG_I32 ? (uint64_t) * (const int32_t *)p : *(const uint64_t *)p;
    }
    *(uint64_t *)pg_row_at(&t->dst, i.i1, i.i2, i.i3) = total;
  }
  return PG_OK;
}

// The largest and the smallest of a row; NaN where there is one.
#define BEST(name, op)                                                                                                 \
  static float name##_f32(const pg_tensor *a, const char *row) {                                                       \
    float best, s[STRIP];                                                                                              \
    pg_get_f32(&best, a, row, 0, 1);                                                                                   \
    for (int64_t k = 0; k < a->ne[0]; k += STRIP) {                                                                    \
      const int64_t n = PG_MIN(STRIP, a->ne[0] - k);                                                                   \
      pg_get_f32(s, a, row, k, n);                                                                                     \
      for (int64_t i = 0; i < n; i++) best = s[i] op best || s[i] != s[i] ? s[i] : best;                               \
    }                                                                                                                  \
    return best;                                                                                                       \
  }                                                                                                                    \
  int PG_FN(name##_any)(const pg_task *t, int ith, int nth) {                                                          \
    const pg_tensor *a = &t->src[0];                                                                                   \
    const pg_range r = pg_share(pg_n_rows(a), ith, nth);                                                               \
    for (int64_t ir = r.first; ir < r.last; ir++) {                                                                    \
      const pg_idx i = pg_unravel(a, ir);                                                                              \
      const char *row = pg_row_at(a, i.i1, i.i2, i.i3);                                                                \
      char *y = pg_row_at(&t->dst, i.i1, i.i2, i.i3);                                                                  \
      if (a->type == PG_I32) {                                                                                         \
        int32_t best = *(const int32_t *)row;                                                                          \
        for (int64_t k = 1; k < a->ne[0]; k++) {                                                                       \
          const int32_t x = *(const int32_t *)(row + k * a->nb[0]);                                                    \
          best = x op best ? x : best;                                                                                 \
        }                                                                                                              \
        *(int32_t *)y = best;                                                                                          \
      } else if (a->type == PG_I64) {                                                                                  \
        int64_t best = *(const int64_t *)row;                                                                          \
        for (int64_t k = 1; k < a->ne[0]; k++) {                                                                       \
          const int64_t x = *(const int64_t *)(row + k * a->nb[0]);                                                    \
          best = x op best ? x : best;                                                                                 \
        }                                                                                                              \
        *(int64_t *)y = best;                                                                                          \
      } else {                                                                                                         \
        const float best = name##_f32(a, row);                                                                         \
        pg_put_f32(&t->dst, y, 0, &best, 1);                                                                           \
      }                                                                                                                \
    }                                                                                                                  \
    return PG_OK;                                                                                                      \
  }
BEST(max_rows, >)
BEST(min_rows, <)

// dst may be the source.
int PG_FN(cumsum_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *a = &t->src[0], *y = &t->dst;
  const pg_range r = pg_share(pg_n_rows(a), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(a, ir);
    const char *pa = pg_row_at(a, i.i1, i.i2, i.i3);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    double total = 0;
    for (int64_t k = 0; k < a->ne[0]; k++) {
      total += (double)*(const float *)(pa + k * a->nb[0]);
      *(float *)(py + k * y->nb[0]) = (float)total;
    }
  }
  return PG_OK;
}

static inline float element(const pg_tensor *t, const char *row, int64_t k) {
  return *(const float *)(row + k * t->nb[0]);
}

int PG_FN(argmax_i32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *a = &t->src[0];
  const pg_range r = pg_share(a->ne[1], ith, nth);
  for (int64_t i1 = r.first; i1 < r.last; i1++) {
    const char *row = pg_row_at(a, i1, 0, 0);
    uint32_t best = order_of(element(a, row, 0));
    int32_t at = 0;
    for (int64_t k = 1; k < a->ne[0]; k++) {
      const uint32_t o = order_of(element(a, row, k));
      if (o > best) best = o, at = (int32_t)k;
    }
    *(int32_t *)(t->dst.data + i1 * t->dst.nb[0]) = at;
  }
  return PG_OK;
}

// A sorting key: the order in the upper half (inverted for descending), the index in the lower half. Keys are distinct,
// so every sort of them is stable.
static inline uint64_t key_of(float x, int64_t k, uint32_t invert) {
  return (uint64_t)(order_of(x) ^ invert) << 32 | (uint64_t)k;
}

static void insertion_sort(uint64_t *a, int64_t n) {
  for (int64_t i = 1; i < n; i++) {
    const uint64_t x = a[i];
    int64_t j = i;
    for (; j > 0 && a[j - 1] > x; j--) a[j] = a[j - 1];
    a[j] = x;
  }
}

// Sort n keys that are in the order of their lower halves. tmp: room for n more.
static void sort_keys(uint64_t *a, uint64_t *tmp, int64_t n) {
  if (n <= 64) {
    insertion_sort(a, n);
    return;
  }
  for (int shift = 32; shift < 64; shift += 8) { // four passes: the result ends where it began
    int64_t at[256] = {0}, total = 0;
    for (int64_t i = 0; i < n; i++) at[a[i] >> shift & 255]++;
    for (int d = 0; d < 256; d++) {
      const int64_t count = at[d];
      at[d] = total;
      total += count;
    }
    for (int64_t i = 0; i < n; i++) tmp[at[a[i] >> shift & 255]++] = a[i];
    uint64_t *const swap = a;
    a = tmp;
    tmp = swap;
  }
}

enum { LIST = 128 }; // up to this k, top_k keeps a sorted list while it reads; for a larger k it sorts the row

// The k smallest keys of a row, ascending, into keys[0..k).
static void first_keys(uint64_t *keys, uint64_t *tmp, const pg_tensor *a, const char *row, int64_t k, uint32_t invert) {
  const int64_t n = a->ne[0];
  const int64_t first = k <= LIST ? k : n;
  for (int64_t i = 0; i < first; i++) keys[i] = key_of(element(a, row, i), i, invert);
  sort_keys(keys, tmp, first);
  for (int64_t i = first; i < n; i++) {
    const uint64_t x = key_of(element(a, row, i), i, invert);
    if (x > keys[k - 1]) continue;
    int64_t j = k - 1;
    for (; j > 0 && keys[j - 1] > x; j--) keys[j] = keys[j - 1];
    keys[j] = x;
  }
}

int64_t PG_FN(sort_work)(const pg_task *t, int nth) {
  return pg_times(t->src[0].ne[0], 2 * (int64_t)sizeof(uint64_t) * nth);
}

// Indices of the first dst->ne[0] elements of each row in order.
static int sort_rows(const pg_task *t, int ith, int nth, int descending) {
  const pg_tensor *a = &t->src[0], *y = &t->dst;
  uint64_t *keys = (uint64_t *)t->work + 2 * a->ne[0] * ith;
  const pg_range r = pg_share(pg_n_rows(a), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(a, ir);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    first_keys(keys, keys + a->ne[0], a, pg_row_at(a, i.i1, i.i2, i.i3), y->ne[0], descending ? UINT32_MAX : 0);
    for (int64_t k = 0; k < y->ne[0]; k++) *(int32_t *)(py + k * y->nb[0]) = (int32_t)(uint32_t)keys[k];
  }
  return PG_OK;
}

int PG_FN(argsort_i32)(const pg_task *t, int ith, int nth) { return sort_rows(t, ith, nth, t->param[0] != 0); }
int PG_FN(top_k_i32)(const pg_task *t, int ith, int nth) { return sort_rows(t, ith, nth, 1); }
