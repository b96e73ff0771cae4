// rope: rotate pairs of the first n_dims elements of every row by angles that grow with the token's position, or with
// one of its four positions (sections).
// Angles, sines and cosines are double; all heads of a token use the same table of them.
// With a weight, rows (dense f32) are normed first: rms_norm(row) * weight.
#include "simd/rms.h"
#include "simd/rows.h"

enum { N_DIMS, MODE, N_CTX_ORIG, FREQ_BASE, FREQ_SCALE, EXT_FACTOR, ATTN_FACTOR, BETA_FAST, BETA_SLOW, SECTIONS };
enum { NORM = 0, NEOX = 2, MROPE = 8, VISION = 24, IMROPE = 40, POSITIONS = 4 }; // modes

static const double FAR = 0x1p31; // sin_cos takes angles up to this; only extreme positions reach beyond

typedef struct table {
  int64_t n;      // dimensions that are rotated
  int mode;       // NORM: pairs are (2i, 2i + 1), else (i, i + n/2)
  double sign;    // of the sine: -1 rotates back
  double scale;   // of sine and cosine
  double fastest; // of freq, without its sign
  double *freq;   // [n/2] angle per position
  double *angle;  // [n/2]
  float *cs;      // [n] norm: the cosine of each pair twice; else n/2 cosines
  float *sn;      // [n] norm: the sine of each pair twice, first negated; else n/2 sines
  float *row;     // [ne0] a row that is not dense f32
  uint8_t *axis;  // [n/2] which of its token's positions a pair turns by
} table;

static int64_t n_rotated(const pg_task *t) { return (int64_t)t->param[N_DIMS] * (t->param[MODE] == VISION ? 2 : 1); }

static int64_t slot_size(const pg_task *t) {
  const int64_t n = n_rotated(t);
  return (n / 2 * (8 + 8 + 1) + n * 8 + t->dst.ne[0] * 4 + 63) / 64 * 64;
}

int64_t PG_FN(rope_work)(const pg_task *t, int nth) { return pg_times(slot_size(t), nth); }

// The pair that turns n_rot times within n_ctx positions (YaRN, arXiv 2309.00071, section 3.2).
static double corr_dim(double n_dims, double n_ctx, double n_rot, double base) {
  return n_dims * log(n_ctx / (n_rot * 2 * 3.141592653589793)) / (2 * log(base));
}

// Angle per position of every pair: base^(-2i/n) / factor; YaRN keeps fast pairs and slows the others by freq_scale.
static void frequencies(table *tb, const pg_task *t) {
  const double *p = t->param, n = p[N_DIMS], ext = p[EXT_FACTOR];
  const pg_tensor *c = &t->src[PG_ROPE_FACTORS];
  const double step = pow(p[FREQ_BASE], -2 / n);
  double low = 0, high = 0, f = 1;
  tb->scale = p[ATTN_FACTOR];
  if (ext != 0) {
    low = fmax(0, floor(corr_dim(n, p[N_CTX_ORIG], p[BETA_FAST], p[FREQ_BASE])));
    high = fmin(n - 1, ceil(corr_dim(n, p[N_CTX_ORIG], p[BETA_SLOW], p[FREQ_BASE])));
    tb->scale *= 1 + 0.1 * log(1 / p[FREQ_SCALE]);
  }
  int64_t sections[POSITIONS], sector = 0;
  for (int k = 0; k < POSITIONS; k++) sections[k] = (int64_t)p[SECTIONS + k];
  for (int64_t i = 0, axis = 0; i < tb->n / 2; i++, f *= step) {
    if (tb->mode == IMROPE) {
      axis = sector % 3;
      tb->axis[i] = (uint8_t)(sector < 3 * sections[axis] ? axis : 3);
      sector = (sector + 1) % (sections[0] + sections[1] + sections[2] + sections[3]);
    } else if (tb->mode >= MROPE) {
      for (; sector == sections[axis]; axis = (axis + 1) % POSITIONS) sector = 0;
      if (tb->mode == VISION && sector == 0) f = 1;
      tb->axis[i] = (uint8_t)axis;
      sector++;
    }
    const double kept = ext * (1 - fmin(1, fmax(0, ((double)i - low) / fmax(0.001, high - low))));
    const double factor = c->data ? *(const float *)(c->data + i * c->nb[0]) : 1;
    tb->freq[i] = f / factor * (ext != 0 ? p[FREQ_SCALE] * (1 - kept) + kept : p[FREQ_SCALE]);
    tb->fastest = fmax(tb->fastest, fabs(tb->freq[i]));
  }
}

// Sine and cosine for |x| <= FAR, in a form that compilers vectorise: subtract k quarter turns in two parts, then use
// Taylor series.
PG_INLINE void sin_cos(double x, double *s, double *c) {
  const double magic = 0x1.8p52, shifted = x * 0.63661977236758134 + magic, k = shifted - magic;
  const double r = (x - k * 0x1.921fb544p0) - k * 0x1.0b4611a626331p-34, z = r * r;
  int64_t q;
  memcpy(&q, &shifted, sizeof q); // its low bits are those of k
  const double s_tail = 1.0 / 362880 + z * (-1.0 / 39916800 + z * (1.0 / 6227020800));
  const double ps = r + r * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * s_tail)));
  const double c_tail = 1.0 / 40320 + z * (-1.0 / 3628800 + z * (1.0 / 479001600));
  const double pc = 1 + z * (-1.0 / 2 + z * (1.0 / 24 + z * (-1.0 / 720 + z * c_tail)));
  const double vs = q & 1 ? pc : ps, vc = q & 1 ? ps : pc;
  *s = q & 2 ? -vs : vs;
  *c = (q + 1) & 2 ? -vc : vc;
}

static void fill_table(const table *tb, const pg_tensor *positions, int64_t token, int64_t n_tokens) {
  const double ms = tb->scale * tb->sign, mc = tb->scale;
  const int64_t half = tb->n / 2, nb = positions->nb[0];
  int32_t at[POSITIONS] = {0};
  for (int k = 0; k < (tb->mode >= MROPE ? POSITIONS : 1); k++)
    at[k] = *(const int32_t *)(positions->data + (token + k * n_tokens) * nb);
  if (tb->mode >= MROPE) {
    for (int64_t i = 0; i < half; i++) tb->angle[i] = at[tb->axis[i]] * tb->freq[i];
  } else {
    for (int64_t i = 0; i < half; i++) tb->angle[i] = at[0] * tb->freq[i];
  }
  double s, c, most = 0;
  for (int k = 0; k < POSITIONS; k++) most = fmax(most, fabs((double)at[k]));
  if (tb->fastest * most > FAR) { // libm removes whole turns
    for (int64_t i = 0; i < half; i++)
      if (fabs(tb->angle[i]) > FAR) tb->angle[i] = atan2(sin(tb->angle[i]), cos(tb->angle[i]));
  }
  if (tb->mode != NORM) {
    for (int64_t i = 0; i < half; i++) {
      sin_cos(tb->angle[i], &s, &c);
      tb->cs[i] = (float)(c * mc), tb->sn[i] = (float)(s * ms);
    }
  } else {
    for (int64_t i = 0; i < half; i++) {
      sin_cos(tb->angle[i], &s, &c);
      tb->cs[2 * i] = tb->cs[2 * i + 1] = (float)(c * mc);
      tb->sn[2 * i] = (float)(s * -ms), tb->sn[2 * i + 1] = (float)(s * ms);
    }
  }
}

// y may be x.
static void rotate(const table *tb, float *y, const float *x) {
  const int64_t n = tb->n, half = n / 2;
  const float *cs = tb->cs, *sn = tb->sn;
  int64_t i = 0;
  if (tb->mode != NORM) {
    for (; i + VF_N <= half; i += VF_N) {
      const vf a = vf_load(x + i), b = vf_load(x + half + i), c = vf_load(cs + i), s = vf_load(sn + i);
      vf_store(y + i, vf_sub(vf_mul(a, c), vf_mul(b, s)));
      vf_store(y + half + i, vf_fma(a, s, vf_mul(b, c)));
    }
    for (; i < half; i++) {
      const float a = x[i], b = x[half + i];
      y[i] = a * cs[i] - b * sn[i];
      y[half + i] = a * sn[i] + b * cs[i];
    }
  } else {
    for (; i + VF_N <= n; i += VF_N) {
      const vf a = vf_load(x + i);
      vf_store(y + i, vf_fma(vf_swap_pairs(a), vf_load(sn + i), vf_mul(a, vf_load(cs + i))));
    }
    for (; i < n; i += 2) {
      const float a = x[i], b = x[i + 1];
      y[i] = a * cs[i] + b * sn[i];
      y[i + 1] = a * sn[i + 1] + b * cs[i + 1];
    }
  }
}

static int rope(const pg_task *t, int ith, int nth, double sign) {
  const pg_tensor *y = &t->dst, *a = &t->src[PG_ROPE_X], *positions = &t->src[PG_ROPE_POSITIONS];
  const int64_t n0 = y->ne[0];
  table tb = {.n = n_rotated(t), .mode = (int)t->param[MODE], .sign = sign};
  tb.freq = (double *)(t->work + slot_size(t) * ith);
  tb.angle = tb.freq + tb.n / 2;
  tb.cs = (float *)(tb.angle + tb.n / 2);
  tb.sn = tb.cs + tb.n;
  tb.row = tb.sn + tb.n;
  tb.axis = (uint8_t *)(tb.row + n0);
  const int dense = pg_is_f32_row(y) && pg_is_f32_row(a);
  const float *norm = (const float *)t->src[PG_ROPE_WEIGHT].data;
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  if (r.first == r.last) return PG_OK;
  frequencies(&tb, t);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    if (ir == r.first || i.i1 == 0) fill_table(&tb, positions, i.i2, y->ne[2]);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    const char *pa = pg_row_at(a, i.i1, i.i2, i.i3);
    if (norm) {
      const float *x = (const float *)pa;
      float *to = dense ? (float *)py : tb.row;
      pg_scale_mul(to, x, pg_rms_scale(x, n0, t->param[PG_ROPE_EPS]), norm, n0);
      rotate(&tb, to, to);
      if (!dense) pg_put_f32(y, py, 0, to, n0);
    } else if (dense) {
      rotate(&tb, (float *)py, (const float *)pa);
      if (py != pa) memcpy(py + tb.n * 4, pa + tb.n * 4, (n0 - tb.n) * 4);
    } else {
      pg_get_f32(tb.row, a, pa, 0, n0);
      rotate(&tb, tb.row, tb.row);
      pg_put_f32(y, py, 0, tb.row, n0);
    }
  }
  return PG_OK;
}

int PG_FN(rope_any)(const pg_task *t, int ith, int nth) { return rope(t, ith, nth, 1); }
int PG_FN(rope_back_any)(const pg_task *t, int ith, int nth) { return rope(t, ith, nth, -1); }
