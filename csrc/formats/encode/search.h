// Searching the best codes for a block: error sums, least squares, scans over candidate scales.
// Sums run in LANES separate strands, added in a fixed order, so every instruction set finds the same codes.
#pragma once
#include "formats/block.h"
#include "formats/block_lut.h"

enum { LANES = 16 };

PG_INLINE float lane_sum(const float *a) {
  float s[8];
  for (int l = 0; l < 8; l++) s[l] = a[l] + a[l + 8];
  for (int l = 0; l < 4; l++) s[l] += s[l + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
}

PG_INLINE float round_even(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; } // |x| < 2^22
PG_INLINE float inverse(float x) { return x != 0 ? 1 / x : 0; }

// The weights to use for n elements: those given, or ones.
PG_INLINE const float *weights_or_ones(const float *weights, float *ones, int n) {
  if (weights) return weights;
  for (int i = 0; i < n; i++) ones[i] = 1;
  return ones;
}

PG_INLINE float extreme(const float *x, int n) { // the first value of the greatest magnitude
  float ext = 0;
  for (int i = 0; i < n; i++) ext = fabsf(x[i]) > fabsf(ext) ? x[i] : ext;
  return ext;
}

// -- x ~ s * v, v an integer in lo..hi, or one of the 16 values of IQ4 (hi == 0)

typedef struct codes {
  float lo, hi;
} codes;

#define IQ4_CODES                                                                                                      \
  (codes) { -127, 0 }

PG_INLINE float nearest(float t, codes c) {
  if (c.hi != 0) return round_even(clampf(t, c.lo, c.hi));
  float v = iq4_values[0];
  for (int k = 1; k < 16; k++) v = t > 0.5f * (float)(iq4_values[k - 1] + iq4_values[k]) ? (float)iq4_values[k] : v;
  return v;
}

typedef struct sums { // over a block: w x v and w v v
  float xv, vv;
} sums;

PG_INLINE sums sym_sums(const float *restrict x, const float *restrict w, int n, float s, codes c) {
  float xv[LANES] = {0}, vv[LANES] = {0};
  const float inv = inverse(s);
  for (int i = 0; i < n; i += LANES)
    for (int l = 0; l < LANES; l++) {
      const float v = nearest(x[i + l] * inv, c), wv = w[i + l] * v;
      xv[l] += wv * x[i + l];
      vv[l] += wv * v;
    }
  return (sums){lane_sum(xv), lane_sum(vv)};
}

PG_INLINE float sym_error(const float *restrict x, const float *restrict w, int n, float s, codes c) {
  float e[LANES] = {0};
  const float inv = inverse(s);
  for (int i = 0; i < n; i += LANES)
    for (int l = 0; l < LANES; l++) {
      const float d = s * nearest(x[i + l] * inv, c) - x[i + l];
      e[l] += w[i + l] * d * d;
    }
  return lane_sum(e);
}

// The best s for a block: scales that put its extreme value at, inside or beyond either end of the codes; of each, the
// codes' least-squares scale.
PG_INLINE float sym_scale(const float *restrict x, const float *restrict w, int n, codes c) {
  const float ext = extreme(x, n), hi = c.hi != 0 ? c.hi : 113;
  float best = 0, gain = 0;
  for (int k = 0; k < 24; k++) {
    const float end = k % 2 ? hi : c.lo, stretch = 0.72f + 0.05f * (float)(k / 2);
    const sums t = sym_sums(x, w, n, ext / (end * stretch), c);
    if (t.vv > 0 && t.xv * t.xv > gain * t.vv) {
      gain = t.xv * t.xv / t.vv;
      best = t.xv / t.vv;
    }
  }
  return best;
}

// The scale that puts the value of the greatest magnitude at c.lo, where codes reach farthest.
PG_INLINE float sym_plain(const float *x, int n, codes c) { return extreme(x, n) / c.lo; }

// The scale of a block with one of its own, as f16 stores it: the best one, unless rounding made the plain one better.
PG_INLINE float sym_stored(const float *x, const float *w, int n, codes c) {
  const float best = f16_rounded(sym_scale(x, w, n, c)), plain = f16_rounded(sym_plain(x, n, c));
  return sym_error(x, w, n, plain, c) < sym_error(x, w, n, best, c) ? plain : best;
}

// Super-block of 256: x ~ d * scale[k] * v. Fills scale[] (integers in lo..hi) and returns d, as f16 stores it.
// The last try starts from the plain scales: whatever d and the integers do to the best ones, it is no worse than they.
PG_INLINE float sym_block(const float *x, const float *w, int n, codes c, int lo, int hi, int *scale) {
  enum { TRIES = 3 };
  const int n_sub = 256 / n;
  float searched[16], plain[16];
  for (int k = 0; k < n_sub; k++) {
    searched[k] = sym_scale(x + k * n, w + k * n, n, c);
    plain[k] = sym_plain(x + k * n, n, c);
  }
  float best_d = 0, best = INFINITY;
  for (int k = 0; k < n_sub; k++) scale[k] = 0;
  for (int t = 0; t <= TRIES; t++) {
    const float *s = t < TRIES ? searched : plain, stretch = t < TRIES ? 1 - 0.02f * (float)t : 1;
    float d = f16_rounded(extreme(s, n_sub) / ((float)lo * stretch)), xv = 0, vv = 0;
    for (int pass = 0; pass < 2; pass++) { // the second with the least-squares d of the first
      float error = 0;
      int sc[16];
      const float inv = inverse(d);
      xv = vv = 0;
      for (int k = 0; k < n_sub; k++) {
        const int mid = to_int(round_even(clampf(s[k] * inv, -1000, 1000)), lo, hi);
        float e_best = INFINITY;
        sc[k] = mid;
        for (int i = PG_MAX(mid - 1, lo); i <= PG_MIN(mid + 1, hi); i++) {
          const float e = sym_error(x + k * n, w + k * n, n, d * (float)i, c);
          if (e < e_best) e_best = e, sc[k] = i;
        }
        error += e_best;
        const sums u = sym_sums(x + k * n, w + k * n, n, d * (float)sc[k], c);
        xv += u.xv * (float)sc[k];
        vv += u.vv * (float)(sc[k] * sc[k]);
      }
      if (error < best) {
        best = error;
        best_d = d;
        memcpy(scale, sc, sizeof sc);
      }
      if (vv > 0) d = f16_rounded(xv / vv);
    }
  }
  return best_d;
}

// -- x ~ s * q - m, q an integer in 0..top

typedef struct affine {
  float s, m;
} affine;

PG_INLINE float affine_code(float x, float inv, float m, int top) {
  return round_even(clampf((x + m) * inv, 0, (float)top));
}

PG_INLINE float affine_error(const float *restrict x, const float *restrict w, int n, affine a, int top) {
  float e[LANES] = {0};
  const float inv = inverse(a.s);
  for (int i = 0; i < n; i += LANES)
    for (int l = 0; l < LANES; l++) {
      const float d = a.s * affine_code(x[i + l], inv, a.m, top) - a.m - x[i + l];
      e[l] += w[i + l] * d * d;
    }
  return lane_sum(e);
}

// Weighted sums for least squares over the codes that `a` gives.
typedef struct affine_sums {
  float w, q, qq, x, xq;
} affine_sums;

PG_INLINE affine_sums affine_sum(const float *restrict x, const float *restrict w, int n, affine a, int top) {
  float s1[LANES] = {0}, sq[LANES] = {0}, sqq[LANES] = {0}, sx[LANES] = {0}, sxq[LANES] = {0};
  const float inv = inverse(a.s);
  for (int i = 0; i < n; i += LANES)
    for (int l = 0; l < LANES; l++) {
      const float q = affine_code(x[i + l], inv, a.m, top), wq = w[i + l] * q;
      s1[l] += w[i + l];
      sq[l] += wq;
      sqq[l] += wq * q;
      sx[l] += w[i + l] * x[i + l];
      sxq[l] += wq * x[i + l];
    }
  return (affine_sums){lane_sum(s1), lane_sum(sq), lane_sum(sqq), lane_sum(sx), lane_sum(sxq)};
}

// The s and m that spread the codes from the least value (from 0, if m >= 0 is asked and all are above) to the
// greatest.
PG_INLINE affine affine_plain(const float *x, int n, int top, int positive_m) {
  float lo = x[0], hi = x[0];
  for (int i = 1; i < n; i++) {
    lo = x[i] < lo ? x[i] : lo;
    hi = x[i] > hi ? x[i] : hi;
  }
  if (positive_m && lo > 0) lo = 0;
  return (affine){(hi - lo) / (float)top, -lo};
}

// The best s and m for a block, m >= 0 if asked: the plain ones, and wider and narrower ranges, each with two rounds of
// least squares.
PG_INLINE affine affine_fit(const float *restrict x, const float *restrict w, int n, int top, int positive_m) {
  const affine plain = affine_plain(x, n, top, positive_m);
  affine best = plain;
  if (!(plain.s > 0)) return best;
  float best_error = affine_error(x, w, n, best, top);
  for (int k = 0; k < 28; k++) {
    affine a = {plain.s * (float)top / ((float)top - 0.5f + 0.075f * (float)k * (float)top / 8), plain.m};
    for (int pass = 0; pass < 2; pass++) {
      const affine_sums t = affine_sum(x, w, n, a, top);
      const float det = t.w * t.qq - t.q * t.q;
      if (!(t.qq > 0)) break; // no code but 0
      a = (affine){(t.w * t.xq - t.x * t.q) / det, (t.q * t.xq - t.qq * t.x) / det};
      // Equal codes, of values that nearly are, determine one number only; so does m at its limit.
      if (!(det > 0) || (positive_m && a.m < 0)) a = (affine){t.xq / t.qq, 0};
      const float e = affine_error(x, w, n, a, top);
      if (e < best_error) best_error = e, best = a;
      if (e > 1.3f * best_error) break; // not worth a second round
    }
  }
  return best;
}

// The s and m of a block with a pair of its own, as f16 stores them: the best ones, unless rounding made the plain ones
// better.
PG_INLINE affine affine_stored(const float *x, const float *w, int n, int top) {
  affine best = affine_fit(x, w, n, top, 0), plain = affine_plain(x, n, top, 0);
  best = (affine){f16_rounded(best.s), f16_rounded(best.m)};
  plain = (affine){f16_rounded(plain.s), f16_rounded(plain.m)};
  return affine_error(x, w, n, plain, top) < affine_error(x, w, n, best, top) ? plain : best;
}
