// The gradients of linear attention and related ops.
#include "kernels/scan_back.h"
#include "simd/vmath.h"

enum { MOST = 7 }; // sources besides gy, which is source 0

// What a block adds to: the gradients of the sources behind gy, in dst, and the sum of tf's.
typedef struct sums {
  float *to[MOST];
  double *tf;
} sums;

// A source's row for a block's token, and its place in a dense tensor. In `flat` sources the tokens of all sequences
// follow each other.
PG_INLINE int64_t row_in(const pg_tensor *x, const pg_back_block *c, int64_t n_tokens, int flat) {
  const int64_t seq = flat ? 0 : c->seq, token = flat ? c->seq * n_tokens + c->token : c->token;
  return c->head + x->ne[1] * (token + x->ne[2] * seq);
}

PG_INLINE const float *row_of(const pg_tensor *x, int64_t row) {
  const pg_idx i = pg_unravel(x, row);
  return (const float *)pg_row_at(x, i.i1, i.i2, i.i3);
}

static int64_t seqs_of(const pg_tensor *state) { return state->ne[1]; }

// A block's token in k, v, r .. of flat sources; all of them have one shape.
static int64_t flat_row(const pg_task *t, const pg_back_block *c, int state) {
  const pg_tensor *x = &t->src[1];
  return row_in(x, c, x->ne[2] / seqs_of(&t->src[state]), 1);
}

static void values(pg_back_token *to, const float *v, const pg_back_block *c, float factor) {
  for (int64_t i = 0; i < c->rows; i++) to->v[i] = v[c->row + i] * factor;
}

static void add_values(float *to, const pg_back_grads *g, const pg_back_block *c, float factor) {
  for (int64_t i = 0; i < c->rows; i++) to[c->row + i] += g->v[i] * factor;
}

static void add_scaled(float *to, const float *x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] += x[i] * factor;
}

// -- gy, k, v, r, tf, td, state

enum { WKV6_K = 1, WKV6_V, WKV6_R, WKV6_TF, WKV6_TD, WKV6_STATE };

static const float *bonus(const pg_task *t, const pg_back_block *c) {
  return (const float *)pg_row_at(&t->src[WKV6_TF], c->head, 0, 0);
}

static void wkv6_fill(const pg_task *t, const pg_back_block *c, pg_back_token *to) {
  const int64_t n = t->src[1].ne[0], row = flat_row(t, c, WKV6_STATE);
  const float *k = row_of(&t->src[WKV6_K], row), *r = row_of(&t->src[WKV6_R], row), *tf = bonus(t, c);
  double own = 0;
  for (int64_t i = 0; i < n; i++) own += (double)r[i] * tf[i] * k[i];
  to->own = (float)own;
  pg_back_vec(to, PG_K, k, n);
  pg_back_vec(to, PG_R, r, n);
  pg_back_vec(to, PG_W, row_of(&t->src[WKV6_TD], row), n);
  values(to, row_of(&t->src[WKV6_V], row), c, 1);
}

static void wkv6_finish(const pg_task *t, const pg_back_block *c, const pg_back_token *x, const pg_back_grads *g) {
  const int64_t n = t->src[1].ne[0], at = flat_row(t, c, WKV6_STATE) * n;
  const sums *s = c->own;
  const float *k = x->vecs[PG_K], *r = x->vecs[PG_R], *tf = bonus(t, c), own = (float)g->own;
  float *gk = s->to[WKV6_K - 1] + at, *gr = s->to[WKV6_R - 1] + at;
  for (int64_t i = 0; i < n; i++) {
    gk[i] += g->vecs[PG_K][i] + own * tf[i] * r[i];
    gr[i] += g->vecs[PG_R][i] + own * tf[i] * k[i];
    s->tf[i] += g->own * r[i] * k[i];
  }
  pg_back_add(s->to[WKV6_TD - 1] + at, g->vecs[PG_W], n);
  add_values(s->to[WKV6_V - 1] + at, g, c, 1);
}

// -- gy, k, v, q, g, state

enum { GLA_K = 1, GLA_V, GLA_Q, GLA_G, GLA_STATE };

static void gla_fill(const pg_task *t, const pg_back_block *c, pg_back_token *to) {
  const int64_t n = t->src[1].ne[0], row = flat_row(t, c, GLA_STATE);
  const float *q = row_of(&t->src[GLA_Q], row), scale = (float)t->param[0];
  pg_back_vec(to, PG_K, row_of(&t->src[GLA_K], row), n);
  pg_back_vec(to, PG_W, row_of(&t->src[GLA_G], row), n);
  for (int64_t i = 0; i < n; i++) to->memory[PG_R][i] = q[i] * scale;
  to->vecs[PG_R] = to->memory[PG_R];
  values(to, row_of(&t->src[GLA_V], row), c, 1);
}

static void gla_finish(const pg_task *t, const pg_back_block *c, const pg_back_token *x, const pg_back_grads *g) {
  const int64_t n = t->src[1].ne[0], at = flat_row(t, c, GLA_STATE) * n;
  const sums *s = c->own;
  pg_back_add(s->to[GLA_K - 1] + at, g->vecs[PG_K], n);
  pg_back_add(s->to[GLA_G - 1] + at, g->vecs[PG_W], n);
  add_scaled(s->to[GLA_Q - 1] + at, g->vecs[PG_R], (float)t->param[0], n);
  add_values(s->to[GLA_V - 1] + at, g, c, 1);
}

// -- gy, r, w, k, v, a, b, state

enum { WKV7_R = 1, WKV7_W, WKV7_K, WKV7_V, WKV7_A, WKV7_B, WKV7_STATE };
static const int wkv7_source[PG_VECS] = {
    [PG_R] = WKV7_R, [PG_W] = WKV7_W, [PG_K] = WKV7_K, [PG_A] = WKV7_A, [PG_B] = WKV7_B};

static void wkv7_fill(const pg_task *t, const pg_back_block *c, pg_back_token *to) {
  const int64_t n = t->src[1].ne[0], row = flat_row(t, c, WKV7_STATE);
  for (int i = 0; i < PG_VECS; i++) pg_back_vec(to, i, row_of(&t->src[wkv7_source[i]], row), n);
  values(to, row_of(&t->src[WKV7_V], row), c, 1);
}

static void wkv7_finish(const pg_task *t, const pg_back_block *c, const pg_back_token *x, const pg_back_grads *g) {
  const int64_t n = t->src[1].ne[0], at = flat_row(t, c, WKV7_STATE) * n;
  const sums *s = c->own;
  for (int i = 0; i < PG_VECS; i++) pg_back_add(s->to[wkv7_source[i] - 1] + at, g->vecs[i], n);
  add_values(s->to[WKV7_V - 1] + at, g, c, 1);
}

// -- gy, q, k, v, g, beta, state: s = s * e^g + beta * k (v - k . (s * e^g)), so along is (e^g k) . s

enum { GDN_Q = 1, GDN_K, GDN_V, GDN_G, GDN_BETA, GDN_STATE };

// The row of q or k, which may have fewer heads, repeated in turn, and fewer sequences, each of which is repeated.
static int64_t shared_row(const pg_task *t, const pg_tensor *x, const pg_back_block *c) {
  const int64_t seq = c->seq / (t->src[GDN_V].ne[3] / x->ne[3]);
  return c->head % x->ne[1] + x->ne[1] * (c->token + x->ne[2] * seq);
}

static void gdn_fill(const pg_task *t, const pg_back_block *c, pg_back_token *to) {
  const pg_tensor *tv = &t->src[GDN_V];
  const int64_t n = tv->ne[0], row = row_in(tv, c, 0, 0);
  const float *q = row_of(&t->src[GDN_Q], shared_row(t, &t->src[GDN_Q], c)), scale = 1 / sqrtf((float)n);
  const float *k = row_of(&t->src[GDN_K], shared_row(t, &t->src[GDN_K], c)), *g = row_of(&t->src[GDN_G], row);
  const float beta = *row_of(&t->src[GDN_BETA], row);
  float *w = to->memory[PG_W];
  for (int64_t i = 0; i < n; i += VF_N) {
    float e[VF_N];
    const int m = (int)PG_MIN(VF_N, n - i);
    vf_store(e, vf_exp(t->src[GDN_G].ne[0] == 1 ? vf_set1(g[0]) : m < VF_N ? vf_load_n(g + i, m) : vf_load(g + i)));
    memcpy(w + i, e, (size_t)m * sizeof *e);
  }
  for (int64_t i = 0; i < n; i++) {
    to->memory[PG_R][i] = q[i] * scale;
    to->memory[PG_A][i] = w[i] * k[i];
  }
  pg_back_vec(to, PG_K, k, n);
  to->vecs[PG_W] = w;
  to->vecs[PG_R] = to->memory[PG_R];
  to->vecs[PG_A] = to->memory[PG_A];
  to->c = -beta;
  values(to, row_of(tv, row), c, beta);
}

static void gdn_finish(const pg_task *t, const pg_back_block *c, const pg_back_token *x, const pg_back_grads *g) {
  const pg_tensor *tv = &t->src[GDN_V], *tg = &t->src[GDN_G];
  const int64_t n = tv->ne[0], row = row_in(tv, c, 0, 0);
  const float *k = x->vecs[PG_K], *w = x->vecs[PG_W], *ga = g->vecs[PG_A], *v = row_of(tv, row) + c->row;
  const sums *s = c->own;
  float *gk = s->to[GDN_K - 1] + shared_row(t, &t->src[GDN_K], c) * n, *gg = s->to[GDN_G - 1] + row * tg->ne[0];
  add_scaled(s->to[GDN_Q - 1] + shared_row(t, &t->src[GDN_Q], c) * n, g->vecs[PG_R], 1 / sqrtf((float)n), n);
  add_values(s->to[GDN_V - 1] + row * n, g, c, -x->c);
  double beta = -g->c, all = 0;
  for (int64_t i = 0; i < c->rows; i++) beta += (double)g->v[i] * v[i];
  s->to[GDN_BETA - 1][row] += (float)beta;
  for (int64_t i = 0; i < n; i++) {
    const float fade = (g->vecs[PG_W][i] + ga[i] * k[i]) * w[i];
    gk[i] += g->vecs[PG_K][i] + ga[i] * w[i];
    if (tg->ne[0] > 1)
      gg[i] += fade;
    else
      all += (double)fade;
  }
  gg[0] += tg->ne[0] > 1 ? 0.0f : (float)all;
}

// -- ops

static int64_t own_bytes(const pg_task *t) {
  const pg_tensor *x = &t->src[1]; // its dimension 2 has at least the tokens of a sequence
  return pg_plus(pg_times(x->ne[0], sizeof(double)), pg_back_bytes(x->ne[0], x->ne[2], 0)) / 64 * 64 + 64;
}

int64_t PG_FN(linear_attn_back_work)(const pg_task *t, int nth) { return pg_times(nth, own_bytes(t)); }

static sums sums_of(const pg_task *t, int n, int ith) {
  sums s = {.tf = (double *)(t->work + ith * own_bytes(t))};
  float *to = (float *)t->dst.data;
  for (int i = 0; i < n; i++) {
    const int64_t *ne = t->src[i + 1].ne;
    s.to[i] = to;
    to += ne[0] * ne[1] * ne[2] * ne[3];
  }
  return s;
}

// All rows of a head of a sequence. `state`: the number of that source.
PG_INLINE void head_back(const pg_task *t, const pg_back *x, pg_back_block c, int state, pg_back_fill fill,
                         pg_back_finish finish, pg_back_kind kind) {
  sums *s = c.own;
  const int64_t at = c.seq * x->n * x->n_rows * x->n_head;
  for (c.row = 0; c.row < x->n_rows; c.row += PG_BACK_ROWS) {
    c.rows = PG_MIN(PG_BACK_ROWS, x->n_rows - c.row);
    pg_back_run(t, x, &c, (const float *)t->src[state].data + at, s->to[state - 1] + at, (char *)(s->tf + x->n), fill,
                finish, kind);
  }
}

// Ops with flat sources. Threads share the heads of all sequences.
PG_INLINE pg_back flat_back(const pg_task *t, int state) {
  const pg_tensor *x = &t->src[1];
  const int64_t n_seqs = seqs_of(&t->src[state]);
  return (pg_back){.n = x->ne[0],
                   .n_rows = x->ne[0],
                   .n_head = x->ne[1],
                   .n_tokens = x->ne[2] / n_seqs,
                   .n_seqs = n_seqs,
                   .n_slots = 1,
                   .gy = (const float *)t->src[0].data};
}

PG_INLINE void flat_run(const pg_task *t, int ith, int nth, int state, pg_back_fill fill, pg_back_finish finish,
                        pg_back_kind kind) {
  const pg_back x = flat_back(t, state);
  sums s = sums_of(t, state, ith);
  pg_back_clear(t, ith, nth);
  const pg_range r = pg_share(x.n_head * x.n_seqs, ith, nth);
  for (int64_t i = r.first; i < r.last; i++)
    head_back(t, &x, (pg_back_block){.head = i % x.n_head, .seq = i / x.n_head, .own = &s}, state, fill, finish, kind);
}

int PG_FN(gated_linear_attn_back_f32)(const pg_task *t, int ith, int nth) {
  flat_run(t, ith, nth, GLA_STATE, gla_fill, gla_finish, (pg_back_kind){.values_inside = 1});
  return PG_OK;
}

int PG_FN(rwkv_wkv7_back_f32)(const pg_task *t, int ith, int nth) {
  flat_run(t, ith, nth, WKV7_STATE, wkv7_fill, wkv7_finish, (pg_back_kind){.beside = 1});
  return PG_OK;
}

// All sequences share tf, so that a thread has heads of all of them.
int PG_FN(rwkv_wkv6_back_f32)(const pg_task *t, int ith, int nth) {
  const pg_back x = flat_back(t, WKV6_STATE);
  const pg_back_kind kind = {.values_inside = 1, .y_before = 1};
  sums s = sums_of(t, WKV6_STATE, ith);
  pg_back_clear(t, ith, nth);
  const pg_range r = pg_share(x.n_head, ith, nth);
  pg_back_block c = {.own = &s};
  for (c.head = r.first; c.head < r.last; c.head++) {
    memset(s.tf, 0, (size_t)x.n * sizeof *s.tf);
    for (c.seq = 0; c.seq < x.n_seqs; c.seq++) head_back(t, &x, c, WKV6_STATE, wkv6_fill, wkv6_finish, kind);
    for (int64_t i = 0; i < x.n; i++) s.to[WKV6_TF - 1][c.head * x.n + i] = (float)s.tf[i];
  }
  return PG_OK;
}

static int64_t common(int64_t a, int64_t b) { return b ? common(b, a % b) : a; }

// Heads and sequences of v that share a row of q or k go to one thread.
int PG_FN(gated_delta_net_back_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *q = &t->src[GDN_Q], *k = &t->src[GDN_K], *v = &t->src[GDN_V];
  const pg_back x = {.n = v->ne[0],
                     .n_rows = v->ne[0],
                     .n_head = v->ne[1],
                     .n_tokens = v->ne[2],
                     .n_seqs = v->ne[3],
                     .n_slots = (int64_t)t->param[0],
                     .gy = (const float *)t->src[0].data};
  const int64_t heads = common(q->ne[1], k->ne[1]), seqs = common(q->ne[3], k->ne[3]), n_seqs = x.n_seqs / seqs;
  sums s = sums_of(t, GDN_STATE, ith);
  pg_back_clear(t, ith, nth);
  const pg_range r = pg_share(heads * seqs, ith, nth);
  pg_back_block c = {.own = &s};
  for (int64_t i = r.first; i < r.last; i++)
    for (c.seq = i / heads * n_seqs; c.seq < (i / heads + 1) * n_seqs; c.seq++)
      for (c.head = i % heads; c.head < x.n_head; c.head += heads)
        head_back(t, &x, c, GDN_STATE, gdn_fill, gdn_finish, (pg_back_kind){.delta = 1});
  return PG_OK;
}
