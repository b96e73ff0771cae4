// Attention of many query rows. Lanes are query rows: scores, maxima and sums need no operation across lanes, and both
// products (K with q, V with the weights) are the same one: broadcast an element of K or V, multiply with rows in
// lanes.
#include "flash_attn.h"
#include "units.h"

// Result rows at a time, for one and two registers of lanes: as many sums as the registers hold.
enum { BATCH_1 = VF_N == 16 ? 16 : 8, BATCH_2 = VF_N == 16 ? 12 : VF_N == 8 ? 6 : 4, PART = 4 };

// One factor of a product: element (i, l) is at i * i_step + l * l_step.
typedef struct factor {
  const float *data;
  int64_t i_step, l_step;
} factor;

// out[i][lanes] = out[i][lanes] * keep[lanes] + sum over l < n_l of a(i, l) * b[l][lanes]; NV registers of lanes, I
// rows. keep NULL: out is only written.
PG_INLINE void product_part(float *out, const float *keep, factor a, const float *b, int64_t n_l, int I, int NV) {
  const int64_t ld = NV * VF_N;
  const float *p[4]; // four rows each: few addresses
  vf acc[16][2];
  UNROLL for (int i = 0; i < I; i++) UNROLL for (int v = 0; v < NV; v++) acc[i][v] = vf_zero();
  UNROLL for (int i = 0; i < I; i += 4) p[i / 4] = a.data + i * a.i_step;
  for (int64_t l = 0; l < n_l; l++, b += ld) {
    vf x[2];
    UNROLL for (int v = 0; v < NV; v++) x[v] = vf_load(b + v * VF_N);
    UNROLL for (int i = 0; i < I; i++) {
      const vf y = vf_set1(p[i / 4][i % 4 * a.i_step]);
      UNROLL for (int v = 0; v < NV; v++) acc[i][v] = vf_fma(y, x[v], acc[i][v]);
    }
    UNROLL for (int i = 0; i < I; i += 4) p[i / 4] += a.l_step;
  }
  UNROLL for (int i = 0; i < I; i++) UNROLL for (int v = 0; v < NV; v++) {
    float *o = out + i * ld + v * VF_N;
    vf_store(o, keep ? vf_fma(vf_load(o), vf_load(keep + v * VF_N), acc[i][v]) : acc[i][v]);
  }
}

// Functions of their own: inlined into a larger one the sums would not stay in registers.
#define PRODUCT(name, ...)                                                                                             \
  static __attribute__((noinline)) void name(float *out, const float *keep, const float *a, int64_t step,              \
                                             const float *b, int64_t n_l) {                                            \
    product_part(out, keep, __VA_ARGS__);                                                                              \
  }
#define ALONG (factor){a, step, 1}, b, n_l
#define ACROSS (factor){a, 1, step}, b, n_l
PRODUCT(along_1, ALONG, BATCH_1, 1)
PRODUCT(along_2, ALONG, BATCH_2, 2)
PRODUCT(along_1_part, ALONG, PART, 1)
PRODUCT(along_2_part, ALONG, PART, 2)
PRODUCT(across_1, ACROSS, BATCH_1, 1)
PRODUCT(across_2, ACROSS, BATCH_2, 2)
PRODUCT(across_1_part, ACROSS, PART, 1)
PRODUCT(across_2_part, ACROSS, PART, 2)

// What to fetch into the caches in the course of a product: the next block of K or V. All at once it would have to wait
// for memory, and no hardware prefetcher follows the rows of one head, which lie far apart.
typedef struct fetch {
  const char *data;
  int64_t n_rows, nb, bytes, done;
} fetch;

// The block of x that begins at `key`.
static fetch block_at(const pg_tensor *x, int transposed, const char *head, int64_t key) {
  const int64_t row = x->ne[0] / pg_block_size(x->type) * x->nb[0];
  if (transposed) return (fetch){head + key * x->nb[0], x->ne[1], x->nb[1], KEYS * x->nb[0], 0};
  return (fetch){head + key * x->nb[1], KEYS, x->nb[1], row, 0};
}

// What comes after the block at `key`. Rows of a transposed v are fetched two blocks at a time: half of them in the
// course of each.
static fetch next_v(const attention *a, const char *head, int64_t key) {
  if (!a->transposed) return block_at(a->v, 0, head, key + KEYS);
  const int64_t odd = key / KEYS % 2, half = a->dv / 2;
  fetch f = block_at(a->v, 1, head + odd * half * a->v->nb[1], key + (2 - odd) * KEYS);
  f.n_rows = odd ? a->dv - half : half;
  f.bytes *= 2;
  return f;
}

// Its rows in proportion, when i of n results are on their way.
PG_INLINE void fetch_up_to(fetch *f, int64_t i, int64_t n) {
  for (; f->done * n < f->n_rows * i; f->done++)
    for (int64_t o = 0; o < f->bytes; o += 64) __builtin_prefetch(f->data + f->done * f->nb + o);
}

// `along`: the sum runs along the rows of a, which lie `step` apart; else across them. Results are made for n_i rounded
// up to a multiple of PART, which the buffers are.
PG_INLINE void product(float *out, const float *keep, const float *a, int along, int64_t step, const float *b,
                       int64_t n_i, int64_t n_l, fetch f, int NV) {
  const int64_t batch = NV == 1 ? BATCH_1 : BATCH_2, ld = NV * VF_N;
  n_i = (n_i + PART - 1) / PART * PART;
  for (int64_t i = 0, n; i < n_i; i += n) {
    const int64_t rest = n_i - i;
    n = rest >= batch && (batch % PART == 0 || rest != 2 * PART) ? batch : PART;
    const float *p = a + (along ? i * step : i);
    float *o = out + i * ld;
    fetch_up_to(&f, i + n, n_i);
    if (n == batch)
      (along ? NV == 1 ? along_1 : along_2 : NV == 1 ? across_1 : across_2)(o, keep, p, step, b, n_l);
    else
      (along     ? NV == 1 ? along_1_part : along_2_part
       : NV == 1 ? across_1_part
                 : across_2_part)(o, keep, p, step, b, n_l);
  }
}

// Scores -> exp(score - top); keep: what the results so far are multiplied with as the tops rise.
PG_INLINE void exponentials(const attention *a, float *s, const float *bias, int n, const state *st, float *keep,
                            int NV) {
  const int64_t ld = NV * VF_N;
  for (int64_t v = 0; v < ld; v += VF_N) {
    const vf old = vf_load(st->top + v);
    vf top = old;
    for (int i = 0; i < n; i++) {
      vf x = vf_load(s + i * ld + v);
      if (a->cap > 0) x = vf_set1(a->cap) * vf_tanh(x);
      if (bias) x += vf_load(bias + i * ld + v);
      vf_store(s + i * ld + v, x);
      top = vf_max(x, top);
    }
    vf_store(st->top + v, top);
    top = vf_if_lt(vf_set1(-3e38f), top, top, vf_zero()); // nothing visible yet
    vf part = vf_zero();
    for (int i = 0; i < n; i++) {
      const vf e = vf_exp_below(vf_load(s + i * ld + v) - top);
      vf_store(s + i * ld + v, e);
      part += e;
    }
    const vf factor = vf_exp_below(old - top);
    vf_store(keep + v, factor);
    vf_store(st->sum + v, vf_fma(vf_load(st->sum + v), factor, part));
  }
}

PG_INLINE void attend(const attention *a, const tile *t, const scratch *w, const state *st, int64_t first, int64_t last,
                      int NV) {
  const int64_t ld = NV * VF_N;
  const char *k = tile_kv(a->k, t), *v = tile_kv(a->v, t);
  memset(w->q, 0, (size_t)(a->d * ld) * sizeof(float)); // lanes without a row compute something harmless
  memset(w->bias, 0, (size_t)(KEYS * ld) * sizeof(float));
  for (int r = 0; r < t->n; r++) {
    const float *q = tile_query(a, t, r);
    for (int64_t c = 0; c < a->d; c++) w->q[c * ld + r] = q[c] * a->scale;
  }
  fetch k0 = block_at(a->k, 0, k, first), v0 = block_at(a->v, a->transposed, v, first);
  fetch_up_to(&k0, 1, 1);
  fetch_up_to(&v0, 1, 1);
  for (int64_t j = first; j < last; j += KEYS) {
    float keep[TILE];
    const block b = tile_block(a, t, j, last, w, 1, ld);
    if (!b.n) continue;
    PG_FN(attention_rows)(a->k, k, &b, w->kv, a->dp);
    product(w->s, NULL, w->kv, 1, a->dp, w->q, b.n, a->d, block_at(a->k, 0, k, j + KEYS), NV);
    exponentials(a, w->s, b.biased ? w->bias : NULL, b.n, st, keep, NV);
    if (a->transposed) {
      PG_FN(attention_columns)(a->v, v, &b, w->kv);
      product(st->out, keep, w->kv, 1, KEYS, w->s, a->dv, b.n, next_v(a, v, j), NV);
    } else {
      PG_FN(attention_rows)(a->v, v, &b, w->kv, a->dvp);
      product(st->out, keep, w->kv, 0, a->dvp, w->s, a->dv, b.n, next_v(a, v, j), NV);
    }
  }
}

void PG_FN(attend_tile)(const attention *a, const tile *t, const scratch *w, const state *st, int64_t first,
                        int64_t last) {
  if (a->tile == VF_N)
    attend(a, t, w, st, first, last, 1);
  else
    attend(a, t, w, st, first, last, 2);
}
