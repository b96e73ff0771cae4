// Attention of at most FEW query rows: dot products along the rows of K, sums of the rows of V. K and V are read as
// they are stored, when they are floats and their rows are whole registers. A transposed V is turned block by block:
// along its rows, the order of the sum would depend on the number of lanes and on the keys between.
#include "attention/flash_attn.h"
#include "products/borders.h"
#include "simd/units.h"

enum { SUMS = 8, AHEAD = 16 }; // sums at a time; rows to prefetch

typedef struct rows { // of a block
  const char *data;
  const int32_t *keys; // numbers of the rows; NULL: 0, 1, 2 ..
  int64_t nb, type;
  const char *ahead; // memory to prefetch while row 0 .. is read
  int64_t ahead_nb, bytes;
} rows;

PG_INLINE const char *row(const rows *x, int64_t i) { return x->data + (x->keys ? x->keys[i] : i) * x->nb; }

// Prefetch in software: rows of one head lie so far apart in a cache that the hardware does not follow them. Several
// query rows have time to read from AMD's L2 cache, which can wait for more lines at once than L1 (docs/products.md).
PG_INLINE void prefetch(const rows *x, int64_t i, int R) {
  const char *p = x->ahead + i * x->ahead_nb;
  if (R > 1 && pg_cpu_is_amd) {
    for (int64_t o = 0; o < x->bytes; o += 64) __builtin_prefetch(p + o, 0, 2);
  } else {
    for (int64_t o = 0; o < x->bytes; o += 64) __builtin_prefetch(p + o);
  }
}

// to[r * KEYS + i] = from[r * dp ..] . row i of x, dp elements, for n rows of x and R of `from`. n is rounded up to a
// multiple of 4.
PG_INLINE void dots(float *to, const float *from, int64_t dp, const rows *x, int64_t n, int R, int64_t type) {
  const int n_x = R == FEW ? 2 : 4; // rows of x at a time
  for (int64_t i = 0; i < n; i += n_x) {
    const char *p[4];
    vf acc[4][FEW];
    UNROLL for (int k = 0; k < n_x; k++) {
      p[k] = row(x, PG_MIN(i + k, n - 1));
      prefetch(x, i + k, R);
      UNROLL for (int r = 0; r < R; r++) acc[k][r] = vf_zero();
    }
    for (int64_t l = 0; l < dp; l += VF_N) {
      vf y[FEW];
      UNROLL for (int r = 0; r < R; r++) y[r] = vf_load(from + r * dp + l);
      UNROLL for (int k = 0; k < n_x; k++) {
        const vf w = float_load(p[k], l, type);
        UNROLL for (int r = 0; r < R; r++) acc[k][r] = vf_fma(w, y[r], acc[k][r]);
      }
    }
    float s[4];
    if (R == FEW) {
      UNROLL for (int k = 0; k < n_x; k++) {
        vf_sum4_in_turn(s, acc[k][0], acc[k][1], acc[k][2], acc[k][3]);
        UNROLL for (int r = 0; r < R; r++) to[r * KEYS + i + k] = s[r];
      }
    } else {
      UNROLL for (int r = 0; r < R; r++) vf_sum4_in_turn(to + r * KEYS + i, acc[0][r], acc[1][r], acc[2][r], acc[3][r]);
    }
  }
}

// The sum of s[r][i] * row first + i of v for n rows, N registers wide, is added to out[r][c..]; or, with `goes_on`, it
// begins with what is there.
PG_INLINE void mix_part(float *out, int64_t dvp, int goes_on, const float *s, const rows *v, int64_t first, int64_t n,
                        int64_t c, int R, int N, int64_t type) {
  vf acc[FEW][SUMS];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int k = 0; k < N; k++) acc[r][k] =
      goes_on ? vf_load(out + r * dvp + c + k * VF_N) : vf_zero();
  for (int64_t i = first; i < first + n; i++) {
    const char *p = row(v, i);
    vf e[FEW];
    if (c == 0) prefetch(v, i, R);
    UNROLL for (int r = 0; r < R; r++) e[r] = vf_set1(s[r * KEYS + i]);
    UNROLL for (int k = 0; k < N; k++) {
      const vf x = float_load(p, c + k * VF_N, type);
      UNROLL for (int r = 0; r < R; r++) acc[r][k] = vf_fma(x, e[r], acc[r][k]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int k = 0; k < N; k++) {
    float *o = out + r * dvp + c + k * VF_N;
    vf_store(o, goes_on ? acc[r][k] : vf_add(vf_load(o), acc[r][k]));
  }
}

PG_INLINE void mix(float *out, int64_t dvp, int goes_on, const float *s, const rows *v, int64_t first, int64_t n, int R,
                   int64_t type) {
  enum { N = SUMS };
#define PARTS_OF(width)                                                                                                \
  for (; c + (width)*VF_N <= dvp; c += (width)*VF_N) mix_part(out, dvp, goes_on, s, v, first, n, c, R, width, type)
  int64_t c = 0;
  PARTS_OF(N / R);
  PARTS_OF(N / R / 2);
  PARTS_OF(1);
#undef PARTS_OF
}

// Not inlined: in a larger function the sums would not stay in registers.
#define DOTS_OF(R, type)                                                                                               \
  static __attribute__((noinline)) void dots_##R##_##type(float *to, const float *from, int64_t dp, const rows *x,     \
                                                          int64_t n) {                                                 \
    dots(to, from, dp, x, n, R, PG_##type);                                                                            \
  }
#define MIX_OF(R, type)                                                                                                \
  static __attribute__((noinline)) void mix_##R##_##type(float *out, int64_t dvp, int goes_on, const float *s,         \
                                                         const rows *v, int64_t first, int64_t n) {                    \
    mix(out, dvp, goes_on, s, v, first, n, R, PG_##type);                                                              \
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
  void (*dots[3])(float *, const float *, int64_t, const rows *, int64_t);
  void (*mix[3])(float *, int64_t, int, const float *, const rows *, int64_t, int64_t);
} ways;
WAYS(F32)
WAYS(F16)
WAYS(BF16)

static const ways *ways_of(int64_t type) {
  return type == PG_F32 ? &ways_F32 : type == PG_F16 ? &ways_F16 : &ways_BF16;
}

static int way_of(const tile *t) { return t->n == 1 ? 0 : t->n == 2 ? 1 : 2; }

static int is_float(const pg_tensor *x) { return x->type == PG_F32 || x->type == PG_F16 || x->type == PG_BF16; }

// The block's rows as stored, or as f32 in `buf`.
static rows rows_of(const pg_tensor *x, const char *head, const block *b, float *buf, int64_t ld) {
  const int64_t nb = x->nb[1], bytes = x->ne[0] / pg_block_size(x->type) * x->nb[0];
  if (is_float(x) && x->ne[0] == ld)
    return (rows){head, b->keys, nb, x->type, head + (b->keys[0] + AHEAD) * nb, nb, bytes};
  PG_FN(attention_rows)(x, head, b, buf, ld);
  return (rows){(const char *)buf, NULL, ld * 4, PG_F32, head + (b->keys[0] + KEYS) * nb, nb, bytes};
}

// The rows of a transposed x in `buf`.
static rows turned_of(const pg_tensor *x, const char *head, const block *b, float *buf, int64_t ld) {
  if (PG_FN(attention_turned_16)(x, head, b, (uint16_t *)buf, ld))
    return (rows){(const char *)buf, NULL, ld * 2, x->type, NULL, 0, 0};
  PG_FN(attention_turned)(x, head, b, buf, ld);
  return (rows){(const char *)buf, NULL, ld * 4, PG_F32, NULL, 0, 0};
}

static void few_scores(const attention *a, const tile *t, const scratch *w, const sight *x, pg_range blocks, float *s,
                       float *top) {
  const char *head = tile_kv(a->k, t);
  memset(w->q, 0, (size_t)(FEW * a->dp) * sizeof(float));
  memset(w->bias, 0, FEW * KEYS * sizeof(float));
  for (int r = 0; r < t->n; r++)
    for (int64_t c = 0; c < a->d; c++) w->q[r * a->dp + c] = tile_query(a, t, r)[c] * a->scale;
  for (int64_t j = blocks.first; j < blocks.last; j++) {
    const block *b = x->blocks + j;
    const rows k = rows_of(a->k, head, b, w->kv, a->dp);
    float *to = s + j * FEW * KEYS;
    ways_of(k.type)->dots[way_of(t)](to, w->q, a->dp, &k, b->n);
    block_bias(a, t, b, w, KEYS, 1);
    for (int r = 0; r < t->n; r++, to += KEYS) {
      for (int i = 0; i < b->n && a->cap > 0; i += VF_N) vf_store(to + i, vf_set1(a->cap) * vf_tanh(vf_load(to + i)));
      for (int i = b->n; i % VF_N; i++) to[i] = -INFINITY;
      vf most = vf_set1(top[r]);
      for (int i = 0; i < b->n; i += VF_N) {
        vf score = vf_load(to + i);
        if (b->biased) {
          const vf bias = vf_load(w->bias + r * KEYS + i);
          score = vf_masked(score + bias, bias);
          vf_store(to + i, score);
        }
        most = vf_max(score, most);
      }
      top[r] = vf_hmax(most);
    }
  }
}

static void few_weights(const attention *a, const tile *t, const block *b, float *s, const float *top) {
  for (int r = 0; r < t->n; r++, s += KEYS) {
    const vf most = vf_set1(top[r] == -INFINITY ? 0 : top[r]);
    for (int i = 0; i < b->n; i += VF_N) vf_store(s + i, vf_exp_below(vf_load(s + i) - most));
  }
}

// Add the weights of the keys first .. last to the sum of a row's part, and that to the sum when the group ends.
static void few_sum(const float *s, int first, int last, int ends, float *sum, float *part) {
  float all = *part;
  for (int i = first; i < last; i++) all += s[i];
  *sum += ends ? all : 0;
  *part = ends ? 0 : all;
}

static void few_end(const attention *a, const state *st, int r) {
  float *out = st->out + r * a->dvp, *part = st->out_part + r * a->dvp;
  for (int64_t c = 0; c < a->dvp; c += VF_N) {
    vf_store(out + c, vf_load(out + c) + vf_load(part + c));
    vf_store(part + c, vf_zero());
  }
}

static void few_values(const attention *a, const tile *t, const scratch *w, const sight *x, float *s, int are_scores,
                       const state *st) {
  const char *head = tile_kv(a->v, t);
  const int way = way_of(t);
  int ended = 1; // no group is under way
  for (int64_t j = 0; j < x->n_blocks; j++, s += FEW * KEYS) {
    const block *b = x->blocks + j;
    const rows v = a->transposed ? turned_of(a->v, head, b, w->kv, a->dvp) : rows_of(a->v, head, b, w->kv, a->dvp);
    if (are_scores) few_weights(a, t, b, s, st->top);
    uint32_t rows;
    for (int i = 0, last; i < b->n; i = last) {
      last = group_end(b, i, &rows);
      const int ends = !(tile_rows(t) & ~rows), whole = ended && ends;
      for (int r = 0; r < t->n; r++) few_sum(s + r * KEYS, i, last, rows >> r & 1, st->sum + r, st->sum_part + r);
      ways_of(v.type)->mix[way](whole ? st->out : st->out_part, a->dvp, !whole, s, &v, i, last - i);
      for (int r = 0; r < t->n && !whole; r++)
        if (rows >> r & 1) few_end(a, st, r);
      ended = ends;
    }
  }
}

const attend PG_FN(attend_few) = {few_scores, few_weights, few_values};
