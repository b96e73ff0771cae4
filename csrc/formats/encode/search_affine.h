// Super-blocks of 256 with x ~ d * scale[k] * q - dmin * min[k]: Q2_K, Q4_K, Q5_K.
#pragma once
#include "formats/encode/search.h"

typedef struct affine_block {
  float d, dmin;
  int scale[16], min[16];
  float error;
} affine_block;

// For each sub-block the best integer scale and minimum next to those it has, or next to what `fit` asks, at the
// block's d and dmin. Sets scale, min and error, and *next_d, *next_dmin: the least-squares pair for the codes found.
PG_INLINE void affine_choose(affine_block *b, const float *x, const float *w, int n, int top, int limit,
                             const affine *fit, int centred, float *next_d, float *next_dmin) {
  const float inv = inverse(b->d), minv = inverse(b->dmin);
  double qq = 0, qm = 0, mm = 0, xq = 0, xm = 0;
  b->error = 0;
  for (int k = 0; k < 256 / n; k++, x += n, w += n) {
    const int sc = centred ? b->scale[k] : to_int(round_even(clampf(fit[k].s * inv, 0, 1000)), 0, (float)limit);
    const int mn = centred ? b->min[k] : to_int(round_even(clampf(fit[k].m * minv, 0, 1000)), 0, (float)limit);
    float best = INFINITY;
    b->scale[k] = b->min[k] = 0;
    for (int i = PG_MAX(sc - 1, 0); i <= PG_MIN(sc + 1, limit); i++)
      for (int j = PG_MAX(mn - 1, 0); j <= PG_MIN(mn + 1, limit); j++) {
        const float e = affine_error(x, w, n, (affine){b->d * (float)i, b->dmin * (float)j}, top);
        if (e < best) best = e, b->scale[k] = i, b->min[k] = j;
      }
    b->error += best;
    const float i = (float)b->scale[k], j = (float)b->min[k];
    const affine_sums t = affine_sum(x, w, n, (affine){b->d * i, b->dmin * j}, top);
    qq += i * i * t.qq;
    qm += i * j * t.q;
    mm += j * j * t.w;
    xq += i * t.xq;
    xm += j * t.x;
  }
  const double det = qq * mm - qm * qm; // minimise |x - d*Q + dmin*M|
  if (det > 1e-9 * qq * mm) {
    *next_d = f16_rounded((float)((mm * xq - qm * xm) / det));
    *next_dmin = f16_rounded((float)((qm * xq - qq * xm) / det));
  } else if (qq > 0) {
    *next_d = f16_rounded((float)(xq / qq));
    *next_dmin = b->dmin;
  }
}

PG_INLINE affine_block affine_search(const float *x, const float *w, int n, int top, int limit) {
  affine searched[16], plain[16];
  for (int k = 0; k < 256 / n; k++) {
    searched[k] = affine_fit(x + k * n, w + k * n, n, top, 1);
    plain[k] = affine_plain(x + k * n, n, top, 1);
  }
  affine_block best = {.error = INFINITY};
  // The largest integers at their limit, or about two below. The last try starts from the plain fits: whatever d, dmin
  // and the integers do to the best ones, it is no worse than they.
  for (int t = 0; t < 5; t++) {
    const affine *fit = t < 4 ? searched : plain;
    const float fs = 1 + 2.0f / (float)limit * (float)(t & 1), fm = 1 + 2.0f / (float)limit * (float)(t >> 1 & 1);
    float max_s = 0, max_m = 0;
    for (int k = 0; k < 256 / n; k++) {
      max_s = PG_MAX(max_s, fit[k].s);
      max_m = PG_MAX(max_m, fit[k].m);
    }
    affine_block b = {.d = f16_rounded(max_s * fs / (float)limit), .dmin = f16_rounded(max_m * fm / (float)limit)};
    float last = INFINITY;
    for (int pass = 0; pass < 5; pass++) {
      float d = b.d, dmin = b.dmin;
      affine_choose(&b, x, w, n, top, limit, fit, pass > 0, &d, &dmin);
      if (b.error < best.error) best = b;
      if (!(b.error < 0.999f * last) || d < 0 || dmin < 0) break;
      last = b.error;
      b.d = d;
      b.dmin = dmin;
    }
  }
  return best;
}
