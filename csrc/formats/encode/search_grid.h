// Search for codes of blocks x ~ unit * (2i + 1) * point: sub-blocks share i, groups of 8 (or 4) elements are points of
// a grid, and unit is d over a constant. 16 sub-blocks are searched side by side. At a scale s the best point for a
// group minimises s^2 b - 2 s a with a = sum w x p, b = sum w p p. It is searched among the grid's points nearest to
// the lattice point that x / s rounds to. A scan over scales makes a list of points; then each scale that d and i can
// express takes the best ones of the list.
#pragma once
#include "formats/block_iq.h"
#include "formats/encode/near.h"
#include "formats/encode/search.h"

enum { SCALES = 5, MAX_ENTRIES = 3 * SCALES + 1, MAX_ROWS = 8 };

typedef struct grid {
  const pg_near *near;
  float lowest, step; // the levels of an element, as borders between them are: x / s rounds to (x / s - lowest) / step
  int sub;            // elements that share a scale
  int scales;         // values of i
  int shifted;        // 0: no; 1: a shift per sub-block (IQ1_S); 2: per group (IQ1_M)
  float per_unit;     // d / unit
} grid;

PG_INLINE int signs_of(const grid *g) { return g->shifted ? 2 : 1; }

// What was found for each scale tried. Rows are groups, first all of them with the shift, then with the shift negated.
typedef struct finds {
  _Alignas(64) float a[MAX_ROWS][MAX_ENTRIES][SIDE], b[MAX_ROWS][MAX_ENTRIES][SIDE];
  uint16_t packed[MAX_ROWS][MAX_ENTRIES][SIDE];
  int n;
} finds;

// Values by digit; the table repeats, so that the bits above a digit of 2 or 3 do not matter.
#if defined(PG_ISA_avx512)
typedef vf by_digit;
PG_INLINE by_digit digit_values(const float *level) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(level)); }
PG_INLINE by_digit all_digits(float x) { return vf_set1(x); }
PG_INLINE vf value_at(by_digit v, vbits digits) { return _mm512_permutexvar_ps((__m512i)digits, v); }
#elif defined(PG_ISA_avx2)
typedef vf by_digit;
PG_INLINE by_digit digit_values(const float *level) { return _mm256_loadu_ps(level); }
PG_INLINE by_digit all_digits(float x) { return vf_set1(x); }
PG_INLINE vf value_at(by_digit v, vbits digits) { return _mm256_permutevar8x32_ps(v, (__m256i)digits); }
#else
typedef float by_digit __attribute__((vector_size(32)));
PG_INLINE by_digit digit_values(const float *level) {
  by_digit v;
  memcpy(&v, level, sizeof v);
  return v;
}
PG_INLINE by_digit all_digits(float x) { return (by_digit){x, x, x, x, x, x, x, x}; }
PG_INLINE vf value_at(by_digit v, vbits digits) {
  return (vf){v[digits[0] & 7], v[digits[1] & 7], v[digits[2] & 7], v[digits[3] & 7]};
}
#endif

PG_INLINE vbits load_packed(const uint16_t *p) {
  typedef uint16_t shorts __attribute__((vector_size(2 * VF_N)));
  shorts v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, vbits);
}

// The best of the listed points for one group: the one with the greatest sum of p (w x - p w s / 2). The lowest bits of
// each sum are replaced by the point's place in the list, so that the greatest sum also gives the place.
PG_INLINE uint16_t best_near(const uint16_t *list, int dim, int bits, by_digit level, const float *wx,
                             const float *half) {
  by_digit gain[8];
#pragma GCC unroll 8
  for (int i = 0; i < dim; i++) gain[i] = level * (all_digits(wx[i * SIDE]) - level * all_digits(half[i * SIDE]));
  vbits place = {0};
  for (int l = 0; l < VF_N; l++) place[l] = l;
  vf best = vf_set1(-INFINITY);
#pragma GCC unroll 4
  for (int c = 0; c < PG_NEAR; c += VF_N) {
    const vbits p = load_packed(list + c);
    vf sum = vf_zero();
#pragma GCC unroll 8
    for (int i = 0; i < dim; i += 2) {
      const vf two = vf_add(value_at(gain[i], p >> bits * i), value_at(gain[i + 1], p >> bits * (i + 1)));
      sum = i ? vf_add(sum, two) : two;
    }
    best = vf_max(best, (vf)(((vbits)sum & ~(PG_NEAR - 1)) | (place + c)));
  }
  const float most = vf_hmax(best);
  int32_t at;
  memcpy(&at, &most, sizeof at);
  return list[at & (PG_NEAR - 1)];
}

// Add the points that are best at the scales s[SIDE].
PG_INLINE void find_points(const grid *g, const side *of, const float *s, finds *f, int dim, int base) {
  const int bits = base == 3 ? 2 : 3, n_groups = g->sub / dim, e = f->n++;
  _Alignas(64) float wx[32][SIDE], half[32][SIDE];
  _Alignas(64) int32_t number[SIDE];
  for (int i = 0; i < g->sub; i++)
    for (int l = 0; l < SIDE; l += VF_N) {
      const vf w = vf_load(of->w[i] + l);
      vf_store(wx[i] + l, vf_mul(w, vf_load(of->x[i] + l)));
      vf_store(half[i] + l, vf_mul(w, vf_mul(vf_load(s + l), vf_set1(0.5f))));
    }
  for (int sign = 0; sign < signs_of(g); sign++) {
    const float shift = !g->shifted ? 0 : sign ? -IQ1_SHIFT : IQ1_SHIFT;
    const by_digit level = digit_values(g->near->level) + all_digits(shift);
    for (int k = 0; k < n_groups; k++) {
      const int row = sign * n_groups + k;
      const float *x = of->x[k * dim], *w = of->w[k * dim];
      for (int l = 0; l < SIDE; l += VF_N) {
        const vf inv = inverses(vf_mul(vf_load(s + l), vf_set1(g->step)));
        vf sum = vf_zero();
        for (int i = dim - 1; i >= 0; i--) {
          const vf t = vf_sub(vf_mul(at(x + l, i), inv), vf_set1((g->lowest + shift) / g->step));
          sum = vf_add(vf_mul(sum, vf_set1((float)base)), rounds_even(clamps(t, 0, (float)(base - 1))));
        }
        const vbits v = __builtin_convertvector(sum, vbits);
        memcpy(number + l, &v, sizeof v);
      }
      for (int l = 0; l < SIDE; l++)
        f->packed[row][e][l] =
            best_near(g->near->packed[number[l]], dim, bits, level, wx[k * dim] + l, half[k * dim] + l);
      for (int l = 0; l < SIDE; l += VF_N) {
        const vbits p = load_packed(f->packed[row][e] + l);
        vf a = vf_zero(), b = vf_zero();
        for (int i = 0; i < dim; i++) {
          const vf v = value_at(level, p >> bits * i), wv = vf_mul(at(w + l, i), v);
          a = vf_add(a, vf_mul(wv, at(x + l, i)));
          b = vf_add(b, vf_mul(wv, v));
        }
        vf_store(f->a[row][e] + l, a);
        vf_store(f->b[row][e] + l, b);
      }
    }
  }
}

// Evaluate a scale s with the points found, in the sub-blocks of a part: the least cost, sum (x - s p)^2 less sum x^2;
// the sums a and b; and which entry each group takes, with which sign (from SECOND on: the second sign).
enum { SECOND = 32 };

typedef struct choice {
  vf cost, a, b, entry[MAX_ROWS];
} choice;

PG_INLINE choice choose(const grid *g, const finds *f, int first, int l, vf s, int n_groups) {
  choice c[2];
  for (int one = 0; one < (g->shifted == 1 ? 2 : 1); one++) { // IQ1_S: one sign for all groups
    choice *to = &c[one];
    to->cost = to->a = to->b = vf_zero();
    for (int k = 0; k < n_groups; k++) {
      vf least = vf_set1(INFINITY), a = vf_zero(), b = vf_zero(), entry = vf_zero();
      for (int sign = one; sign < (g->shifted == 1 ? one + 1 : signs_of(g)); sign++)
        for (int e = first; e < f->n; e++) {
          const int row = sign * n_groups + k;
          const vf ea = vf_load(f->a[row][e] + l), eb = vf_load(f->b[row][e] + l);
          const vf cost = vf_mul(s, vf_sub(vf_mul(s, eb), vf_add(ea, ea)));
          entry = vf_if_lt(cost, least, vf_set1((float)(e + sign * SECOND)), entry);
          a = vf_if_lt(cost, least, ea, a);
          b = vf_if_lt(cost, least, eb, b);
          least = vf_if_lt(cost, least, cost, least);
        }
      to->cost = vf_add(to->cost, least);
      to->a = vf_add(to->a, a);
      to->b = vf_add(to->b, b);
      to->entry[k] = entry;
    }
  }
  if (g->shifted == 1) {
    for (int k = 0; k < n_groups; k++) c[0].entry[k] = vf_if_lt(c[1].cost, c[0].cost, c[1].entry[k], c[0].entry[k]);
    c[0].a = vf_if_lt(c[1].cost, c[0].cost, c[1].a, c[0].a);
    c[0].b = vf_if_lt(c[1].cost, c[0].cost, c[1].b, c[0].b);
    c[0].cost = vf_if_lt(c[1].cost, c[0].cost, c[1].cost, c[0].cost);
  }
  return c[0];
}

// Try SCALES scales, size[] * by[i]. When points that they find are better, *best becomes their least-squares scale,
// and *gain how much it lowers the error.
PG_INLINE void scan(const grid *g, const side *of, const float *size, const float *by, finds *f, float *best,
                    float *gain, int dim, int base) {
  for (int i = 0; i < SCALES; i++) {
    _Alignas(64) float s[SIDE];
    for (int l = 0; l < SIDE; l++) s[l] = size[l] * by[i];
    find_points(g, of, s, f, dim, base);
    for (int l = 0; l < SIDE; l += VF_N) {
      const choice c = choose(g, f, f->n - 1, l, vf_load(s + l), g->sub / dim);
      const vf more = vf_if_lt(vf_zero(), c.a, vf_mul(c.a, c.a), vf_zero()), before = vf_load(gain + l);
      vf_store(best + l, vf_if_lt(vf_mul(before, c.b), more, vf_div(c.a, c.b), vf_load(best + l)));
      vf_store(gain + l, vf_if_lt(vf_mul(before, c.b), more, vf_div(more, c.b), before));
    }
  }
}

// The least magnitude of a grid's levels, when the values of a super-block are so similar that one level may serve for
// all of them; otherwise 0.
PG_INLINE float level_of_flat(const grid *g, const float (*x)[SIDE], int first, int end) {
  float most = 0, least = INFINITY;
  for (int i = 0; i < g->sub; i++)
    for (int k = first; k < end; k++) {
      most = PG_MAX(most, fabsf(x[i][k]));
      least = PG_MIN(least, fabsf(x[i][k]));
    }
  return least < 0.5f * most ? 0 : g->shifted ? 1 : g->near->level[0];
}

typedef struct found {
  float unit[2];         // of super-blocks
  int level[SIDE];       // i, of sub-blocks
  int point[8][SIDE];    // of groups: which of the grid's
  int negative[8][SIDE]; // the shift's sign
} found;

PG_INLINE float unit_of(const grid *g, float unit) { return scale_stored(unit * g->per_unit) / g->per_unit; }

// Searches a super-block of 16 sub-blocks, or two of 8. x holds the values to match (for signed points: magnitudes).
PG_INLINE void search_grid(const grid *g, const side *of, found *out, int dim, int base) {
  enum { TRIES = 7, PASSES = 2 };
  static const float coarse[SCALES] = {1 / 0.55f, 1 / 0.75f, 1 / 0.95f, 1 / 1.15f, 1 / 1.35f},
                     fine[SCALES] = {0.82f, 0.9f, 0.96f, 1.05f, 1.13f};
  const int n_sub = 256 / g->sub, n_super = SIDE / n_sub, top = 2 * g->scales - 1, n_groups = g->sub / dim;
  _Alignas(64) float size[SIDE], scale[SIDE] = {0}, gain[SIDE] = {0};
  finds f;
  f.n = 0;
  float largest = 0;
  for (int i = 0; i < base; i++) largest = PG_MAX(largest, g->near->level[i]);
  for (int l = 0; l < SIDE; l += VF_N)
    vf_store(size + l, vf_mul(vf_abs(extremes(of->x[0] + l, g->sub)), vf_set1(1 / largest)));
  scan(g, of, size, coarse, &f, scale, gain, dim, base);
  float flat[2] = {0, 0};
  for (int o = 0; o < n_super; o++) flat[o] = level_of_flat(g, of->x, o * n_sub, (o + 1) * n_sub);
  if (flat[0] + flat[1] > 0) {
    for (int k = 0; k < SIDE; k++) size[k] *= flat[k / n_sub] > 0 ? largest / flat[k / n_sub] : 1;
    scan(g, of, size, coarse, &f, scale, gain, dim, base);
  }
  memcpy(size, scale, sizeof size);
  scan(g, of, size, fine, &f, scale, gain, dim, base);

  float least[2] = {0, 0}, s_max[2] = {0, 0};
  for (int k = 0; k < SIDE; k++) s_max[k / n_sub] = PG_MAX(s_max[k / n_sub], scale[k]);
  for (int o = 0; o < n_super; o++) out->unit[o] = 0; // zeros, unless something is better
  for (int k = 0; k < SIDE; k++) out->level[k] = 0;
  for (int t = 0; t < TRIES; t++) {
    float unit[2];
    for (int o = 0; o < n_super; o++) unit[o] = unit_of(g, s_max[o] / ((float)top * (0.84f + 0.06f * (float)t)));
    for (int pass = 0; pass < PASSES; pass++) { // the second pass uses the least-squares unit of the first
      _Alignas(64) float units[SIDE], level[SIDE], cost[SIDE], a[SIDE], b[SIDE];
      for (int k = 0; k < SIDE; k++) units[k] = unit[k / n_sub];
      for (int l = 0; l < SIDE; l += VF_N) {
        const vf u = vf_load(units + l), one = vf_set1(1);
        const vf ideal = vf_mul(vf_sub(vf_mul(vf_load(scale + l), inverses(u)), one), vf_set1(0.5f));
        const vf low = vf_floor(clamps(ideal, 0, (float)(g->scales - 1)));
        const vf high = vf_min(vf_add(low, one), vf_set1((float)(g->scales - 1)));
        const vf low2 = vf_add(vf_add(low, low), one), high2 = vf_add(vf_add(high, high), one); // 2i + 1
        const choice c = choose(g, &f, 0, l, vf_mul(u, low2), n_groups),
                     d = choose(g, &f, 0, l, vf_mul(u, high2), n_groups);
        const vf by = vf_if_lt(d.cost, c.cost, high2, low2);
        vf_store(level + l, vf_if_lt(d.cost, c.cost, high, low));
        vf_store(cost + l, vf_if_lt(d.cost, c.cost, d.cost, c.cost));
        vf_store(a + l, vf_mul(by, vf_if_lt(d.cost, c.cost, d.a, c.a)));
        vf_store(b + l, vf_mul(vf_mul(by, by), vf_if_lt(d.cost, c.cost, d.b, c.b)));
      }
      for (int o = 0; o < n_super; o++) {
        double sum = 0, sum_a = 0, sum_b = 0;
        for (int k = o * n_sub; k < (o + 1) * n_sub; k++) sum += cost[k], sum_a += a[k], sum_b += b[k];
        if (sum < least[o]) {
          least[o] = (float)sum;
          out->unit[o] = unit[o];
          for (int k = o * n_sub; k < (o + 1) * n_sub; k++) out->level[k] = (int)level[k];
        }
        unit[o] = unit_of(g, sum_b > 0 && sum_a > 0 ? (float)(sum_a / sum_b) : 0);
      }
    }
  }

  // The best points at the chosen scales.
  _Alignas(64) float s[SIDE], entry[MAX_ROWS][SIDE];
  for (int k = 0; k < SIDE; k++) s[k] = out->unit[k / n_sub] * (float)(2 * out->level[k] + 1);
  find_points(g, of, s, &f, dim, base);
  for (int l = 0; l < SIDE; l += VF_N) {
    const choice c = choose(g, &f, 0, l, vf_load(s + l), n_groups);
    for (int k = 0; k < n_groups; k++) vf_store(entry[k] + l, c.entry[k]);
  }
  for (int k = 0; k < n_groups; k++)
    for (int l = 0; l < SIDE; l++) {
      const int e = (int)entry[k][l] % SECOND, sign = (int)entry[k][l] / SECOND;
      int packed = f.packed[sign * n_groups + k][e][l], number = 0;
      for (int i = dim - 1; i >= 0; i--)
        number = number * base + (packed >> (base == 3 ? 2 : 3) * i & (base == 3 ? 3 : 7));
      out->point[k][l] = g->near->point[number];
      out->negative[k][l] = sign;
    }
}
