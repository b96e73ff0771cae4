// Search for the best codes of blocks: error sums, least squares, scans over candidate scales, for 16 (sub-)blocks side
// by side. A lane of a vector is a block, so no sum runs across lanes, and all instruction sets add in the same order
// and find the same codes.
#pragma once
#include "formats/block.h"
#include "formats/block_lut.h"
#include "simd/lanes.h"

enum { SIDE = 16, SIDE_PARTS = SIDE / VF_N };

// An encoder of up to `at_once` blocks of a row.
#define SIDE_ENCODER(name, at_once)                                                                                    \
  void PG_FN(name##_from_f32_weighted)(const float *src, const float *weights, void *row, int64_t n) {                 \
    uint8_t *b = row;                                                                                                  \
    for (int64_t i = 0; i < n; i += (at_once)*name##_elements, b += (at_once)*name##_bytes)                            \
      name##_encode(src + i, weights ? weights + i : NULL, b, (int)PG_MIN(at_once, (n - i) / name##_elements));        \
  }                                                                                                                    \
  void PG_FN(name##_from_f32)(const float *src, void *row, int64_t n) {                                                \
    PG_FN(name##_from_f32_weighted)(src, NULL, row, n);                                                                \
  }

PG_INLINE float inverse(float x) { return x != 0 ? 1 / x : 0; }
PG_INLINE vf inverses(vf x) { return vf_if_lt(vf_zero(), vf_abs(x), vf_div(vf_set1(1), x), vf_zero()); }
PG_INLINE float round_even(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; } // |x| < 2^22
PG_INLINE vf rounds_even(vf x) { return vf_sub(vf_add(x, vf_set1(0x1.8p23f)), vf_set1(0x1.8p23f)); }
PG_INLINE vf clamps(vf x, float lo, float hi) { return vf_min(vf_max(x, vf_set1(lo)), vf_set1(hi)); } // NaN gives lo

// Integers 0..255 as VF_N bytes.
PG_INLINE void put_bytes(uint8_t *p, vf x) {
#if VF_N == 8 // compilers would take each lane out
  const __m256i i = _mm256_cvttps_epi32(x);
  const __m128i two_bytes = _mm_packus_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(two_bytes, two_bytes));
#else
  typedef uint8_t bytes __attribute__((vector_size(VF_N)));
  const bytes b = __builtin_convertvector(__builtin_convertvector(x, vbits), bytes);
  memcpy(p, &b, sizeof b);
#endif
}

PG_INLINE float extreme(const float *x, int n) { // the first value of the greatest magnitude
  float ext = 0;
  for (int i = 0; i < n; i++) ext = fabsf(x[i]) > fabsf(ext) ? x[i] : ext;
  return ext;
}

// Element i of all blocks. Lanes without a block hold the last one.
typedef struct side {
  _Alignas(64) float x[32][SIDE], w[32][SIDE];
} side;

// Values are clamped to this. No block can store larger ones, and sums of squares stay finite.
#define FARTHEST 0x1p40f

// n_blocks blocks of n elements, a multiple of 16, and their weights (NULL: ones).
PG_INLINE void put_side(side *s, const float *x, const float *weights, int n, int n_blocks) {
  float *const lanes[2] = {(float *)s->x, (float *)s->w};
  for (int j = 0; j < (weights ? 2 : 1); j++) {
    const float *from = j ? weights : x;
    float *to = lanes[j];
    for (int l = 0; l < n_blocks / 4 * 4; l += 4) pg_rows_to_lanes(to + l, SIDE, from + l * n, n, n);
    for (int l = n_blocks / 4 * 4; l < SIDE; l++)
      for (int i = 0; i < n; i++) to[i * SIDE + l] = from[PG_MIN(l, n_blocks - 1) * n + i];
  }
  for (int i = 0; i < n * SIDE; i += VF_N) {
    float *to = lanes[0] + i;
    vf_store(to, clamps(vf_load(to), -FARTHEST, FARTHEST));
    if (!weights) vf_store(lanes[1] + i, vf_set1(1));
  }
}

PG_INLINE vf at(const float *lanes, int i) { return vf_load(lanes + i * SIDE); }

// The nearest scale that f16 can store, but 0 for 0 alone.
PG_INLINE float scale_stored(float x) {
  const float s = f16_rounded(x);
  return s == 0 && x != 0 ? copysignf(0x1p-24f, x) : s;
}

#define EACH_LANE(name, of_one)                                                                                        \
  PG_INLINE vf name(vf x) {                                                                                            \
    float v[VF_N];                                                                                                     \
    vf_store(v, x);                                                                                                    \
    for (int l = 0; l < VF_N; l++) v[l] = of_one(v[l]);                                                                \
    return vf_load(v);                                                                                                 \
  }
EACH_LANE(scales_stored, scale_stored)
EACH_LANE(f16s_rounded, f16_rounded)
#undef EACH_LANE

// -- x ~ s * v, v an integer in lo..hi, or one of the 16 values of IQ4 (hi == 0)

// The search tries scales that put a block's extreme value at one of `ends` (a place among the codes, or beyond them).
// The ends were chosen one after the other, each to lower the error most beside those before, over gaussian,
// heavy-tailed, outlying and weighted blocks (docs/products.md, Encoding).
typedef struct codes {
  float lo, hi;
  float noise; // error of gaussian blocks, as a share of their sum of squares
  int n_ends;
  float ends[12];
} codes;

static const codes codes_3bit = {-4, 3, 0.02f, 8, {-6.1f, -5, -4.5f, -4.1f, -3.7f, 3.15f, 4.15f, 4.95f}},
                   codes_4bit = {-8, 7, 0.0073f, 8, {-11.5f, -9.9f, -9.1f, -8.5f, -8.1f, -7.7f, -6.3f, 7.1f}},
                   codes_5bit = {-16, 15, 0.0018f, 8, {-17.3f, -16.5f, -16.3f, -16, -15.7f, -14.1f, -13.1f, 15}},
                   codes_6bit = {-32, 31, 0.00028f, 10, {-32.5f, -32, -26, -25, -24, 27, 28, 29, 30, 31}},
                   codes_iq4 = {
                       -127, 0, 0.0054f, 12, {-159, -142, -133, -129, -123, -110, -104, 92, 107, 113, 119, 128}};

// A block is searched once more when its error is below or above `noise` times these.
static const float NOISE_LEAST = 0.65f, NOISE_MOST = 1.6f;

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

// x and w are elements of the VF_N blocks of a part, here and below; inv: 1 / s.
PG_INLINE sums sym_sums(const float *x, const float *w, int n, vf inv, codes c) {
  sums r = {vf_zero(), vf_zero()};
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

PG_INLINE vf powers(const float *x, const float *w, int n) {
  vf p = vf_zero();
  for (int i = 0; i < n; i++) p = vf_add(p, vf_mul(at(w, i), vf_mul(at(x, i), at(x, i))));
  return p;
}

PG_INLINE vf extremes(const float *x, int n) {
  vf ext = vf_zero();
  for (int i = 0; i < n; i++) ext = vf_if_lt(vf_abs(ext), vf_abs(at(x, i)), at(x, i), ext);
  return ext;
}

// The best s for each block: for each of c.ends, try the least-squares scale of its codes.
PG_INLINE vf sym_scales(const float *x, const float *w, int n, codes c) {
  const vf ext = extremes(x, n), inv = inverses(ext);
  sums best = {vf_zero(), vf_set1(1)};
  for (int k = 0; k < c.n_ends; k++) {
    sums t = sym_sums(x, w, n, vf_mul(inv, vf_set1(c.ends[k])), c);
    t.xv = vf_mul(t.xv, inv); // normalised, so that no power overflows f32
    const vf gain = vf_mul(vf_mul(t.xv, t.xv), best.vv), before = vf_mul(vf_mul(best.xv, best.xv), t.vv);
    best.xv = vf_if_lt(before, gain, t.xv, best.xv);
    best.vv = vf_if_lt(before, gain, t.vv, best.vv);
  }
  return vf_mul(ext, vf_div(best.xv, best.vv));
}

// The plain scale: it puts the value of the greatest magnitude at c.lo, the code of the greatest magnitude.
PG_INLINE vf sym_plain(const float *x, int n, codes c) { return vf_div(extremes(x, n), vf_set1(c.lo)); }

// Take the scale `other` in blocks whose error with it is less than `e`.
PG_INLINE void take_scale(vf *s, vf *e, const float *x, const float *w, int n, vf other, codes c) {
  const vf stored = scales_stored(other), of_other = sym_error(x, w, n, stored, c);
  *s = vf_if_lt(of_other, *e, stored, *s);
  *e = vf_if_lt(of_other, *e, of_other, *e);
}

PG_INLINE int any_less(vf a, vf b) {
  float v[VF_N];
  int any = 0;
  vf_store(v, vf_if_lt(a, b, vf_set1(1), vf_zero()));
  for (int l = 0; l < VF_N; l++) any |= v[l] != 0;
  return any;
}

// The scales of blocks that each have one, as f16 stores it: the best one, unless the plain one or zeros are better.
// When a quarter of a block is 0, or its error is small, every code of the upper half is tried as an end.
PG_INLINE void sym_stored(const side *b, int n, codes c, float *d) {
  for (int l = 0; l < SIDE; l += VF_N) {
    const float *x = b->x[0] + l, *w = b->w[0] + l;
    vf s = scales_stored(sym_scales(x, w, n, c)), e = sym_error(x, w, n, s, c);
    take_scale(&s, &e, x, w, n, sym_plain(x, n, c), c);
    take_scale(&s, &e, x, w, n, vf_zero(), c);
    const vf little = vf_mul(powers(x, w, n), vf_set1(0.5f * c.noise)), inv = inverses(extremes(x, n));
    vf few = vf_if_lt(e, little, vf_set1((float)n), vf_zero()); // or the number of values that are 0
    for (int i = 0; i < n; i++) few = vf_add(few, vf_if_lt(vf_zero(), vf_abs(at(x, i)), vf_zero(), vf_set1(1)));
    const vf quarter = vf_set1((float)n / 4);
    if (c.hi != 0 && any_less(quarter, few)) { // IQ4's ends are enough
      vf more = s, of_more = e;
      for (int k = (int)c.lo; k <= (int)c.lo / 2; k++)
        for (int sign = -1; sign <= 1; sign += 2) {
          const sums t = sym_sums(x, w, n, vf_mul(inv, vf_set1((float)(sign * k))), c);
          take_scale(&more, &of_more, x, w, n, vf_mul(t.xv, inverses(t.vv)), c);
        }
      s = vf_if_lt(quarter, few, more, s);
    }
    vf_store(d + l, s);
  }
}

// Super-blocks of 256, 1 or 2 of them: x ~ d * scale[k] * v; scale[] holds integers, d what f16 stores.
typedef struct sym_block {
  float d[2];
  _Alignas(64) float scale[SIDE];
} sym_block;

// The d with which the greatest scale becomes the integer `last`: the greatest one, or one near it.
PG_INLINE void sym_ds(const float *s, int n_sub, float last, float *d) {
  for (int o = 0; o < SIDE / n_sub; o++) d[o] = scale_stored(extreme(s + o * n_sub, n_sub) / last);
}

// The integers nearest to s / d. A scale that is not 0 does not become 0, except for codes that have no 0.
PG_INLINE vf sym_integers(vf s, vf d, codes c, int lo, int hi) {
  const vf t = vf_mul(s, inverses(d)), i = rounds_even(clamps(t, (float)lo, (float)hi));
  if (c.hi == 0) return i;
  const vf one = vf_if_lt(t, vf_zero(), vf_set1(-1), vf_if_lt(vf_zero(), t, vf_set1(1), vf_zero()));
  return vf_if_lt(vf_zero(), vf_abs(i), i, one);
}

PG_INLINE vf of_super_blocks(const float *d, int n_sub, int l) { // for lanes from l on
  _Alignas(64) float ds[VF_N];
  for (int k = 0; k < VF_N; k++) ds[k] = d[(l + k) / n_sub];
  return vf_load(ds);
}

PG_INLINE void sums_of_super_blocks(const float *e, int n_sub, float *sum) {
  for (int o = 0; o < SIDE / n_sub; o++) {
    sum[o] = 0;
    for (int k = o * n_sub; k < (o + 1) * n_sub; k++) sum[o] += e[k];
  }
}

// Take the super-blocks of `other` that have a smaller error.
PG_INLINE void take_better(sym_block *best, float *least, const sym_block *other, const float *error, int n_sub) {
  for (int o = 0; o < SIDE / n_sub; o++)
    if (error[o] < least[o]) {
      least[o] = error[o];
      best->d[o] = other->d[o];
      memcpy(best->scale + o * n_sub, other->scale + o * n_sub, (size_t)n_sub * sizeof *best->scale);
    }
}

// Find the best integers and codes for a d. With s, try the integers for the scales s, which become the least-squares
// scales of the codes; without s, try the present integers and those next to them. Sets the integers, `error` and
// *next_d, the least-squares d. With s, `error` is less the sum of w x x: quicker, but too coarse for the smallest
// errors.
PG_INLINE void sym_look(const side *b, int n, codes c, int lo, int hi, float *s, sym_block *of, float *error,
                        float *next_d) {
  _Alignas(64) float e[SIDE], xv[SIDE], vv[SIDE];
  const int n_sub = 256 / n;
  for (int l = 0; l < SIDE; l += VF_N) {
    const float *x = b->x[0] + l, *w = b->w[0] + l;
    const vf d = of_super_blocks(of->d, n_sub, l);
    vf least = vf_set1(INFINITY), i = s ? sym_integers(vf_load(s + l), d, c, lo, hi) : vf_zero();
    for (int k = -1; k <= 1 && !s; k++) {
      const vf near = clamps(vf_add(vf_load(of->scale + l), vf_set1((float)k)), (float)lo, (float)hi);
      const vf of_near = sym_error(x, w, n, vf_mul(d, near), c);
      i = vf_if_lt(of_near, least, near, i);
      least = vf_if_lt(of_near, least, of_near, least);
    }
    const vf di = vf_mul(d, i);
    const sums t = sym_sums(x, w, n, inverses(di), c);
    if (s) {
      least = vf_mul(di, vf_sub(vf_mul(di, t.vv), vf_add(t.xv, t.xv)));
      vf_store(s + l, vf_if_lt(vf_zero(), t.vv, vf_div(t.xv, t.vv), vf_load(s + l)));
    }
    vf_store(of->scale + l, i);
    vf_store(e + l, least);
    vf_store(xv + l, vf_mul(t.xv, i));
    vf_store(vv + l, vf_mul(t.vv, vf_mul(i, i)));
  }
  float sum_xv[2], sum_vv[2];
  sums_of_super_blocks(e, n_sub, error);
  sums_of_super_blocks(xv, n_sub, sum_xv);
  sums_of_super_blocks(vv, n_sub, sum_vv);
  for (int o = 0; o < SIDE / n_sub; o++) next_d[o] = sum_vv[o] > 0 ? scale_stored(sum_xv[o] / sum_vv[o]) : of->d[o];
}

PG_INLINE void sym_errors(const side *b, int n, codes c, const sym_block *of, float *error) {
  _Alignas(64) float e[SIDE];
  for (int l = 0; l < SIDE; l += VF_N) {
    const vf s = vf_mul(of_super_blocks(of->d, 256 / n, l), vf_load(of->scale + l));
    vf_store(e + l, sym_error(b->x[0] + l, b->w[0] + l, n, s, c));
  }
  sums_of_super_blocks(e, 256 / n, error);
}

// The plain scales in integers.
PG_INLINE void sym_plain_block(const side *b, int n, codes c, int lo, int hi, sym_block *of) {
  _Alignas(64) float s[SIDE];
  for (int l = 0; l < SIDE; l += VF_N) vf_store(s + l, sym_plain(b->x[0] + l, n, c));
  sym_ds(s, 256 / n, (float)lo, of->d);
  for (int l = 0; l < SIDE; l += VF_N)
    vf_store(of->scale + l, sym_integers(vf_load(s + l), of_super_blocks(of->d, 256 / n, l), c, lo, hi));
}

// Decides whether a super-block is searched once more: as long as that lowers its error by a 1000th, and unless its
// error is near that of gaussian noise, for which the first passes are enough. The result of a super-block does not
// depend on the one beside it: when its search has ended, further results are not taken.
typedef struct going {
  int on[2];
  float last[2];
} going;

PG_INLINE going going_unlike(const side *b, int n, const float *error, float noise) {
  _Alignas(64) float p[SIDE];
  float power[2];
  going g = {{0}, {INFINITY, INFINITY}};
  for (int l = 0; l < SIDE; l += VF_N) vf_store(p + l, powers(b->x[0] + l, b->w[0] + l, n));
  sums_of_super_blocks(p, 256 / n, power);
  for (int o = 0; o < SIDE * n / 256; o++)
    g.on[o] = error[o] < NOISE_LEAST * noise * power[o] || error[o] > NOISE_MOST * noise * power[o];
  return g;
}

PG_INLINE void going_on(going *g, float *error) {
  for (int o = 0; o < 2; o++) {
    if (!g->on[o]) error[o] = INFINITY;
    g->on[o] = g->on[o] && error[o] < 0.999f * g->last[o];
    g->last[o] = error[o];
  }
}

// The best d and integers in lo..hi; the plain ones, or zeros, when those are better. For a super-block unlike noise,
// the neighbours of the best and of the plain ones are tried, too.
PG_INLINE void sym_search(const side *b, int n, codes c, int lo, int hi, sym_block *best) {
  enum { LOOKS = 2, NEAR_LOOKS = 3 };
  const int n_sub = 256 / n, tries = c.hi == 3 ? 1 : 3; // few codes gain little
  _Alignas(64) float searched[SIDE], s[SIDE];
  float least[2] = {INFINITY, INFINITY}, error[2], next_d[2];
  sym_block tried;
  for (int l = 0; l < SIDE; l += VF_N) vf_store(searched + l, sym_scales(b->x[0] + l, b->w[0] + l, n, c));
  *best = (sym_block){0};
  for (int t = 0; t < tries; t++) {
    memcpy(s, searched, sizeof s);
    sym_ds(s, n_sub, (float)(lo + t), tried.d);
    for (int look = 0; look < LOOKS; look++) {
      sym_look(b, n, c, lo, hi, s, &tried, error, next_d);
      take_better(best, least, &tried, error, n_sub);
      memcpy(tried.d, next_d, sizeof next_d);
    }
  }
  sym_errors(b, n, c, best, least);
  const going more = going_unlike(b, n, least, c.noise);
  for (int t = 0; t < 3; t++) { // the best one, the plain one, zeros
    going g = more;
    if (t == 0)
      tried = *best;
    else if (t == 1)
      sym_plain_block(b, n, c, lo, hi, &tried);
    else
      tried = (sym_block){0};
    if (t > 0) sym_errors(b, n, c, &tried, error);
    if (t > 0) take_better(best, least, &tried, error, n_sub);
    for (int look = 0; look < NEAR_LOOKS && (g.on[0] || g.on[1]) && t < 2; look++) {
      sym_look(b, n, c, lo, hi, NULL, &tried, error, next_d);
      going_on(&g, error);
      take_better(best, least, &tried, error, n_sub);
      memcpy(tried.d, next_d, sizeof next_d);
    }
  }
}
