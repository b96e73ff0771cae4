// rope: rotates pairs of the first n_dims elements of every row by angles that grow with the token's position.
// Angles and their sine and cosine are double; one table per token serves all its heads.
#include "rows.h"

enum { N_DIMS, MODE, N_CTX_ORIG, FREQ_BASE, FREQ_SCALE, EXT_FACTOR, ATTN_FACTOR, BETA_FAST, BETA_SLOW }; // parameters
enum { MODE_NEOX = 2 };                                                                                  // else NORM

typedef struct table {
  int64_t n;    // dimensions that are rotated
  int neox;     // pairs are (i, i + n/2), else (2i, 2i + 1)
  double sign;  // of the sine: -1 rotates back
  double scale; // of sine and cosine
  double *freq; // [n/2] angle per position
  float *cs;    // [n] neox: n/2 cosines; norm: the cosine of each pair twice
  float *sn;    // [n] neox: n/2 sines; norm: the sine of each pair twice, first negated
  float *row;   // [ne0] a row that is not dense f32
} table;

static int64_t slot_size(const pg_task *t) {
  const int64_t n = (int64_t)t->param[N_DIMS];
  return (n / 2 * 8 + n * 8 + t->dst.ne[0] * 4 + 63) / 64 * 64;
}

int64_t PG_FN(rope_work)(const pg_task *t, int nth) { return slot_size(t) * nth; }

// The pair that turns n_rot times within n_ctx positions (YaRN, arXiv 2309.00071, section 3.2).
static double corr_dim(double n_dims, double n_ctx, double n_rot, double base) {
  return n_dims * log(n_ctx / (n_rot * 2 * 3.141592653589793)) / (2 * log(base));
}

// Angle per position of every pair: base^(-2i/n) / factor; YaRN keeps fast pairs and slows the others by freq_scale.
static void frequencies(table *tb, const pg_task *t) {
  const double *p = t->param, n = p[N_DIMS], ext = p[EXT_FACTOR];
  const pg_tensor *c = &t->src[2];
  const double step = pow(p[FREQ_BASE], -2 / n);
  double low = 0, high = 0, f = 1;
  tb->scale = p[ATTN_FACTOR];
  if (ext != 0) {
    low = fmax(0, floor(corr_dim(n, p[N_CTX_ORIG], p[BETA_FAST], p[FREQ_BASE])));
    high = fmin(n - 1, ceil(corr_dim(n, p[N_CTX_ORIG], p[BETA_SLOW], p[FREQ_BASE])));
    tb->scale *= 1 + 0.1 * log(1 / p[FREQ_SCALE]);
  }
  for (int64_t i = 0; i < tb->n / 2; i++, f *= step) {
    const double kept = ext * (1 - fmin(1, fmax(0, ((double)i - low) / fmax(0.001, high - low))));
    const double factor = c->data ? *(const float *)(c->data + i * c->nb[0]) : 1;
    tb->freq[i] = f / factor * (ext != 0 ? p[FREQ_SCALE] * (1 - kept) + kept : p[FREQ_SCALE]);
  }
}

// Sine and cosine in a form that compilers vectorise: k quarter turns are taken off in two parts, then Taylor series.
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

static void fill_table(const table *tb, int32_t position) {
  const double ms = tb->scale * tb->sign, mc = tb->scale;
  const int64_t half = tb->n / 2;
  double s, c;
  if (tb->neox) {
    for (int64_t i = 0; i < half; i++) {
      sin_cos(position * tb->freq[i], &s, &c);
      tb->cs[i] = (float)(c * mc), tb->sn[i] = (float)(s * ms);
    }
  } else {
    for (int64_t i = 0; i < half; i++) {
      sin_cos(position * tb->freq[i], &s, &c);
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
  if (tb->neox) {
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
  const pg_tensor *y = &t->dst, *a = &t->src[0], *positions = &t->src[1];
  const int64_t n0 = y->ne[0];
  table tb = {.n = (int64_t)t->param[N_DIMS], .neox = t->param[MODE] == MODE_NEOX, .sign = sign};
  tb.freq = (double *)(t->work + slot_size(t) * ith);
  tb.cs = (float *)(tb.freq + tb.n / 2);
  tb.sn = tb.cs + tb.n;
  tb.row = tb.sn + tb.n;
  const int dense = pg_is_f32_row(y) && pg_is_f32_row(a);
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  if (r.first == r.last) return PG_OK;
  frequencies(&tb, t);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    if (ir == r.first || i.i1 == 0) fill_table(&tb, *(const int32_t *)(positions->data + i.i2 * positions->nb[0]));
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    const char *pa = pg_row_at(a, i.i1, i.i2, i.i3);
    if (dense) {
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
