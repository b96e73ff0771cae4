// IQ1_*, IQ2_*, IQ3_*, encoded (layouts: formats/decode_iq.c). All of them store x ~ unit * (2i + 1) * (sign * point)
// in sub-blocks that share i; unit is d over a constant. For one group of elements and one scale s the best point
// minimises s^2 B - 2 s A with A = sum w x p, B = sum w p p. Both are tabulated for all points once per group; then
// each scale of a scan finds its best point exactly, at one multiplication a point. The points found make a short list,
// from which the scales that d and i can express choose.
#include "formats/block_iq.h"
#include "formats/encode/search.h"

// The weights to use for n elements: those given, or ones.
static const float *weights_or_ones(const float *weights, float *ones, int n) {
  if (weights) return weights;
  for (int i = 0; i < n; i++) ones[i] = 1;
  return ones;
}

enum { MAX_POINTS = 2048, MAX_GROUPS = 8, MAX_SUBS = 16, BATCH = 5 };

typedef struct grid {
  const int8_t *points; // [dim][n]
  int n, dim;           // points; elements of one
  int sub;              // elements that share a scale
  int levels;           // of the scale
  int shifted;          // 0: no; 1: a shift per sub-block (IQ1_S); 2: per group (IQ1_M)
} grid;

typedef struct table { // of a sub-block's groups, for each of the two shifts (or once)
  float a[2][MAX_GROUPS][MAX_POINTS], b[2][MAX_GROUPS][MAX_POINTS];
} table;

typedef struct candidate {
  int point;
  float a, b;
} candidate;

typedef struct shortlist { // of a sub-block: per shift and group the best points for the scales scanned
  candidate at[2][MAX_GROUPS][3 * BATCH];
  int n[2][MAX_GROUPS];
  float scale; // the best of all real numbers, with its points
} shortlist;

typedef struct pick {                          // what a scale does to a sub-block
  int point[MAX_GROUPS], negative[MAX_GROUPS]; // negative: the shift's sign
  float cost;                                  // less the sum of w x x
  float a, b;                                  // sums over the points picked
} pick;

static void tabulate(const grid *g, const float *x, const float *w, table *t) {
  for (int k = 0; k < g->sub / g->dim; k++)
    for (int sign = 0; sign < (g->shifted ? 2 : 1); sign++) {
      const vf shift = vf_set1(g->shifted ? (sign ? -IQ1_SHIFT : IQ1_SHIFT) : 0);
      float *a = t->a[sign][k], *b = t->b[sign][k];
      for (int e = 0; e < g->n; e += VF_N) {
        vf sa = vf_zero(), sb = vf_zero();
        for (int i = 0; i < g->dim; i++) {
          const int at = k * g->dim + i;
          const vf p = vf_add(vf_load_i8(g->points + i * g->n + e), shift), wp = vf_mul(vf_set1(w[at]), p);
          sa = vf_add(sa, vf_mul(wp, vf_set1(x[at])));
          sb = vf_add(sb, vf_mul(wp, p));
        }
        vf_store(a + e, sa);
        vf_store(b + e, sb);
      }
    }
}

// For each of BATCH scales the point with the least s b - 2 a, the first of equals.
static void best_points(const float *a, const float *b, int n, const float *s, int *point) {
  vf half[BATCH], best[BATCH], where[BATCH], index = vf_zero();
  for (int i = 0; i < BATCH; i++) {
    half[i] = vf_set1(s[i] * 0.5f);
    best[i] = vf_set1(INFINITY);
    where[i] = vf_zero();
  }
  for (int e = 0; e < n; e += VF_N, index = vf_add(index, vf_set1(VF_N))) {
    const vf va = vf_load(a + e), vb = vf_load(b + e);
#pragma GCC unroll 8
    for (int i = 0; i < BATCH; i++) {
      const vf cost = vf_sub(vf_mul(half[i], vb), va);
      where[i] = vf_if_lt(cost, best[i], index, where[i]);
      best[i] = vf_if_lt(cost, best[i], cost, best[i]);
    }
  }
  for (int i = 0; i < BATCH; i++) {
    float lane[VF_N], at[VF_N], least = INFINITY;
    vf_store(lane, best[i]);
    vf_store(at, where[i]);
    point[i] = 0;
    for (int l = 0; l < VF_N; l++) {
      const int e = (int)at[l] + l;
      if (lane[l] < least || (lane[l] == least && e < point[i])) least = lane[l], point[i] = e;
    }
  }
}

// The best points of the list for scale s.
static pick pick_points(const grid *g, const shortlist *list, float s) {
  pick p[2];
  const int signs = g->shifted ? 2 : 1;
  for (int only = 0; only < (g->shifted == 1 ? 2 : 1); only++) { // IQ1_S: one sign for all groups
    p[only].cost = p[only].a = p[only].b = 0;
    for (int k = 0; k < g->sub / g->dim; k++) {
      const candidate *best = NULL;
      float cost = INFINITY;
      int negative = only;
      for (int sign = 0; sign < signs; sign++) {
        if (g->shifted == 1 && sign != only) continue;
        for (int i = 0; i < list->n[sign][k]; i++) {
          const candidate *c = &list->at[sign][k][i];
          const float e = s * (s * c->b - 2 * c->a);
          if (!best || e < cost) best = c, cost = e, negative = sign;
        }
      }
      p[only].point[k] = best->point;
      p[only].negative[k] = negative;
      p[only].cost += cost;
      p[only].a += best->a;
      p[only].b += best->b;
    }
  }
  return g->shifted == 1 && p[1].cost < p[0].cost ? p[1] : p[0];
}

static void add_candidate(shortlist *list, int sign, int group, candidate c) {
  int n = list->n[sign][group];
  for (int i = 0; i < n; i++)
    if (list->at[sign][group][i].point == c.point) return;
  list->at[sign][group][n] = c;
  list->n[sign][group]++;
}

// Adds the best points for BATCH scales; list->scale becomes the best least-squares scale seen, *gain the error it
// saves.
static void scan(const grid *g, const table *t, const float *s, shortlist *list, float *gain) {
  for (int sign = 0; sign < (g->shifted ? 2 : 1); sign++)
    for (int k = 0; k < g->sub / g->dim; k++) {
      const float *a = t->a[sign][k], *b = t->b[sign][k];
      int point[BATCH];
      best_points(a, b, g->n, s, point);
      for (int i = 0; i < BATCH; i++) add_candidate(list, sign, k, (candidate){point[i], a[point[i]], b[point[i]]});
    }
  for (int i = 0; i < BATCH; i++) {
    const pick p = pick_points(g, list, s[i]);
    if (p.b > 0 && p.a > 0 && p.a * p.a > *gain * p.b) {
      *gain = p.a * p.a / p.b;
      list->scale = p.a / p.b;
    }
  }
}

// Scans a sub-block: coarsely over scales that bring its greatest value near the grid's (or, where `flat` is not 0,
// near that value of the grid as well), then around the best of them.
static void scan_scales(const grid *g, const float *x, const float *w, int largest, int flat, table *t,
                        shortlist *list) {
  static const float coarse[BATCH] = {0.55f, 0.75f, 0.95f, 1.15f, 1.35f},
                     fine[BATCH] = {0.82f, 0.9f, 0.96f, 1.05f, 1.13f};
  const float amax = fabsf(extreme(x, g->sub));
  float s[BATCH], gain = 0;
  tabulate(g, x, w, t);
  memset(list->n, 0, sizeof list->n);
  list->scale = 0;
  for (int i = 0; i < BATCH; i++) s[i] = amax / ((float)largest * coarse[i]);
  scan(g, t, s, list, &gain);
  if (flat) {
    for (int i = 0; i < BATCH; i++) s[i] = amax / ((float)flat * coarse[i]);
    scan(g, t, s, list, &gain);
  }
  for (int i = 0; i < BATCH; i++) s[i] = list->scale * fine[i];
  scan(g, t, s, list, &gain);
}

typedef struct found {
  float unit;
  int level[MAX_SUBS];
  pick pick[MAX_SUBS];
} found;

// The least magnitude of a grid, where those of a super-block are so much alike that it may serve all of them; else 0.
static int level_of_flat(const grid *g, const float *x) {
  const float half = 0.5f * fabsf(extreme(x, 256));
  for (int i = 0; i < 256; i++)
    if (fabsf(x[i]) < half) return 0;
  int least = 127;
  for (int i = 0; i < g->n; i++)
    if (g->points[i] > 0) least = PG_MIN(least, g->points[i]);
  return least;
}

// Searches a super-block. x holds the values to match (for signed points: magnitudes); `per_unit` is d / unit.
static void search(const grid *g, const float *x, const float *w, float per_unit, found *out) {
  enum { TRIES = 7 };
  const int n_sub = 256 / g->sub, top = 2 * g->levels - 1;
  int largest = 0;
  for (int i = 0; i < g->n; i++) largest = PG_MAX(largest, g->points[i]);
  const int flat = level_of_flat(g, x);
  table t;
  shortlist list[MAX_SUBS];
  float s_max = 0;
  for (int k = 0; k < n_sub; k++) {
    scan_scales(g, x + k * g->sub, w + k * g->sub, largest, flat, &t, &list[k]);
    s_max = PG_MAX(s_max, list[k].scale);
  }
  double least = INFINITY;
  for (int i = 0; i < TRIES; i++) {
    found f = {.unit = f16_rounded(s_max / ((float)top * (0.84f + 0.06f * (float)i)) * per_unit) / per_unit};
    for (int pass = 0; pass < 2; pass++) { // the second at the least-squares unit of the first
      double cost = 0, a = 0, b = 0;
      for (int k = 0; k < n_sub; k++) {
        const float ideal = (list[k].scale * inverse(f.unit) - 1) * 0.5f; // the real-valued level
        const int low = to_int(floorf(clampf(ideal, 0, 100)), 0, (float)(g->levels - 1));
        for (int level = low; level <= PG_MIN(low + 1, g->levels - 1); level++) {
          const pick p = pick_points(g, &list[k], f.unit * (float)(2 * level + 1));
          if (level == low || p.cost < f.pick[k].cost) f.pick[k] = p, f.level[k] = level;
        }
        const float l = (float)(2 * f.level[k] + 1);
        cost += f.pick[k].cost;
        a += l * f.pick[k].a;
        b += l * l * f.pick[k].b;
      }
      if (cost < least || (i == 0 && pass == 0)) least = cost, *out = f;
      f.unit = f16_rounded(b > 0 && a > 0 ? (float)(a / b) * per_unit : 0) / per_unit;
    }
  }
}

// Magnitudes and signs. With `even`, the number of negatives per 8 is made even by negating the magnitude that matters
// least.
static void split_signs(const float *x, const float *w, int even, float *mag, uint8_t *signs) {
  for (int g = 0; g < 32; g++) {
    const float *v = x + g * 8;
    int bits = 0, least = 0;
    for (int j = 0; j < 8; j++) {
      mag[g * 8 + j] = fabsf(v[j]);
      bits |= (v[j] < 0) << j;
      if (w[g * 8 + j] * fabsf(v[j]) < w[g * 8 + least] * fabsf(v[least])) least = j;
    }
    if (even && __builtin_popcount((unsigned)bits) % 2) {
      bits ^= 1 << least;
      mag[g * 8 + least] = -mag[g * 8 + least];
    }
    signs[g] = (uint8_t)bits;
  }
}

static void signed_search(const grid *g, const float *x, const float *weights, float per_unit, int even, found *f,
                          uint8_t *signs) {
  float ones[256], mag[256];
  const float *w = weights_or_ones(weights, ones, 256);
  split_signs(x, w, even, mag, signs);
  search(g, mag, w, per_unit, f);
}

static void iq2_xxs_encode(const float *x, const float *weights, uint8_t *restrict b) {
  const grid g = {pg_search_iq2_xxs[0], 256, 8, 32, 16, 0};
  uint8_t signs[32];
  found f;
  signed_search(&g, x, weights, 8, 1, &f, signs);
  store_f16(b, f.unit * 8);
  for (int s = 0; s < 8; s++) {
    uint32_t word = (uint32_t)f.level[s] << 28;
    for (int k = 0; k < 4; k++) {
      b[2 + s * 8 + k] = (uint8_t)f.pick[s].point[k];
      word |= (uint32_t)(signs[s * 4 + k] & 127) << (7 * k);
    }
    store_u32(b + 2 + s * 8 + 4, word);
  }
}

static void iq2_xs_encode(const float *x, const float *weights, uint8_t *restrict b) {
  const grid g = {pg_search_iq2_xs[0], 512, 8, 16, 16, 0};
  uint8_t signs[32];
  found f;
  signed_search(&g, x, weights, 8, 1, &f, signs);
  store_f16(b, f.unit * 8);
  for (int k = 0; k < 32; k++) store_u16(b + 2 + k * 2, (uint16_t)(f.pick[k / 2].point[k % 2] | (signs[k] & 127) << 9));
  for (int s = 0; s < 8; s++) b[66 + s] = (uint8_t)(f.level[2 * s] | f.level[2 * s + 1] << 4);
}

static void iq2_s_encode(const float *x, const float *weights, uint8_t *restrict b) {
  const grid g = {pg_search_iq2_s[0], 1024, 8, 16, 16, 0};
  found f;
  signed_search(&g, x, weights, 8, 0, &f, b + 34);
  store_f16(b, f.unit * 8);
  memset(b + 66, 0, 8);
  for (int k = 0; k < 32; k++) {
    const int point = f.pick[k / 2].point[k % 2];
    b[2 + k] = (uint8_t)point;
    b[66 + k / 4] |= (point >> 8) << (k % 4 * 2);
  }
  for (int s = 0; s < 8; s++) b[74 + s] = (uint8_t)(f.level[2 * s] | f.level[2 * s + 1] << 4);
}

static void iq3_xxs_encode(const float *x, const float *weights, uint8_t *restrict b) {
  const grid g = {pg_search_iq3_xxs[0], 256, 4, 32, 16, 0};
  uint8_t signs[32];
  found f;
  signed_search(&g, x, weights, 4, 1, &f, signs);
  store_f16(b, f.unit * 4);
  for (int k = 0; k < 64; k++) b[2 + k] = (uint8_t)f.pick[k / 8].point[k % 8];
  for (int s = 0; s < 8; s++) {
    uint32_t word = (uint32_t)f.level[s] << 28;
    for (int k = 0; k < 4; k++) word |= (uint32_t)(signs[s * 4 + k] & 127) << (7 * k);
    store_u32(b + 66 + s * 4, word);
  }
}

static void iq3_s_encode(const float *x, const float *weights, uint8_t *restrict b) {
  const grid g = {pg_search_iq3_s[0], 512, 4, 32, 16, 0};
  found f;
  signed_search(&g, x, weights, 1, 0, &f, b + 74);
  store_f16(b, f.unit);
  memset(b + 66, 0, 8);
  for (int k = 0; k < 64; k++) {
    const int point = f.pick[k / 8].point[k % 8];
    b[2 + k] = (uint8_t)point;
    b[66 + k / 8] |= (point >> 8) << (k % 8);
  }
  for (int s = 0; s < 4; s++) b[106 + s] = (uint8_t)(f.level[2 * s] | f.level[2 * s + 1] << 4);
}

static void iq1_s_encode(const float *x, const float *weights, uint8_t *restrict b) {
  const grid g = {pg_search_iq1[0], 2048, 8, 32, 8, 1};
  float ones[256];
  found f;
  search(&g, x, weights_or_ones(weights, ones, 256), 1, &f);
  store_f16(b, f.unit);
  for (int s = 0; s < 8; s++) {
    int word = f.level[s] << 12 | f.pick[s].negative[0] << 15;
    for (int k = 0; k < 4; k++) {
      b[2 + s * 4 + k] = (uint8_t)f.pick[s].point[k];
      word |= (f.pick[s].point[k] >> 8) << (3 * k);
    }
    store_u16(b + 34 + s * 2, (uint16_t)word);
  }
}

static void iq1_m_encode(const float *x, const float *weights, uint8_t *restrict b) {
  const grid g = {pg_search_iq1[0], 2048, 8, 16, 8, 2};
  float ones[256];
  found f;
  search(&g, x, weights_or_ones(weights, ones, 256), 1, &f);
  const int d = pg_f32_to_f16(f.unit);
  memset(b + 32, 0, 16);
  for (int k = 0; k < 32; k++) {
    const pick *p = &f.pick[k / 2];
    b[k] = (uint8_t)p->point[k % 2];
    b[32 + k / 2] |= (p->point[k % 2] >> 8 | p->negative[k % 2] << 3) << (k % 2 * 4);
  }
  for (int i = 0; i < 4; i++) {
    int word = ((d >> (i * 4)) & 15) << 12;
    for (int k = 0; k < 4; k++) word |= f.level[i * 4 + k] << (3 * k);
    store_u16(b + 48 + i * 2, (uint16_t)word);
  }
}

BLOCK_ENCODER(iq1_s, 256, 50)
BLOCK_ENCODER(iq1_m, 256, 56)
BLOCK_ENCODER(iq2_xxs, 256, 66)
BLOCK_ENCODER(iq2_xs, 256, 74)
BLOCK_ENCODER(iq2_s, 256, 82)
BLOCK_ENCODER(iq3_xxs, 256, 98)
BLOCK_ENCODER(iq3_s, 256, 110)
