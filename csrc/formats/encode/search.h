// Searching the best codes for blocks: error sums, least squares, scans over candidate scales, for 16 (sub-)blocks side
// by side. A lane of a vector is a block, so no sum runs across lanes, and every instruction set adds in the same order
// and finds the same codes.
#pragma once
#include "formats/block.h"
#include "formats/block_lut.h"
#include "simd/lanes.h"

enum { SIDE = 16, SIDE_PARTS = SIDE / VF_N };

// An encoder of up to `at_once` blocks of a row.
#define SIDE_ENCODER(name, elements, bytes, at_once)                                                                   \
  void PG_FN(name##_from_f32_weighted)(const float *src, const float *weights, void *row, int64_t n) {                 \
    uint8_t *b = row;                                                                                                  \
    for (int64_t i = 0; i < n; i += (at_once) * (elements), b += (at_once) * (bytes))                                  \
      name##_encode(src + i, weights ? weights + i : NULL, b, (int)PG_MIN(at_once, (n - i) / (elements)));             \
  }                                                                                                                    \
  void PG_FN(name##_from_f32)(const float *src, void *row, int64_t n) {                                                \
    PG_FN(name##_from_f32_weighted)(src, NULL, row, n);                                                                \
  }

PG_INLINE float inverse(float x) { return x != 0 ? 1 / x : 0; }
PG_INLINE vf inverses(vf x) { return vf_if_lt(vf_zero(), vf_abs(x), vf_div(vf_set1(1), x), vf_zero()); }
PG_INLINE float round_even(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; } // |x| < 2^22
PG_INLINE vf rounds_even(vf x) { return vf_sub(vf_add(x, vf_set1(0x1.8p23f)), vf_set1(0x1.8p23f)); }
PG_INLINE vf clamps(vf x, float lo, float hi) { return vf_min(vf_max(x, vf_set1(lo)), vf_set1(hi)); } // NaN gives lo

PG_INLINE float extreme(const float *x, int n) { // the first value of the greatest magnitude
  float ext = 0;
  for (int i = 0; i < n; i++) ext = fabsf(x[i]) > fabsf(ext) ? x[i] : ext;
  return ext;
}

// Element i of all blocks. Lanes without a block hold the last one.
typedef struct side {
  _Alignas(64) float x[32][SIDE], w[32][SIDE];
} side;

// n_blocks blocks of n elements, a multiple of 16, and their weights (NULL: ones).
PG_INLINE void put_side(side *s, const float *x, const float *weights, int n, int n_blocks) {
  for (int j = 0; j < (weights ? 2 : 1); j++) {
    const float *from = j ? weights : x;
    float *to = j ? s->w[0] : s->x[0];
    for (int l = 0; l < n_blocks / 4 * 4; l += 4) pg_rows_to_lanes(to + l, SIDE, from + l * n, n, n);
    for (int l = n_blocks / 4 * 4; l < SIDE; l++)
      for (int i = 0; i < n; i++) to[i * SIDE + l] = from[PG_MIN(l, n_blocks - 1) * n + i];
  }
  for (int i = 0; i < n * SIDE && !weights; i += VF_N) vf_store(s->w[0] + i, vf_set1(1));
}

PG_INLINE vf at(const float *lanes, int i) { return vf_load(lanes + i * SIDE); }

// -- x ~ s * v, v an integer in lo..hi, or one of the 16 values of IQ4 (hi == 0)

typedef struct codes {
  float lo, hi;
} codes;

#define IQ4_CODES                                                                                                      \
  (codes) { -127, 0 }

PG_INLINE float nearest(float t, codes c) { return round_even(clampf(t, c.lo, c.hi)); }

PG_INLINE vf nearest_codes(vf t, codes c) {
  if (c.hi != 0) return rounds_even(clamps(t, c.lo, c.hi));
  vf v = vf_set1(iq4_values[0]);
  _Pragma("GCC unroll 16") for (int k = 1; k < 16; k++) {
    const vf border = vf_set1(0.5f * (float)(iq4_values[k - 1] + iq4_values[k]));
    v = vf_if_lt(border, t, vf_set1(iq4_values[k]), v);
  }
  return v;
}

typedef struct sums { // over a block: w x v and w v v
  vf xv, vv;
} sums;

// x and w are elements of the VF_N blocks of a part, here and below.
PG_INLINE sums sym_sums(const float *x, const float *w, int n, vf s, codes c) {
  sums r = {vf_zero(), vf_zero()};
  const vf inv = inverses(s);
  for (int i = 0; i < n; i++) {
    const vf xi = at(x, i), v = nearest_codes(vf_mul(xi, inv), c), wv = vf_mul(at(w, i), v);
    r.xv = vf_add(r.xv, vf_mul(wv, xi));
    r.vv = vf_add(r.vv, vf_mul(wv, v));
  }
  return r;
}

PG_INLINE vf sym_error(const float *x, const float *w, int n, vf s, codes c) {
  vf e = vf_zero();
  const vf inv = inverses(s);
  for (int i = 0; i < n; i++) {
    const vf d = vf_sub(vf_mul(s, nearest_codes(vf_mul(at(x, i), inv), c)), at(x, i));
    e = vf_add(e, vf_mul(vf_mul(at(w, i), d), d));
  }
  return e;
}

PG_INLINE vf extremes(const float *x, int n) {
  vf ext = vf_zero();
  for (int i = 0; i < n; i++) ext = vf_if_lt(vf_abs(ext), vf_abs(at(x, i)), at(x, i), ext);
  return ext;
}

// The best s for each block: scales that put its extreme value at, inside or beyond either end of the codes; of each,
// the codes' least-squares scale.
PG_INLINE vf sym_scales(const float *x, const float *w, int n, codes c) {
  const vf ext = extremes(x, n);
  const float hi = c.hi != 0 ? c.hi : 113;
  vf best = vf_zero(), gain = vf_zero();
  for (int k = 0; k < 24; k++) {
    const float end = k % 2 ? hi : c.lo, stretch = 0.72f + 0.05f * (float)(k / 2);
    const sums t = sym_sums(x, w, n, vf_div(ext, vf_set1(end * stretch)), c);
    const vf xx = vf_mul(t.xv, t.xv), less = vf_mul(gain, t.vv);
    best = vf_if_lt(less, xx, vf_div(t.xv, t.vv), best);
    gain = vf_if_lt(less, xx, vf_div(xx, t.vv), gain);
  }
  return best;
}

// The scale that puts the value of the greatest magnitude at c.lo, where codes reach farthest.
PG_INLINE vf sym_plain(const float *x, int n, codes c) { return vf_div(extremes(x, n), vf_set1(c.lo)); }

PG_INLINE vf f16_rounded_all(vf x) {
  float v[VF_N];
  vf_store(v, x);
  for (int l = 0; l < VF_N; l++) v[l] = f16_rounded(v[l]);
  return vf_load(v);
}

// The scale of blocks with one of their own, as f16 stores it: the best one, unless rounding made the plain one better.
PG_INLINE void sym_stored(const side *b, int n, codes c, float *d) {
  for (int l = 0; l < SIDE; l += VF_N) {
    const float *x = b->x[0] + l, *w = b->w[0] + l;
    const vf best = f16_rounded_all(sym_scales(x, w, n, c)), plain = f16_rounded_all(sym_plain(x, n, c));
    vf_store(d + l, vf_if_lt(sym_error(x, w, n, plain, c), sym_error(x, w, n, best, c), plain, best));
  }
}

// Super-blocks of 256, 1 or 2 of them: x ~ d * scale[k] * v. Fills scale[] (integers in lo..hi), and d, as f16 stores
// it. The second try starts from the plain scales: whatever d and the integers do to the best ones, it is no worse.
PG_INLINE void sym_blocks(const side *b, int n, codes c, int lo, int hi, float *best_d, int *scale) {

  const int n_sub = 256 / n, n_super = SIDE / n_sub;
  _Alignas(64) float searched[SIDE], plain[SIDE];
  float best[2] = {INFINITY, INFINITY};
  for (int l = 0; l < SIDE; l += VF_N) {
    vf_store(searched + l, sym_scales(b->x[0] + l, b->w[0] + l, n, c));
    vf_store(plain + l, sym_plain(b->x[0] + l, n, c));
  }
  for (int k = 0; k < SIDE; k++) scale[k] = 0;
  for (int o = 0; o < n_super; o++) best_d[o] = 0;
  for (int t = 0; t < 2; t++) {
    const float *s = t ? plain : searched;
    float d[2];
    for (int o = 0; o < n_super; o++) d[o] = f16_rounded(extreme(s + o * n_sub, n_sub) / (float)lo);
    for (int pass = 0; pass < 2; pass++) { // the second with the least-squares d of the first
      _Alignas(64) float ds[SIDE], e[SIDE], sc[SIDE], xv[SIDE], vv[SIDE];
      for (int k = 0; k < SIDE; k++) ds[k] = d[k / n_sub];
      for (int l = 0; l < SIDE; l += VF_N) {
        const float *x = b->x[0] + l, *w = b->w[0] + l;
        const vf dl = vf_load(ds + l);
        const vf asked = rounds_even(clamps(vf_mul(vf_load(s + l), inverses(dl)), -1000, 1000));
        vf least = vf_set1(INFINITY), at_least = clamps(asked, (float)lo, (float)hi);
        const vf mid = at_least;
        for (int i = -1; i <= 1; i++) {
          const vf near = clamps(vf_add(mid, vf_set1((float)i)), (float)lo, (float)hi);
          const vf error = sym_error(x, w, n, vf_mul(dl, near), c);
          at_least = vf_if_lt(error, least, near, at_least);
          least = vf_if_lt(error, least, error, least);
        }
        const sums u = sym_sums(x, w, n, vf_mul(dl, at_least), c);
        vf_store(e + l, least);
        vf_store(sc + l, at_least);
        vf_store(xv + l, vf_mul(u.xv, at_least));
        vf_store(vv + l, vf_mul(u.vv, vf_mul(at_least, at_least)));
      }
      for (int o = 0; o < n_super; o++) {
        float error = 0, sum_xv = 0, sum_vv = 0;
        for (int k = o * n_sub; k < (o + 1) * n_sub; k++) error += e[k], sum_xv += xv[k], sum_vv += vv[k];
        if (error < best[o]) {
          best[o] = error;
          best_d[o] = d[o];
          for (int k = o * n_sub; k < (o + 1) * n_sub; k++) scale[k] = to_int(sc[k], (float)lo, (float)hi);
        }
        if (sum_vv > 0) d[o] = f16_rounded(sum_xv / sum_vv);
      }
    }
  }
}
