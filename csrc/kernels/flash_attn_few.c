// Attention of at most FEW query rows: dot products along the rows of K and V, read from the cache as they are stored.
#include "flash_attn.h"

enum { WIDE = VF_N == 16 ? 4 : 2 }; // registers of a row of v at a time, for each query row

PG_INLINE vf load(const char *row, int64_t c, int64_t type) {
  if (type == PG_F32) return vf_load((const float *)row + c);
  if (type == PG_F16) return vf_load_f16((const uint16_t *)row + c);
  return vf_load_bf16((const uint16_t *)row + c);
}

typedef struct rows { // rows of a block
  const char *data;
  int64_t nb, bytes, type; // bytes: of a row, about
} rows;

// Rows lie far apart in a cache (other heads lie between them), where no hardware prefetcher follows.
PG_INLINE void prefetch(const rows *x, int64_t i) {
  for (int64_t c = 0; c < x->bytes; c += 64) __builtin_prefetch(x->data + i * x->nb + c);
}

// s[r][i] = q[r] . row keys[i] of k, R rows of q
PG_INLINE void dots(float *s, const float *q, int64_t dp, const rows *k, const uint8_t *keys, int n_keys,
                    const rows *next, int R, int64_t type) {
  for (int i = 0; i < n_keys; i++) {
    const char *row = k->data + keys[i] * k->nb;
    prefetch(next, i);
    vf acc[FEW];
    for (int r = 0; r < R; r++) acc[r] = vf_zero();
    for (int64_t c = 0; c < dp; c += VF_N) {
      const vf x = load(row, c, type);
      for (int r = 0; r < R; r++) acc[r] = vf_fma(x, vf_load(q + r * dp + c), acc[r]);
    }
    for (int r = 0; r < R; r++) s[r * KEYS + i] = vf_sum(acc[r]);
  }
}

// out[r][c..] = out[r][c..] * keep[r] + sum of s[r][i] * row keys[i] of v, N registers wide
PG_INLINE void mix_part(float *out, int64_t dvp, const float *keep, const float *s, const rows *v, const uint8_t *keys,
                        int n_keys, const rows *next, int64_t c, int R, int N, int64_t type) {
  vf acc[FEW][WIDE];
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) acc[r][n] = vf_zero();
  for (int i = 0; i < n_keys; i++) {
    const char *row = v->data + keys[i] * v->nb;
    if (c == 0) prefetch(next, i);
    for (int n = 0; n < N; n++) {
      const vf x = load(row, c + n * VF_N, type);
      for (int r = 0; r < R; r++) acc[r][n] = vf_fma(x, vf_set1(s[r * KEYS + i]), acc[r][n]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) {
      float *o = out + r * dvp + c + n * VF_N;
      vf_store(o, vf_fma(vf_load(o), vf_set1(keep[r]), acc[r][n]));
    }
}

PG_INLINE void mix(float *out, int64_t dvp, const float *keep, const float *s, const rows *v, const uint8_t *keys,
                   int n_keys, const rows *next, int R, int64_t type) {
  int64_t c = 0;
  for (; c + WIDE * VF_N <= dvp; c += WIDE * VF_N) mix_part(out, dvp, keep, s, v, keys, n_keys, next, c, R, WIDE, type);
  for (; c < dvp; c += VF_N) mix_part(out, dvp, keep, s, v, keys, n_keys, next, c, R, 1, type);
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

// Calls f with the number of rows and the type as constants.
#define BY_TYPE(f, R, type, ...)                                                                                       \
  do {                                                                                                                 \
    if ((type) == PG_F32)                                                                                              \
      f(__VA_ARGS__, R, PG_F32);                                                                                       \
    else if ((type) == PG_F16)                                                                                         \
      f(__VA_ARGS__, R, PG_F16);                                                                                       \
    else                                                                                                               \
      f(__VA_ARGS__, R, PG_BF16);                                                                                      \
  } while (0)
#define BY_ROWS(f, R, type, ...)                                                                                       \
  do {                                                                                                                 \
    if ((R) == 1)                                                                                                      \
      BY_TYPE(f, 1, type, __VA_ARGS__);                                                                                \
    else if ((R) == 2)                                                                                                 \
      BY_TYPE(f, 2, type, __VA_ARGS__);                                                                                \
    else                                                                                                               \
      BY_TYPE(f, FEW, type, __VA_ARGS__);                                                                              \
  } while (0)

static rows stored(const pg_tensor *x, const tile *t, int64_t j) {
  const int64_t size = x->type == PG_F32 ? 4 : x->type == PG_F16 || x->type == PG_BF16 ? 2 : 1;
  return (rows){tile_kv(x, t) + j * x->nb[1], x->nb[1], x->ne[0] * size, x->type};
}

// The rows as stored, where loads can read them whole; else as f32 in `buf`, which replaces `keys` by 0, 1, 2 ..
static rows readable(rows x, int64_t n, pg_to_f32 to_f32, float *buf, int64_t padded, uint8_t *keys, int n_keys) {
  if (n == padded && (x.type == PG_F32 || x.type == PG_F16 || x.type == PG_BF16)) return x;
  for (int i = 0; i < n_keys; i++) {
    to_f32(x.data + keys[i] * x.nb, buf + i * padded, n);
    for (int64_t c = n; c < padded; c++) buf[i * padded + c] = 0;
    keys[i] = (uint8_t)i;
  }
  return (rows){(const char *)buf, padded * 4, padded * 4, PG_F32};
}

void PG_FN(attend_few)(const attention *a, const tile *t, const scratch *w, const state *st, int64_t first,
                       int64_t last) {
  const int R = t->n == 3 ? FEW : t->n;
  memset(w->q, 0, (size_t)(FEW * a->dp) * sizeof(float));
  memset(w->s, 0, FEW * KEYS * sizeof(float));
  memset(w->bias, 0, FEW * KEYS * sizeof(float));
  for (int r = 0; r < t->n; r++)
    for (int64_t c = 0; c < a->d; c++) w->q[r * a->dp + c] = tile_query(a, t, r)[c] * a->scale;
  for (int64_t j = first; j < last; j += KEYS) {
    uint8_t keys[KEYS], keys_v[KEYS];
    int n_keys;
    const enum visibility seen = tile_mask(a, t, j, (int)PG_MIN(KEYS, last - j), w, KEYS, 1, keys, &n_keys);
    if (seen == HIDDEN) continue;
    memcpy(keys_v, keys, sizeof keys);
    const rows v0 = stored(a->v, t, j),
               k1 = stored(a->k, t, j + KEYS); // k1: what comes next (a prefetch past the end is no access)
    const rows k = readable(stored(a->k, t, j), a->d, a->k_to_f32, w->kv, a->dp, keys, n_keys);
    BY_ROWS(dots, R, k.type, w->s, w->q, a->dp, &k, keys, n_keys, &v0);
    float keep[FEW] = {0};
    for (int r = 0; r < t->n; r++)
      keep[r] =
          exponentials(a, w->s + r * KEYS, seen == MIXED ? w->bias + r * KEYS : NULL, n_keys, &st->top[r], &st->sum[r]);
    const rows v = readable(v0, a->dv, a->v_to_f32, w->kv, a->dvp, keys_v, n_keys);
    BY_ROWS(mix, R, v.type, st->out, a->dvp, keep, w->s, &v, keys_v, n_keys, &k1);
  }
}
