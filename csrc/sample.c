// Sampling: the usual chain of samplers as two steps, before and after NumPy's exp. Rounding is in the same order as in
// NumPy.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "pg.h"

enum { BLOCK = 16 }; // logits that are compared with the limit together

typedef float f32x4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t i32x4 __attribute__((vector_size(16)));

// Whether one of BLOCK logits is above the limit, or NaN.
static int sample_has_better(const float *x, float limit) {
  const f32x4 l = {limit, limit, limit, limit}, *v = (const f32x4 *)x;
  const i32x4 no = (v[0] <= l) & (v[1] <= l) & (v[2] <= l) & (v[3] <= l);
  return !(no[0] & no[1] & no[2] & no[3]);
}

// A logit and its place as one number: larger for a larger logit, and among equal logits for an earlier place.
static uint64_t sample_key(float x, int64_t id) {
  uint32_t bits;
  x += 0.0f; // -0 is 0
  memcpy(&bits, &x, 4);
  bits = bits >> 31 ? ~bits : bits | 1u << 31;
  return (uint64_t)bits << 32 | (uint32_t)~id;
}

static int64_t sample_id(uint64_t key) { return (uint32_t)~key; }

static float sample_logit(uint64_t key) {
  uint32_t bits = (uint32_t)(key >> 32);
  float x;
  bits = bits >> 31 ? bits & ~(1u << 31) : ~bits;
  memcpy(&x, &bits, 4);
  return x;
}

static void sample_swap(uint64_t *a, uint64_t *b) {
  const uint64_t t = *a;
  *a = *b;
  *b = t;
}

// Move the k largest of n keys to the front, the least of them last (Hoare's selection; no branch depends on a key).
static void select_largest(uint64_t *keys, int64_t n, int64_t k) {
  for (int64_t first = 0, last = n - 1; first < last;) {
    uint64_t *lo = keys + first, *mid = keys + (first + last) / 2, *hi = keys + last;
    if (*lo < *mid) sample_swap(lo, mid);
    if (*mid < *hi) sample_swap(mid, hi);
    if (*lo < *mid) sample_swap(lo, mid);
    sample_swap(mid, hi); // the median of three is the pivot
    const uint64_t pivot = *hi;
    int64_t at = first;
    for (int64_t i = first; i < last; i++) {
      const uint64_t key = keys[i];
      keys[i] = keys[at];
      keys[at] = key;
      at += key > pivot;
    }
    sample_swap(keys + at, keys + last);
    if (at == k - 1) return;
    if (at < k - 1) {
      first = at + 1;
    } else {
      last = at - 1;
    }
  }
}

static int descending(const void *a, const void *b) {
  const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return (x < y) - (x > y);
}

int pg_top_k(const float *logits, int64_t n, int64_t k, float temp, uint64_t *keys, int64_t n_keys, int64_t *ids,
             float *exponents) {
  float limit = 0;
  int64_t m = 0, all = 1; // all: there is no limit yet
  for (int64_t i = 0, end; i < n; i = end) {
    end = i + BLOCK < n ? i + BLOCK : n;
    if (!all && end - i == BLOCK && !sample_has_better(logits + i, limit)) continue;
    for (int64_t j = i; j < end; j++) {
      const float x = logits[j];
      if (x != x) return PG_E_NAN;
      keys[m] = sample_key(x, j);
      m += all | (x > limit);
    }
    if (m > n_keys - BLOCK) {
      select_largest(keys, m, k);
      m = k;
      limit = sample_logit(keys[k - 1]);
      all = 0;
    }
  }
  select_largest(keys, m, k);
  qsort(keys, (size_t)k, sizeof *keys, descending);
  const float first = sample_logit(keys[0]), first_by_temp = first / temp;
  if (!isfinite(first) || !isfinite(first_by_temp) || !isfinite(temp)) return PG_E_NAN;
  for (int64_t i = 0; i < k; i++) {
    const float x = sample_logit(keys[i]);
    ids[i] = sample_id(keys[i]);
    exponents[i] = x - first;
    exponents[k + i] = x / temp - first_by_temp;
  }
  return PG_OK;
}

int64_t pg_draw(const float *weights, int64_t k, double top_p, double min_p, double u) {
  const float *w = weights;
  float total = 0;
  int64_t n = k;
  if (top_p < 1) {
    for (int64_t i = 0; i < k; i++) total += w[i];
    const float wanted = (float)(top_p * total);
    float sum = 0;
    for (n = 0; n < k && (n == 0 || sum < wanted); n++) sum += w[n];
  }
  if (w[n - 1] < min_p) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) kept += w[i] >= (float)min_p;
    n = kept;
  }
  w = weights + k;
  total = 0;
  for (int64_t i = 0; i < n; i++) total += w[i];
  const float wanted = (float)(u * total);
  int64_t row = 0;
  for (float sum = w[0]; sum <= wanted && sum < total; sum += w[row]) row++; // wanted may be rounded up to the total
  return row;
}
