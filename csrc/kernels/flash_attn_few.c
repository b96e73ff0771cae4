// Attention of at most FEW query rows: dot products along the rows of K, sums of the rows of V (or dot products along
// the rows of a transposed V). Rows are used as they are stored, where registers can load them whole.
#include "flash_attn.h"

enum { DOTS = 4, WITH = 2, SUMS = 8 }; // dot products of so many rows with so many; sums at a time

#define UNROLL _Pragma("GCC unroll 16")

typedef struct rows { // of a block
  const char *data;
  const uint8_t *keys; // which, or NULL: 0, 1, 2 ..
  int64_t nb, type;
  int64_t ahead, bytes; // from a row to where the next block has its bytes
} rows;

PG_INLINE const char *row(const rows *x, int64_t i) { return x->data + (x->keys ? x->keys[i] : i) * x->nb; }

PG_INLINE vf load(const char *p, int64_t i, int64_t type) {
  if (type == PG_F32) return vf_load((const float *)p + i);
  if (type == PG_F16) return vf_load_f16((const uint16_t *)p + i);
  return vf_load_bf16((const uint16_t *)p + i);
}

// Rows of one head lie far apart in a cache, where no hardware prefetcher follows.
PG_INLINE void prefetch(const rows *x, const char *p) {
  for (int64_t o = 0; o < x->bytes; o += 64) __builtin_prefetch(p + x->ahead + o);
}

// to[r * to_ld + i] = from[r * from_ld ..] . row i of x, n_l elements, for n rows of x and R of `from`; with `keep`, to
// itself * keep[r] is added. n is rounded up to a multiple of DOTS.
PG_INLINE void dots(float *to, int64_t to_ld, const float *keep, const float *from, int64_t from_ld, int64_t n_l,
                    const rows *x, int64_t n, int R, int64_t type) {
  for (int64_t i = 0; i < n; i += DOTS) {
    const char *p[DOTS];
    vf acc[WITH][DOTS];
    UNROLL for (int k = 0; k < DOTS; k++) {
      p[k] = row(x, PG_MIN(i + k, n - 1));
      prefetch(x, p[k]);
      UNROLL for (int r = 0; r < R; r++) acc[r][k] = vf_zero();
    }
    for (int64_t l = 0; l < n_l; l += VF_N) {
      vf y[WITH];
      UNROLL for (int r = 0; r < R; r++) y[r] = vf_load(from + r * from_ld + l);
      UNROLL for (int k = 0; k < DOTS; k++) {
        const vf w = load(p[k], l, type);
        UNROLL for (int r = 0; r < R; r++) acc[r][k] = vf_fma(w, y[r], acc[r][k]);
      }
    }
    UNROLL for (int r = 0; r < R; r++) {
      float s[DOTS], *o = to + r * to_ld + i;
      vf_sum4(s, acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
      UNROLL for (int k = 0; k < DOTS; k++) o[k] = keep ? o[k] * keep[r] + s[k] : s[k];
    }
  }
}

// out[r][c..] = out[r][c..] * keep[r] + sum of s[r][i] * row i of v, N registers wide
PG_INLINE void mix_part(float *out, int64_t dvp, const float *keep, const float *s, const rows *v, int64_t n, int64_t c,
                        int R, int N, int64_t type) {
  vf acc[FEW][SUMS];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int k = 0; k < N; k++) acc[r][k] = vf_zero();
  for (int64_t i = 0; i < n; i++) {
    const char *p = row(v, i);
    vf e[FEW];
    if (c == 0) prefetch(v, p);
    UNROLL for (int r = 0; r < R; r++) e[r] = vf_set1(s[r * KEYS + i]);
    UNROLL for (int k = 0; k < N; k++) {
      const vf x = load(p, c + k * VF_N, type);
      UNROLL for (int r = 0; r < R; r++) acc[r][k] = vf_fma(x, e[r], acc[r][k]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int k = 0; k < N; k++) {
    float *o = out + r * dvp + c + k * VF_N;
    vf_store(o, vf_fma(vf_load(o), vf_set1(keep[r]), acc[r][k]));
  }
}

PG_INLINE void mix(float *out, int64_t dvp, const float *keep, const float *s, const rows *v, int64_t n, int R,
                   int64_t type) {
  enum { N = SUMS };
  int64_t c = 0;
  for (; c + N / R * VF_N <= dvp; c += N / R * VF_N) mix_part(out, dvp, keep, s, v, n, c, R, N / R, type);
  for (; c + N / R / 2 * VF_N <= dvp; c += N / R / 2 * VF_N) mix_part(out, dvp, keep, s, v, n, c, R, N / R / 2, type);
  for (; c < dvp; c += VF_N) mix_part(out, dvp, keep, s, v, n, c, R, 1, type);
}

// Functions of their own: inlined into a larger one the sums would not stay in registers.
#define DOTS_OF(R, type)                                                                                               \
  static                                                                                                               \
      __attribute__((noinline)) void dots_##R##_##type(float *to, int64_t to_ld, const float *keep, const float *from, \
                                                       int64_t from_ld, int64_t n_l, const rows *x, int64_t n) {       \
    if (keep)                                                                                                          \
      dots(to, to_ld, keep, from, from_ld, n_l, x, n, R, PG_##type);                                                   \
    else                                                                                                               \
      dots(to, to_ld, NULL, from, from_ld, n_l, x, n, R, PG_##type);                                                   \
  }
#define MIX_OF(R, type)                                                                                                \
  static __attribute__((noinline)) void mix_##R##_##type(float *out, int64_t dvp, const float *keep, const float *s,   \
                                                         const rows *v, int64_t n) {                                   \
    mix(out, dvp, keep, s, v, n, R, PG_##type);                                                                        \
  }
#define WAYS(type)                                                                                                     \
  DOTS_OF(1, type)                                                                                                     \
  DOTS_OF(2, type)                                                                                                     \
  MIX_OF(1, type)                                                                                                      \
  MIX_OF(2, type)                                                                                                      \
  MIX_OF(4, type)                                                                                                      \
  static const ways ways_##type = {{dots_1_##type, dots_2_##type}, {mix_1_##type, mix_2_##type, mix_4_##type}};

typedef struct ways { // by query rows: 1, 2; 1, 2, 4
  void (*dots[2])(float *, int64_t, const float *, const float *, int64_t, int64_t, const rows *, int64_t);
  void (*mix[3])(float *, int64_t, const float *, const float *, const rows *, int64_t);
} ways;
WAYS(F32)
WAYS(F16)
WAYS(BF16)

static const ways *ways_of(int64_t type) {
  return type == PG_F32 ? &ways_F32 : type == PG_F16 ? &ways_F16 : &ways_BF16;
}

static void all_dots(float *to, int64_t to_ld, const float *keep, const float *from, int64_t from_ld, int64_t n_l,
                     const rows *x, int64_t n, int n_q) {
  for (int r = 0; r < n_q; r += WITH)
    ways_of(x->type)->dots[n_q > 1](to + r * to_ld, to_ld, keep ? keep + r : NULL, from + r * from_ld, from_ld, n_l, x,
                                    n);
}

// Scores -> exp(score - top), and what the result so far is multiplied with as the top rises.
static float exponentials(const attention *a, float *s, const float *bias, int n, float *top, float *sum) {
  float old = *top, peak;
  for (int i = 0; i < n && a->cap > 0; i += VF_N) vf_store(s + i, vf_set1(a->cap) * vf_tanh(vf_load(s + i)));
  for (int i = n; i % VF_N; i++) s[i] = -INFINITY;
  vf m = vf_set1(old);
  for (int i = 0; i < n; i += VF_N) {
    vf x = vf_load(s + i);
    if (bias) x += vf_load(bias + i);
    vf_store(s + i, x);
    m = vf_max(x, m);
  }
  peak = *top = vf_hmax(m);
  if (peak == -INFINITY) peak = 0; // nothing visible yet
  vf part = vf_zero();
  for (int i = 0; i < n; i += VF_N) {
    const vf e = vf_exp_below(vf_load(s + i) - vf_set1(peak));
    vf_store(s + i, e);
    part += e;
  }
  const float keep = expf(old - peak);
  *sum = *sum * keep + vf_sum(part);
  return keep;
}

static int is_float(const pg_tensor *x) { return x->type == PG_F32 || x->type == PG_F16 || x->type == PG_BF16; }
static int64_t size_of(const pg_tensor *x) { return x->type == PG_F32 ? 4 : 2; }

// The block's rows as stored, or as f32 in `buf`.
static rows rows_of(const pg_tensor *x, const char *head, const block *b, float *buf, int64_t ld) {
  if (is_float(x) && x->ne[0] == ld)
    return (rows){head + b->first * x->nb[1], b->keys, x->nb[1], x->type, KEYS * x->nb[1], ld * size_of(x)};
  PG_FN(attention_rows)(x, head, b, buf, ld);
  return (rows){(const char *)buf, NULL, ld * 4, PG_F32, 0, 0};
}

static rows columns_of(const pg_tensor *x, const char *head, const block *b, float *buf) {
  const int64_t size = size_of(x);
  if (b->run && b->n % VF_N == 0)
    return (rows){head + (b->first + b->keys[0]) * size, NULL, x->nb[1], x->type, KEYS * size, KEYS * size};
  PG_FN(attention_columns)(x, head, b, buf);
  return (rows){(const char *)buf, NULL, KEYS * 4, PG_F32, 0, 0};
}

void PG_FN(attend_few)(const attention *a, const tile *t, const scratch *w, const state *st, int64_t first,
                       int64_t last) {
  const char *k_head = tile_kv(a->k, t), *v_head = tile_kv(a->v, t);
  memset(w->q, 0, (size_t)(FEW * a->dp) * sizeof(float));
  memset(w->s, 0, FEW * KEYS * sizeof(float));
  memset(w->bias, 0, FEW * KEYS * sizeof(float));
  for (int r = 0; r < t->n; r++)
    for (int64_t c = 0; c < a->d; c++) w->q[r * a->dp + c] = tile_query(a, t, r)[c] * a->scale;
  for (int64_t j = first; j < last; j += KEYS) {
    const block b = tile_block(a, t, j, last, w, KEYS, 1);
    if (!b.n) continue;
    const rows k = rows_of(a->k, k_head, &b, w->kv, a->dp);
    all_dots(w->s, KEYS, NULL, w->q, a->dp, a->dp, &k, b.n, t->n);
    float keep[FEW] = {0};
    for (int r = 0; r < t->n; r++)
      keep[r] = exponentials(a, w->s + r * KEYS, b.biased ? w->bias + r * KEYS : NULL, b.n, &st->top[r], &st->sum[r]);
    if (a->transposed) {
      const rows v = columns_of(a->v, v_head, &b, w->kv);
      all_dots(st->out, a->dvp, keep, w->s, KEYS, (b.n + VF_N - 1) / VF_N * VF_N, &v, a->dv, t->n);
    } else {
      const rows v = rows_of(a->v, v_head, &b, w->kv, a->dvp);
      ways_of(v.type)->mix[t->n == 1 ? 0 : t->n == 2 ? 1 : 2](st->out, a->dvp, keep, w->s, &v, b.n);
    }
  }
}
