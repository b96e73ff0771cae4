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

// The least-squares s and m of codes (`positive_m`: m >= 0); `before` when all codes are 0. When all codes are equal,
// or m is at its limit, only one of the two numbers can be fitted.
PG_INLINE affine least_squares(const affine_sums *t, affine before, int positive_m) {
  const vf zero = vf_zero(), det = vf_sub(vf_mul(t->w, t->qq), vf_mul(t->q, t->q));
  const vf s = vf_sub(vf_mul(t->w, t->xq), vf_mul(t->x, t->q)), m = vf_sub(vf_mul(t->q, t->xq), vf_mul(t->qq, t->x));
  const vf usable = vf_if_lt(zero, det, positive_m ? m : det, vf_set1(-1));
  const vf inv = vf_div(vf_set1(1), vf_if_lt(usable, zero, t->qq, det));
  const affine a = {vf_mul(vf_if_lt(usable, zero, t->xq, s), inv), vf_if_lt(usable, zero, zero, vf_mul(m, inv))};
  return (affine){vf_if_lt(zero, t->qq, a.s, before.s), vf_if_lt(zero, t->qq, a.m, before.m)};
}

// The error of the codes in `t` with s and m, less the sum of w x x.
PG_INLINE vf affine_cost(const affine_sums *t, affine a) {
  const vf of_s = vf_sub(vf_mul(a.s, t->qq), vf_add(t->xq, t->xq)), two_sq = vf_mul(vf_add(a.s, a.s), t->q);
  return vf_add(vf_mul(a.s, of_s), vf_mul(a.m, vf_add(vf_sub(vf_mul(a.m, t->w), two_sq), vf_add(t->x, t->x))));
}

// The ranges of codes with which a search begins: how much is cut off a block's own range at its lower and its upper
// end, in thousandths. They were chosen as the ends of `codes` were. `noise`: as in `codes`.
typedef struct ranges {
  float noise;
  int n;
  struct {
    float lower, upper;
  } cut[8];
} ranges;

static const ranges ranges_2bit = {0.067f,
                                   7,
                                   {{140, 20}, {20, 140}, {80, 80}, {-10, 230}, {0, 0}, {0, -80}, {0, -170}}},
                    ranges_4bit = {0.0048f, 7, {{0, 0}, {20, 0}, {0, 20}, {40, 0}, {0, 40}, {20, -40}, {-40, 0}}},
                    ranges_5bit = {0.0012f, 6, {{0, 0}, {20, 0}, {0, 20}, {0, -20}, {0, -40}, {-40, -40}}};

PG_INLINE ranges ranges_of(int top) { return top == 3 ? ranges_2bit : top == 15 ? ranges_4bit : ranges_5bit; }

typedef struct affine_fit {
  affine a;
  affine_sums t; // sums of the codes whose least-squares fit this is
} affine_fit;

// In lanes with e < least, take the codes of `from`.
PG_INLINE void take_sums(affine_sums *to, const affine_sums *from, vf e, vf least) {
  to->q = vf_if_lt(e, least, from->q, to->q);
  to->qq = vf_if_lt(e, least, from->qq, to->qq);
  to->xq = vf_if_lt(e, least, from->xq, to->xq);
}

// The least scale with 0 among its codes that reaches from the least value to the greatest: 0 is the code next below
// where the plain codes have it (`step` 0), or above (1). Sparse blocks need it.
PG_INLINE affine affine_zero(affine plain, int top, int step) {
  const vf last = vf_set1((float)top), hi = vf_sub(vf_mul(plain.s, last), plain.m);
  const vf below = vf_add(vf_floor(vf_mul(plain.m, inverses(plain.s))), vf_set1((float)step));
  const vf j = clamps(below, 0, (float)top), above = vf_sub(last, j);
  const vf s = vf_max(vf_max(vf_mul(plain.m, inverses(j)), vf_mul(hi, inverses(above))), vf_zero());
  return (affine){s, vf_mul(s, j)};
}

// The best s and m for each block (`positive_m`: m >= 0): try the least-squares fit of each range, then fit the best
// one again, twice.
PG_INLINE affine_fit affine_fitted(const float *x, const float *w, int n, int top, int positive_m) {
  const ranges r = ranges_of(top);
  const affine plain = affine_plain(x, n, top, positive_m);
  affine_sums t = affine_sums_of(x, w, n);
  affine_fit best = {plain, t};
  vf least = vf_set1(INFINITY);
  for (int k = 0; k < r.n + 4; k++) {
    affine a = best.a;
    if (k < r.n) {
      const float lower = r.cut[k].lower / 1000, upper = r.cut[k].upper / 1000;
      a.s = vf_mul(plain.s, vf_set1(1 - lower - upper));
      a.m = vf_sub(plain.m, vf_mul(plain.s, vf_set1(lower * (float)top)));
      if (positive_m) a.m = vf_max(a.m, vf_zero());
    } else if (k < r.n + 2) {
      a = affine_zero(plain, top, k - r.n);
    }
    add_codes(&t, x, w, n, a, top);
    a = least_squares(&t, a, positive_m);
    const vf e = affine_cost(&t, a);
    best.a.s = vf_if_lt(e, least, a.s, best.a.s);
    best.a.m = vf_if_lt(e, least, a.m, best.a.m);
    take_sums(&best.t, &t, e, least);
    least = vf_if_lt(e, least, e, least);
  }
  return best;
}

// The s and m of blocks that each have a pair, as f16 stores them: the best ones, unless after rounding the plain ones,
// or zeros, are better.
PG_INLINE void affine_stored(const side *b, int n, int top, float *s, float *m) {
  for (int l = 0; l < SIDE; l += VF_N) {
    const float *x = b->x[0] + l, *w = b->w[0] + l;
    const affine tried[3] = {affine_fitted(x, w, n, top, 0).a, affine_plain(x, n, top, 0), {vf_zero(), vf_zero()}};
    affine best = tried[2];
    vf least = vf_set1(INFINITY);
    for (int k = 0; k < 3; k++) {
      const affine a = k ? (affine){f16s_rounded(tried[k].s), f16s_rounded(tried[k].m)}
                         : (affine){scales_stored(tried[k].s), scales_stored(tried[k].m)};
      const vf e = affine_error(x, w, n, a, top);
      best.s = vf_if_lt(e, least, a.s, best.s);
      best.m = vf_if_lt(e, least, a.m, best.m);
      least = vf_if_lt(e, least, e, least);
    }
    vf_store(s + l, best.s);
    vf_store(m + l, best.m);
  }
}

// -- super-blocks, 1 or 2 of them

typedef struct affine_block {
  float d[2], dmin[2];
  _Alignas(64) float scale[SIDE], min[SIDE]; // integers
} affine_block;

typedef struct affine_fits { // an affine_fit of each sub-block
  _Alignas(64) float s[SIDE], m[SIDE], w[SIDE], x[SIDE], q[SIDE], qq[SIDE], xq[SIDE];
} affine_fits;

PG_INLINE void put_fit(affine_fits *f, int l, affine_fit of) {
  vf_store(f->s + l, of.a.s);
  vf_store(f->m + l, of.a.m);
  vf_store(f->w + l, of.t.w);
  vf_store(f->x + l, of.t.x);
  vf_store(f->q + l, of.t.q);
  vf_store(f->qq + l, of.t.qq);
  vf_store(f->xq + l, of.t.xq);
}

PG_INLINE affine_fit get_fit(const affine_fits *f, int l) {
  return (affine_fit){
      {vf_load(f->s + l), vf_load(f->m + l)},
      {vf_load(f->w + l), vf_load(f->x + l), vf_load(f->q + l), vf_load(f->qq + l), vf_load(f->xq + l)}};
}

PG_INLINE void affine_take_better(affine_block *best, float *least, const affine_block *other, const float *error,
                                  int n_sub) {
  for (int o = 0; o < SIDE / n_sub; o++)
    if (error[o] < least[o]) {
      const size_t size = (size_t)n_sub * sizeof *best->scale;
      least[o] = error[o];
      best->d[o] = other->d[o];
      best->dmin[o] = other->dmin[o];
      memcpy(best->scale + o * n_sub, other->scale + o * n_sub, size);
      memcpy(best->min + o * n_sub, other->min + o * n_sub, size);
    }
}

// The d and dmin with which the greatest s becomes last_s, and the greatest m last_m.
PG_INLINE void affine_ds(const float *s, const float *m, int n_sub, float last_s, float last_m, affine_block *b) {
  for (int o = 0; o < SIDE / n_sub; o++) {
    float max_s = 0, max_m = 0;
    for (int k = o * n_sub; k < (o + 1) * n_sub; k++) {
      max_s = PG_MAX(max_s, s[k]);
      max_m = PG_MAX(max_m, m[k]);
    }
    b->d[o] = scale_stored(max_s / last_s);
    b->dmin[o] = scale_stored(max_m / last_m);
  }
}

// The least-squares d and dmin for the integers and codes of super-block o; its present ones when these determine none.
// Minimises |x - d * Q + dmin * M|.
PG_INLINE void affine_next(const affine_block *of, const affine_fits *f, int o, int n_sub, affine_block *next) {
  double qq = 0, qm = 0, mm = 0, xq = 0, xm = 0;
  for (int k = o * n_sub; k < (o + 1) * n_sub; k++) {
    const double scale = of->scale[k], min = of->min[k];
    qq += scale * scale * f->qq[k];
    qm += scale * min * f->q[k];
    mm += min * min * f->w[k];
    xq += scale * f->xq[k];
    xm += min * f->x[k];
  }
  const double det = qq * mm - qm * qm;
  double d = of->d[o], dmin = of->dmin[o];
  if (det > 1e-9 * qq * mm) {
    d = (mm * xq - qm * xm) / det;
    dmin = (qm * xq - qq * xm) / det;
  } else if (qq > 0) {
    d = xq / qq;
  }
  next->d[o] = scale_stored((float)PG_MAX(d, 0));
  next->dmin[o] = scale_stored((float)PG_MAX(dmin, 0));
}

// Find the best integers and codes for a d and dmin. With fits, try the two integers next to each fit's scale, each
// with the minimum that goes with it; without fits, try the present integers and all next to them. Sets the integers,
// `error` (with fits less the sum of w x x, see sym_look) and `next`.
PG_INLINE void affine_look(const side *b, int n, int top, int limit, const affine_fits *fits, affine_block *of,
                           float *error, affine_block *next) {
  _Alignas(64) float e[SIDE];
  affine_fits found;
  const int n_sub = 256 / n;
  for (int l = 0; l < SIDE; l += VF_N) {
    const float *x = b->x[0] + l, *w = b->w[0] + l;
    const vf d = of_super_blocks(of->d, n_sub, l), dmin = of_super_blocks(of->dmin, n_sub, l);
    affine_fit f = {{vf_zero(), vf_zero()}, affine_sums_of(x, w, n)}, best = f;
    if (fits) f = get_fit(fits, l);
    const vf low = fits ? vf_floor(clamps(vf_mul(f.a.s, inverses(d)), 0, (float)limit))
                        : vf_sub(vf_load(of->scale + l), vf_set1(1));
    const vf inv_m = inverses(vf_mul(dmin, f.t.w));
    vf least = vf_set1(INFINITY), scale = vf_zero(), min = vf_zero();
    for (int i = 0; i < (fits ? 2 : 9); i++) {
      const vf sc = clamps(vf_add(low, vf_set1((float)(i % 3))), 0, (float)limit), s = vf_mul(d, sc);
      const vf m = fits ? rounds_even(vf_mul(vf_sub(vf_mul(s, f.t.q), f.t.x), inv_m))
                        : vf_add(vf_load(of->min + l), vf_set1((float)(i / 3 - 1)));
      const vf mn = clamps(m, 0, (float)limit);
      affine_sums t = f.t;
      const affine a = {s, vf_mul(dmin, mn)};
      if (fits) add_codes(&t, x, w, n, a, top);
      const vf cost = fits ? affine_cost(&t, a) : affine_error(x, w, n, a, top);
      scale = vf_if_lt(cost, least, sc, scale);
      min = vf_if_lt(cost, least, mn, min);
      take_sums(&best.t, &t, cost, least);
      least = vf_if_lt(cost, least, cost, least);
    }
    if (!fits) add_codes(&best.t, x, w, n, (affine){vf_mul(d, scale), vf_mul(dmin, min)}, top);
    vf_store(of->scale + l, scale);
    vf_store(of->min + l, min);
    vf_store(e + l, least);
    put_fit(&found, l, best);
  }
  sums_of_super_blocks(e, n_sub, error);
  for (int o = 0; o < SIDE / n_sub; o++) affine_next(of, &found, o, n_sub, next);
}

PG_INLINE void affine_errors(const side *b, int n, int top, const affine_block *of, float *error) {
  _Alignas(64) float e[SIDE];
  const int n_sub = 256 / n;
  for (int l = 0; l < SIDE; l += VF_N) {
    const vf d = of_super_blocks(of->d, n_sub, l), dmin = of_super_blocks(of->dmin, n_sub, l);
    const affine a = {vf_mul(d, vf_load(of->scale + l)), vf_mul(dmin, vf_load(of->min + l))};
    vf_store(e + l, affine_error(b->x[0] + l, b->w[0] + l, n, a, top));
  }
  sums_of_super_blocks(e, n_sub, error);
}

// Round fits (NULL: the plain ones) to integers; the greatest s becomes `limit` - less.
PG_INLINE void affine_rounded(const side *b, int n, int top, int limit, const affine_fits *fits, int less,
                              affine_block *of) {
  const int n_sub = 256 / n;
  _Alignas(64) float s[SIDE], m[SIDE];
  for (int l = 0; l < SIDE; l += VF_N) {
    const affine a = fits ? get_fit(fits, l).a : affine_plain(b->x[0] + l, n, top, 1);
    vf_store(s + l, a.s);
    vf_store(m + l, a.m);
  }
  affine_ds(s, m, n_sub, (float)(limit - less), (float)limit, of);
  for (int l = 0; l < SIDE; l += VF_N) {
    const vf d = of_super_blocks(of->d, n_sub, l), dmin = of_super_blocks(of->dmin, n_sub, l);
    vf_store(of->scale + l, rounds_even(clamps(vf_mul(vf_load(s + l), inverses(d)), 0, (float)limit)));
    vf_store(of->min + l, rounds_even(clamps(vf_mul(vf_load(m + l), inverses(dmin)), 0, (float)limit)));
  }
}

// The best d, dmin and integers up to `limit`. Try the greatest scale at its limit and below, then refine the best try
// with its least-squares d and dmin. The plain ones or zeros are taken when they are better. More is tried for a
// super-block unlike noise.
PG_INLINE void affine_search(const side *b, int n, int top, int limit, affine_block *best) {
  enum { TRIES = 3, NEAR_LOOKS = 5 };
  const int n_sub = 256 / n;
  float least[2] = {INFINITY, INFINITY}, error[2] = {0};
  affine_fits fits;
  for (int l = 0; l < SIDE; l += VF_N) put_fit(&fits, l, affine_fitted(b->x[0] + l, b->w[0] + l, n, top, 1));
  *best = (affine_block){0};
  affine_block other = {0}, again = {0}, next = {0};
  for (int t = 0; t < TRIES; t++) {
    affine_ds(fits.s, fits.m, n_sub, (float)(limit - 2 * t), (float)limit, &other);
    affine_look(b, n, top, limit, &fits, &other, error, &next);
    memcpy(next.scale, other.scale, sizeof next.scale);
    memcpy(next.min, other.min, sizeof next.min);
    float of_other[2] = {least[0], least[1]};
    affine_take_better(&again, of_other, &next, error, n_sub);
    affine_take_better(best, least, &other, error, n_sub);
  }
  affine_errors(b, n, top, best, least);
  const going more = going_unlike(b, n, least, ranges_of(top).noise);
  for (int t = 0; t < 5; t++) { // the best one, with its least-squares d and dmin; the plain one; the fits; zeros
    going g = more;
    if (t == 0)
      g.on[0] = g.on[1] = 1;
    else if (t < 4)
      affine_rounded(b, n, top, limit, t == 1 ? NULL : &fits, t == 3 ? 2 : 0, &again);
    else
      again = (affine_block){0};
    if (t == 1 || t == 4) {
      affine_errors(b, n, top, &again, error);
      affine_take_better(best, least, &again, error, n_sub);
    }
    for (int look = 0; look < NEAR_LOOKS && (g.on[0] || g.on[1]) && t < 4; look++) {
      affine_look(b, n, top, limit, NULL, &again, error, &next);
      going_on(&g, error);
      affine_take_better(best, least, &again, error, n_sub);
      memcpy(again.d, next.d, sizeof next.d);
      memcpy(again.dmin, next.dmin, sizeof next.dmin);
      for (int o = 0; o < 2; o++) g.on[o] &= more.on[o];
    }
  }
}
