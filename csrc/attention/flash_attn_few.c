// Attention of at most FEW query rows: dot products along the rows of K, sums of the rows of V (or dot products along
// the rows of a transposed V). One or two query rows read K and V as they are stored, when rows are whole registers.
#include "attention/flash_attn.h"
#include "simd/units.h"

enum { DIRECT = 2, SUMS = 8, AHEAD = 16 }; // query rows that read K and V as stored; sums at a time; rows to prefetch

typedef struct rows { // of a block
  const char *data;
  const uint8_t *keys; // numbers of the rows; NULL: 0, 1, 2 ..
  int64_t nb, type;
  const char *ahead; // memory to prefetch while row 0 .. is read
  int64_t ahead_nb, bytes;
} rows;

PG_INLINE const char *row(const rows *x, int64_t i) { return x->data + (x->keys ? x->keys[i] : i) * x->nb; }

// Prefetch in software: rows of one head lie so far apart in a cache that the hardware does not follow them.
PG_INLINE void prefetch(const rows *x, int64_t i) {
  for (int64_t o = 0; o < x->bytes; o += 64) __builtin_prefetch(x->ahead + i * x->ahead_nb + o);
}

PG_INLINE void put(float *to, const float *keep, int64_t r, float sum) { *to = keep ? *to * keep[r] + sum : sum; }

// to[r * to_ld + i] = from[r * from_ld ..] . row i of x, n_l elements, for n rows of x and R of `from`; with `keep`, to
// itself * keep[r] is added. n is rounded up to a multiple of 4.
PG_INLINE void dots(float *to, int64_t to_ld, const float *keep, const float *from, int64_t from_ld, int64_t n_l,
                    const rows *x, int64_t n, int R, int64_t type) {
  const int n_x = R == FEW ? 2 : 4; // rows of x at a time
  for (int64_t i = 0; i < n; i += n_x) {
    const char *p[4];
    vf acc[4][FEW];
    UNROLL for (int k = 0; k < n_x; k++) {
      p[k] = row(x, PG_MIN(i + k, n - 1));
      prefetch(x, i + k);
      UNROLL for (int r = 0; r < R; r++) acc[k][r] = vf_zero();
    }
    for (int64_t l = 0; l < n_l; l += VF_N) {
      vf y[FEW];
      UNROLL for (int r = 0; r < R; r++) y[r] = vf_load(from + r * from_ld + l);
      UNROLL for (int k = 0; k < n_x; k++) {
        const vf w = float_load(p[k], l, type);
        UNROLL for (int r = 0; r < R; r++) acc[k][r] = vf_fma(w, y[r], acc[k][r]);
      }
    }
    float s[4];
    if (R == FEW) {
      UNROLL for (int k = 0; k < n_x; k++) {
        vf_sum4(s, acc[k][0], acc[k][1], acc[k][2], acc[k][3]);
        UNROLL for (int r = 0; r < R; r++) put(to + r * to_ld + i + k, keep, r, s[r]);
      }
    } else {
      UNROLL for (int r = 0; r < R; r++) {
        vf_sum4(s, acc[0][r], acc[1][r], acc[2][r], acc[3][r]);
        UNROLL for (int k = 0; k < n_x; k++) put(to + r * to_ld + i + k, keep, r, s[k]);
      }
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
    if (c == 0) prefetch(v, i);
    UNROLL for (int r = 0; r < R; r++) e[r] = vf_set1(s[r * KEYS + i]);
    UNROLL for (int k = 0; k < N; k++) {
      const vf x = float_load(p, c + k * VF_N, type);
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

// Not inlined: in a larger function the sums would not stay in registers.
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
  DOTS_OF(4, type)                                                                                                     \
  MIX_OF(1, type)                                                                                                      \
  MIX_OF(2, type)                                                                                                      \
  MIX_OF(4, type)                                                                                                      \
  static const ways ways_##type = {{dots_1_##type, dots_2_##type, dots_4_##type},                                      \
                                   {mix_1_##type, mix_2_##type, mix_4_##type}};

typedef struct ways { // by query rows: 1, 2, 4
  void (*dots[3])(float *, int64_t, const float *, const float *, int64_t, int64_t, const rows *, int64_t);
  void (*mix[3])(float *, int64_t, const float *, const float *, const rows *, int64_t);
} ways;
WAYS(F32)
WAYS(F16)
WAYS(BF16)

static const ways *ways_of(int64_t type) {
  return type == PG_F32 ? &ways_F32 : type == PG_F16 ? &ways_F16 : &ways_BF16;
}

// Turn scores into exp(score - top). Returns the factor for the result so far, because `top` may have risen.
static float exponentials(const attention *a, float *s, const float *bias, int n, float *top, float *sum) {
  float old = *top, peak;
  for (int i = 0; i < n && a->cap > 0; i += VF_N) vf_store(s + i, vf_set1(a->cap) * vf_tanh(vf_load(s + i)));
  for (int i = n; i % VF_N; i++) s[i] = -INFINITY;
  vf m = vf_set1(old);
  for (int i = 0; i < n; i += VF_N) {
    vf x = vf_load(s + i);
    if (bias) x = vf_masked(x + vf_load(bias + i), vf_load(bias + i));
    vf_store(s + i, x);
    m = vf_max(x, m);
  }
  peak = *top = vf_hmax(m);
  if (peak == -INFINITY) peak = 0; // no key was visible yet
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

// The block's rows as stored, or as f32 in `buf`.
static rows rows_of(const pg_tensor *x, const char *head, const block *b, int direct, float *buf, int64_t ld) {
  const char *first = head + b->first * x->nb[1];
  const int64_t nb = x->nb[1], bytes = x->ne[0] / pg_block_size(x->type) * x->nb[0];
  if (direct && is_float(x) && x->ne[0] == ld)
    return (rows){first, b->keys, nb, x->type, first + AHEAD * nb, nb, bytes};
  PG_FN(attention_rows)(x, head, b, buf, ld);
  return (rows){(const char *)buf, NULL, ld * 4, PG_F32, first + KEYS * nb, nb, bytes};
}

static rows columns_of(const pg_tensor *x, const char *head, const block *b, int direct, float *buf) {
  const int64_t nb = x->nb[1], bytes = KEYS * x->nb[0];
  const char *next = head + (b->first + KEYS) * x->nb[0];
  if (direct && b->run && b->n % VF_N == 0)
    return (rows){head + (b->first + b->keys[0]) * x->nb[0], NULL, nb, x->type, next, nb, bytes};
  PG_FN(attention_columns)(x, head, b, buf);
  return (rows){(const char *)buf, NULL, KEYS * 4, PG_F32, next, nb, bytes};
}

void PG_FN(attend_few)(const attention *a, const tile *t, const scratch *w, const state *st, int64_t first,
                       int64_t last) {
  const char *k_head = tile_kv(a->k, t), *v_head = tile_kv(a->v, t);
  const int way = t->n == 1 ? 0 : t->n == 2 ? 1 : 2, direct = t->n <= DIRECT;
  memset(w->q, 0, (size_t)(FEW * a->dp) * sizeof(float));
  memset(w->s, 0, FEW * KEYS * sizeof(float));
  memset(w->bias, 0, FEW * KEYS * sizeof(float));
  for (int r = 0; r < t->n; r++)
    for (int64_t c = 0; c < a->d; c++) w->q[r * a->dp + c] = tile_query(a, t, r)[c] * a->scale;
  for (int64_t j = first; j < last; j += KEYS) {
    const block b = tile_block(a, t, j, last, w, KEYS, 1);
    if (!b.n) continue;
    const rows k = rows_of(a->k, k_head, &b, direct, w->kv, a->dp);
    ways_of(k.type)->dots[way](w->s, KEYS, NULL, w->q, a->dp, a->dp, &k, b.n);
    float keep[FEW] = {0};
    for (int r = 0; r < t->n; r++)
      keep[r] = exponentials(a, w->s + r * KEYS, b.biased ? w->bias + r * KEYS : NULL, b.n, &st->top[r], &st->sum[r]);
    if (a->transposed) {
      const rows v = columns_of(a->v, v_head, &b, direct, w->kv);
      ways_of(v.type)->dots[way](st->out, a->dvp, keep, w->s, KEYS, (b.n + VF_N - 1) / VF_N * VF_N, &v, a->dv);
    } else {
      const rows v = rows_of(a->v, v_head, &b, direct, w->kv, a->dvp);
      ways_of(v.type)->mix[way](st->out, a->dvp, keep, w->s, &v, b.n);
    }
  }
}
