// Blocks with x ~ s * q - m, q an integer in 0..top; super-blocks of 256 with x ~ d * scale[k] * q - dmin * min[k]:
// Q2_K, Q4_K, Q5_K.
#pragma once
#include "formats/encode/search.h"

typedef struct affine {
  vf s, m;
} affine;

PG_INLINE float affine_code(float x, float inv, float m, int top) {
  return round_even(clampf((x + m) * inv, 0, (float)top));
}

PG_INLINE vf affine_codes_of(vf x, vf inv, vf m, int top) {
  return rounds_even(clamps(vf_mul(vf_add(x, m), inv), 0, (float)top));
}

PG_INLINE vf affine_error(const float *x, const float *w, int n, affine a, int top) {
  vf e = vf_zero();
  const vf inv = inverses(a.s);
  for (int i = 0; i < n; i++) {
    const vf q = affine_codes_of(at(x, i), inv, a.m, top), d = vf_sub(vf_sub(vf_mul(a.s, q), a.m), at(x, i));
    e = vf_add(e, vf_mul(vf_mul(at(w, i), d), d));
  }
  return e;
}

// Weighted sums for least squares over codes.
typedef struct affine_sums {
  vf w, x;      // of the blocks
  vf q, qq, xq; // and of the codes that an `affine` gives
} affine_sums;

PG_INLINE affine_sums affine_sums_of(const float *x, const float *w, int n) {
  affine_sums t = {vf_zero(), vf_zero(), vf_zero(), vf_zero(), vf_zero()};
  for (int i = 0; i < n; i++) {
    t.w = vf_add(t.w, at(w, i));
    t.x = vf_add(t.x, vf_mul(at(w, i), at(x, i)));
  }
  return t;
}

PG_INLINE void add_codes(affine_sums *t, const float *x, const float *w, int n, affine a, int top) {
  const vf inv = inverses(a.s);
  t->q = t->qq = t->xq = vf_zero();
  for (int i = 0; i < n; i++) {
    const vf q = affine_codes_of(at(x, i), inv, a.m, top), wq = vf_mul(at(w, i), q);
    t->q = vf_add(t->q, wq);
    t->qq = vf_add(t->qq, vf_mul(wq, q));
    t->xq = vf_add(t->xq, vf_mul(wq, at(x, i)));
  }
}

// The s and m that spread the codes from the least value (from 0, if m >= 0 is asked and all are above) to the
// greatest.
PG_INLINE affine affine_plain(const float *x, int n, int top, int positive_m) {
  vf lo = at(x, 0), hi = lo;
  for (int i = 1; i < n; i++) {
    lo = vf_min(at(x, i), lo);
    hi = vf_max(at(x, i), hi);
  }
  if (positive_m) lo = vf_min(lo, vf_zero());
  return (affine){vf_div(vf_sub(hi, lo), vf_set1((float)top)), vf_sub(vf_zero(), lo)};
}

// The least-squares s and m of codes, m >= 0 if asked; before, where all codes are 0. Equal codes, of values that
// nearly are, determine one number only; so does m at its limit.
PG_INLINE affine least_squares(const affine_sums *t, affine before, int positive_m) {
  const vf zero = vf_zero(), det = vf_sub(vf_mul(t->w, t->qq), vf_mul(t->q, t->q));
  affine a = {vf_div(vf_sub(vf_mul(t->w, t->xq), vf_mul(t->x, t->q)), det),
              vf_div(vf_sub(vf_mul(t->q, t->xq), vf_mul(t->qq, t->x)), det)};
  const vf limit = positive_m ? a.m : det, usable = vf_if_lt(zero, det, limit, vf_set1(-1));
  a.s = vf_if_lt(usable, zero, vf_div(t->xq, t->qq), a.s);
  a.m = vf_if_lt(usable, zero, zero, a.m);
  return (affine){vf_if_lt(zero, t->qq, a.s, before.s), vf_if_lt(zero, t->qq, a.m, before.m)};
}

// The error of the codes in `t` with s and m, less the sum of w x x.
PG_INLINE vf affine_cost(const affine_sums *t, affine a) {
  const vf of_s = vf_sub(vf_mul(a.s, t->qq), vf_add(t->xq, t->xq)), two_sq = vf_mul(vf_add(a.s, a.s), t->q);
  return vf_add(vf_mul(a.s, of_s), vf_mul(a.m, vf_add(vf_sub(vf_mul(a.m, t->w), two_sq), vf_add(t->x, t->x))));
}

// The best s and m for each block, m >= 0 if asked: wider and narrower ranges, each with rounds of least squares; or
// else the plain ones.
PG_INLINE affine affine_fit(const float *x, const float *w, int n, int top, int positive_m) {
  enum { ROUNDS = 3 };
  const int ranges = top == 3 ? 10 : 14; // few codes, few ways to round
  const affine plain = affine_plain(x, n, top, positive_m);
  affine_sums t = affine_sums_of(x, w, n);
  affine best = plain, a = plain;
  vf least = vf_set1(INFINITY);
  for (int k = 0; k < ranges * ROUNDS; k++) {
    const float stretch =
        (float)top / ((float)top - 0.5f + 2.1f / (float)ranges * (float)(k / ROUNDS) * (float)top / 8);
    if (k % ROUNDS == 0) a = (affine){vf_mul(plain.s, vf_set1(stretch)), plain.m};
    add_codes(&t, x, w, n, a, top);
    a = least_squares(&t, a, positive_m);
    const vf e = affine_cost(&t, a);
    best.s = vf_if_lt(e, least, a.s, best.s);
    best.m = vf_if_lt(e, least, a.m, best.m);
    least = vf_if_lt(e, least, e, least);
  }
  const vf ep = affine_error(x, w, n, plain, top), eb = affine_error(x, w, n, best, top);
  return (affine){vf_if_lt(eb, ep, best.s, plain.s), vf_if_lt(eb, ep, best.m, plain.m)};
}

// The s and m of blocks with a pair of their own, as f16 stores them: the best ones, unless rounding made the plain
// ones better.
PG_INLINE void affine_stored(const side *b, int n, int top, float *s, float *m) {
  for (int l = 0; l < SIDE; l += VF_N) {
    const float *x = b->x[0] + l, *w = b->w[0] + l;
    affine best = affine_fit(x, w, n, top, 0), plain = affine_plain(x, n, top, 0);
    best = (affine){f16_rounded_all(best.s), f16_rounded_all(best.m)};
    plain = (affine){f16_rounded_all(plain.s), f16_rounded_all(plain.m)};
    const vf ep = affine_error(x, w, n, plain, top), eb = affine_error(x, w, n, best, top);
    vf_store(s + l, vf_if_lt(ep, eb, plain.s, best.s));
    vf_store(m + l, vf_if_lt(ep, eb, plain.m, best.m));
  }
}

// -- super-blocks, 1 or 2 of them

typedef struct affine_block {
  float d[2], dmin[2], error[2];
  _Alignas(64) float scale[SIDE], min[SIDE]; // integers
} affine_block;

typedef struct affine_fits {
  _Alignas(64) float s[SIDE], m[SIDE];
} affine_fits;

// For each sub-block the best integer scale and minimum next to those it has, at the block's d and dmin. Sets scale,
// min and error, and *next_d, *next_dmin: the least-squares pair for the codes found.
PG_INLINE void affine_choose(affine_block *b, const side *of, int n, int top, int limit, float *next_d,
                             float *next_dmin) {
  const int n_sub = 256 / n;
  _Alignas(64) float ds[SIDE], dmins[SIDE], e[SIDE], w1[SIDE], x1[SIDE], q1[SIDE], qq[SIDE], xq[SIDE];
  for (int k = 0; k < SIDE; k++) ds[k] = b->d[k / n_sub], dmins[k] = b->dmin[k / n_sub];
  for (int l = 0; l < SIDE; l += VF_N) {
    const float *x = of->x[0] + l, *w = of->w[0] + l;
    const vf d = vf_load(ds + l), dmin = vf_load(dmins + l), sc = vf_load(b->scale + l), mn = vf_load(b->min + l);
    vf least = vf_set1(INFINITY), scale = vf_zero(), min = vf_zero();
    for (int i = -1; i <= 1; i++)
      for (int j = -1; j <= 1; j++) {
        const vf ci = clamps(vf_add(sc, vf_set1((float)i)), 0, (float)limit),
                 cj = clamps(vf_add(mn, vf_set1((float)j)), 0, (float)limit);
        const vf error = affine_error(x, w, n, (affine){vf_mul(d, ci), vf_mul(dmin, cj)}, top);
        scale = vf_if_lt(error, least, ci, scale);
        min = vf_if_lt(error, least, cj, min);
        least = vf_if_lt(error, least, error, least);
      }
    affine_sums t = affine_sums_of(x, w, n);
    add_codes(&t, x, w, n, (affine){vf_mul(d, scale), vf_mul(dmin, min)}, top);
    vf_store(b->scale + l, scale);
    vf_store(b->min + l, min);
    vf_store(e + l, least);
    vf_store(w1 + l, vf_mul(vf_mul(min, min), t.w));
    vf_store(x1 + l, vf_mul(min, t.x));
    vf_store(q1 + l, vf_mul(vf_mul(scale, min), t.q));
    vf_store(qq + l, vf_mul(vf_mul(scale, scale), t.qq));
    vf_store(xq + l, vf_mul(scale, t.xq));
  }
  for (int o = 0; o < SIDE / n_sub; o++) {
    double sqq = 0, sqm = 0, smm = 0, sxq = 0, sxm = 0;
    b->error[o] = 0;
    for (int k = o * n_sub; k < (o + 1) * n_sub; k++) {
      b->error[o] += e[k];
      sqq += qq[k];
      sqm += q1[k];
      smm += w1[k];
      sxq += xq[k];
      sxm += x1[k];
    }
    const double det = sqq * smm - sqm * sqm; // minimise |x - d*Q + dmin*M|
    if (det > 1e-9 * sqq * smm) {
      next_d[o] = f16_rounded((float)((smm * sxq - sqm * sxm) / det));
      next_dmin[o] = f16_rounded((float)((sqm * sxq - sqq * sxm) / det));
    } else if (sqq > 0) {
      next_d[o] = f16_rounded((float)(sxq / sqq));
      next_dmin[o] = b->dmin[o];
    }
  }
}

PG_INLINE void affine_search(const side *of, int n, int top, int limit, affine_block *best) {
  enum { TRIES = 2, PASSES = 5 };
  const int n_sub = 256 / n, n_super = SIDE / n_sub;
  affine_fits searched, plain;
  for (int l = 0; l < SIDE; l += VF_N) {
    const affine s = affine_fit(of->x[0] + l, of->w[0] + l, n, top, 1), p = affine_plain(of->x[0] + l, n, top, 1);
    vf_store(searched.s + l, s.s);
    vf_store(searched.m + l, s.m);
    vf_store(plain.s + l, p.s);
    vf_store(plain.m + l, p.m);
  }
  *best = (affine_block){.error = {INFINITY, INFINITY}};
  // The largest scale at its limit, or about two below. The last try starts from the plain fits: whatever d, dmin and
  // the integers do to the best ones, it is no worse.
  for (int t = 0; t <= TRIES; t++) {
    const affine_fits *fit = t < TRIES ? &searched : &plain;
    const float limit_s = (float)limit / (t == 1 ? 1 + 2.0f / (float)limit : 1);
    affine_block b;
    float last[2] = {INFINITY, INFINITY};
    for (int o = 0; o < n_super; o++) {
      float max_s = 0, max_m = 0;
      for (int k = o * n_sub; k < (o + 1) * n_sub; k++) {
        max_s = PG_MAX(max_s, fit->s[k]);
        max_m = PG_MAX(max_m, fit->m[k]);
      }
      b.d[o] = f16_rounded(max_s / limit_s);
      b.dmin[o] = f16_rounded(max_m / (float)limit);
      const float inv = inverse(b.d[o]), minv = inverse(b.dmin[o]);
      for (int k = o * n_sub; k < (o + 1) * n_sub; k++) {
        b.scale[k] = round_even(clampf(fit->s[k] * inv, 0, (float)limit));
        b.min[k] = round_even(clampf(fit->m[k] * minv, 0, (float)limit));
      }
    }
    int done[2] = {0, n_super == 1}; // a super-block is searched as if it were alone
    for (int pass = 0; pass < PASSES && !(done[0] && done[1]); pass++) {
      float d[2] = {b.d[0], b.d[1]}, dmin[2] = {b.dmin[0], b.dmin[1]};
      affine_choose(&b, of, n, top, limit, d, dmin);
      for (int o = 0; o < n_super; o++) {
        if (done[o]) continue;
        if (b.error[o] < best->error[o]) {
          best->error[o] = b.error[o];
          best->d[o] = b.d[o];
          best->dmin[o] = b.dmin[o];
          memcpy(best->scale + o * n_sub, b.scale + o * n_sub, (size_t)n_sub * sizeof *b.scale);
          memcpy(best->min + o * n_sub, b.min + o * n_sub, (size_t)n_sub * sizeof *b.min);
        }
        done[o] = !(b.error[o] < 0.999f * last[o]) || d[o] < 0 || dmin[o] < 0;
        if (done[o]) continue;
        last[o] = b.error[o];
        b.d[o] = d[o];
        b.dmin[o] = dmin[o];
      }
    }
  }
}
