// Linear attention and related ops: each head has a state [S, S], which keys and values change and queries read.
#include "kernels/chunk.h"
#include "simd/vmath.h"

enum { VECTORS = 2, WIDTH = 4 }; // vectors of S floats that a step may need; registers of values at a time

static int64_t scratch_floats(int64_t n) { return VECTORS * ((n + 15) / 16 * 16); }

static const float *row(const pg_tensor *x, const pg_cell *c) {
  return (const float *)pg_row_at(x, c->head, c->token, c->seq);
}

// Run an op: many tokens in chunks, few tokens one after the other. `values` gives S, heads and tokens; `from` has the
// states.
PG_INLINE int run(const pg_task *t, int ith, int nth, const pg_tensor *values, const pg_tensor *from, int64_t n_seqs,
                  int64_t n_slots, pg_scan_step step, pg_chunk_fill fill, pg_chunk_kind kind) {
  const int64_t n = values->ne[0], n_tokens = values->ne[2] * values->ne[3] / n_seqs;
  pg_scan scan = {.n = n, .n_rows = n, .n_head = values->ne[1], .n_tokens = n_tokens, .n_seqs = n_seqs};
  scan.n_slots = n_slots;
  scan.from = from;
  scan.ids = t->src[PG_READ].data ? &t->src[PG_READ] : NULL;
  scan.n_from = scan.ids ? from->ne[1] : n_seqs;
  scan.block = 1;
  const int status = pg_scan_begin(t, &scan);
  if (status) return status;
  if (pg_chunk_fits(&scan))
    pg_chunk_run(t, ith, nth, &scan, step, scratch_floats(n), fill, kind);
  else
    pg_scan_run(t, ith, nth, &scan, step, (float *)t->work + ith * scratch_floats(n));
  pg_scan_end(t, ith, nth, &scan);
  return PG_OK;
}

// The number of sequences: rows of `state`, or ids of the rows to read from it.
static int64_t seqs_of(const pg_task *t, const pg_tensor *state) {
  return t->src[PG_READ].data ? t->src[PG_READ].ne[0] : state->ne[1];
}

// -- a row of the state per key: s[i] = s[i] * w[i] + k[i] * v, y = c * v + sum of p[i] * s[i] as it was
// ---------------

PG_INLINE void outer_part(const pg_cell *cell, int64_t n, const float *w, const float *k, const float *p,
                          const float *v, float c, int64_t at, int N) {
  const float *from = cell->from + at;
  float *s = cell->s + at;
  vf acc[WIDTH], x[WIDTH];
  for (int j = 0; j < N; j++) x[j] = vf_load(v + at + j * VF_N), acc[j] = vf_set1(c) * x[j];
  for (int64_t i = 0; i < n; i++, s += n, from += n) {
    const vf vw = vf_set1(w[i]), vk = vf_set1(k[i]), vp = vf_set1(p[i]);
    for (int j = 0; j < N; j++) {
      const vf z = vf_load(from + j * VF_N);
      acc[j] = vf_fma(z, vp, acc[j]);
      vf_store(s + j * VF_N, vf_fma(z, vw, vk * x[j]));
    }
  }
  for (int j = 0; j < N; j++) vf_store(cell->y + at + j * VF_N, acc[j]);
}

static void outer(const pg_cell *cell, int64_t n, const float *w, const float *k, const float *p, const float *v,
                  float c) {
  int64_t j = 0;
  for (; j + WIDTH * VF_N <= n; j += WIDTH * VF_N) outer_part(cell, n, w, k, p, v, c, j, WIDTH);
  for (; j + VF_N <= n; j += VF_N) outer_part(cell, n, w, k, p, v, c, j, 1);
  for (; j < n; j++) {
    float sum = c * v[j];
    for (int64_t i = 0; i < n; i++) {
      const float z = cell->from[i * n + j];
      sum += z * p[i];
      cell->s[i * n + j] = z * w[i] + k[i] * v[j];
    }
    cell->y[j] = sum;
  }
}

// The cell's rows in x, in which the tokens of all sequences follow each other.
static pg_cell flat(const pg_tensor *x, int64_t n_seqs, const pg_cell *c) {
  pg_cell f = *c;
  f.token += c->seq * (x->ne[2] / n_seqs);
  f.seq = 0;
  return f;
}

// Sources k, v, r, tf, td, state. A token reads itself with the factor tf; the state decays after it has been read.
static void wkv6(const pg_task *t, const pg_cell *cell, float *work) {
  const int64_t n = t->src[0].ne[0];
  const pg_cell c = flat(&t->src[0], seqs_of(t, &t->src[5]), cell);
  const float *k = row(&t->src[0], &c), *r = row(&t->src[2], &c);
  const float *tf = (const float *)pg_row_at(&t->src[3], c.head, 0, 0);
  double own = 0;
  for (int64_t i = 0; i < n; i++) own += (double)r[i] * tf[i] * k[i];
  outer(&c, n, row(&t->src[4], &c), k, r, row(&t->src[1], &c), (float)own);
}

static void wkv6_token(const pg_task *t, const pg_cell *cell, pg_chunk_token *x) {
  const int64_t n = t->src[0].ne[0];
  const pg_cell c = flat(&t->src[0], seqs_of(t, &t->src[5]), cell);
  const float *tf = (const float *)pg_row_at(&t->src[3], c.head, 0, 0);
  const float *k = row(&t->src[0], &c), *r = row(&t->src[2], &c);
  pg_chunk_vec(x, PG_K, k, n);
  pg_chunk_vec(x, PG_R, r, n);
  pg_chunk_vec(x, PG_W, row(&t->src[4], &c), n);
  x->v = pg_chunk_padded(x->values, row(&t->src[1], &c), n);
  vf own = vf_zero();
  int64_t i = 0;
  for (; i + VF_N <= n; i += VF_N) own = vf_fma(vf_load(r + i) * vf_load(tf + i), vf_load(k + i), own);
  x->own = vf_sum(own);
  for (; i < n; i++) x->own += r[i] * tf[i] * k[i];
  x->has_own = 1;
}

// Sources k, v, q, g, state. q reads the state after it has decayed by g and the token was added.
static void gla(const pg_task *t, const pg_cell *cell, float *p) {
  const int64_t n = t->src[0].ne[0];
  const pg_cell c = flat(&t->src[0], seqs_of(t, &t->src[4]), cell);
  const float *k = row(&t->src[0], &c), *q = row(&t->src[2], &c), *g = row(&t->src[3], &c);
  const float scale = (float)t->param[0];
  double own = 0;
  for (int64_t i = 0; i < n; i++) {
    own += (double)q[i] * k[i];
    p[i] = q[i] * g[i] * scale;
  }
  outer(&c, n, g, k, p, row(&t->src[1], &c), (float)(own * scale));
}

static void gla_token(const pg_task *t, const pg_cell *cell, pg_chunk_token *x) {
  const int64_t n = t->src[0].ne[0];
  const pg_cell c = flat(&t->src[0], seqs_of(t, &t->src[4]), cell);
  const float *q = row(&t->src[2], &c), scale = (float)t->param[0];
  pg_chunk_vec(x, PG_K, row(&t->src[0], &c), n);
  pg_chunk_vec(x, PG_W, row(&t->src[3], &c), n);
  x->v = pg_chunk_padded(x->values, row(&t->src[1], &c), n);
  x->vecs[PG_R] = x->memory[PG_R];
  for (int64_t i = 0; i < n; i++) x->memory[PG_R][i] = q[i] * scale;
}

// -- a row of the state per value: what the state has under a key is replaced
// ------------------------------------------

// r, w, k, v, a, b, state
static void wkv7(const pg_task *t, const pg_cell *cell, float *work) {
  const int64_t n = t->src[0].ne[0];
  const pg_cell c = flat(&t->src[0], seqs_of(t, &t->src[6]), cell);
  const pg_turn turn = {.r = row(&t->src[0], &c),
                        .w = row(&t->src[1], &c),
                        .k = row(&t->src[2], &c),
                        .v = row(&t->src[3], &c),
                        .a = row(&t->src[4], &c),
                        .b = row(&t->src[5], &c)};
  pg_turn_rows(&c, 0, n, n, &turn, c.y, PG_TURN_BESIDE);
}

static void wkv7_token(const pg_task *t, const pg_cell *cell, pg_chunk_token *x) {
  const int64_t n = t->src[0].ne[0];
  const pg_cell c = flat(&t->src[0], seqs_of(t, &t->src[6]), cell);
  pg_chunk_vec(x, PG_R, row(&t->src[0], &c), n);
  pg_chunk_vec(x, PG_W, row(&t->src[1], &c), n);
  pg_chunk_vec(x, PG_K, row(&t->src[2], &c), n);
  x->v = pg_chunk_padded(x->values, row(&t->src[3], &c), n);
  pg_chunk_vec(x, PG_A, row(&t->src[4], &c), n);
  pg_chunk_vec(x, PG_B, row(&t->src[5], &c), n);
}

// The row of q or k for a cell. They may have fewer heads, which are repeated in turn, and fewer sequences, each of
// which is repeated.
static const float *shared_row(const pg_tensor *x, const pg_cell *c, int64_t n_seqs) {
  return (const float *)pg_row_at(x, c->head % x->ne[1], c->token, c->seq / (n_seqs / x->ne[3]));
}

// e^g, which has one number for all keys, or one for each.
static void decay_of(float *w, const float *g, int64_t n_g, int64_t n) {
  if (n_g == 1) {
    const float all = expf(g[0]);
    for (int64_t i = 0; i < n; i++) w[i] = all;
  } else {
    for (int64_t i = 0; i < n; i += VF_N)
      vf_store(w + i, vf_exp(i + VF_N <= n ? vf_load(g + i) : vf_load_n(g + i, (int)(n - i))));
  }
}

// q, k, v, g, beta, state: s = s * e^g + beta * k (v - k . (s * e^g))
static void delta_net(const pg_task *t, const pg_cell *c, float *work) {
  const int64_t n = t->src[2].ne[0], n_seqs = t->src[2].ne[3], step = scratch_floats(n) / VECTORS;
  const float *k = shared_row(&t->src[1], c, n_seqs), *v = row(&t->src[2], c), *g = row(&t->src[3], c);
  const float beta = *row(&t->src[4], c), scale = 1 / sqrtf((float)n);
  float *w = work, *a = w + step;
  decay_of(w, g, t->src[3].ne[0], n);
  for (int64_t i = 0; i < n; i++) a[i] = w[i] * k[i];
  const pg_turn turn = {.w = w, .k = k, .a = a, .r = shared_row(&t->src[0], c, n_seqs), .v = v, .c = beta};
  pg_turn_rows(c, 0, n, n, &turn, c->y, PG_TURN_VALUE);
  for (int64_t i = 0; i < n; i++) c->y[i] *= scale;
}

static void delta_net_token(const pg_task *t, const pg_cell *c, pg_chunk_token *x) {
  const int64_t n = t->src[2].ne[0], n_seqs = t->src[2].ne[3];
  const float *q = shared_row(&t->src[0], c, n_seqs), *k = shared_row(&t->src[1], c, n_seqs), *v = row(&t->src[2], c);
  const float beta = *row(&t->src[4], c), scale = 1 / sqrtf((float)n);
  decay_of(x->memory[PG_W], row(&t->src[3], c), t->src[3].ne[0], n);
  pg_chunk_vec(x, PG_K, k, n);
  for (int64_t i = 0; i < n; i++) x->memory[PG_R][i] = q[i] * scale, x->values[i] = v[i] * beta;
  x->vecs[PG_W] = x->memory[PG_W];
  x->vecs[PG_R] = x->memory[PG_R];
  x->vecs[PG_A] = x->vecs[PG_K];
  x->v = x->values;
  x->c = -beta;
}

// -- ops
// ---------------------------------------------------------------------------------------------------------------

int64_t PG_FN(linear_attn_work)(const pg_task *t, int nth) {
  const int64_t n = t->src[0].ne[0], floats = scratch_floats(n);
  return pg_times(nth, n <= PG_CHUNK_KEYS ? pg_chunk_bytes(n, n, floats) : pg_times(floats, sizeof(float)));
}

int PG_FN(rwkv_wkv6_f32)(const pg_task *t, int ith, int nth) {
  const pg_chunk_kind kind = {.form = PG_CHUNK_PLAIN, .y_before = 1, .values_inside = 1};
  return run(t, ith, nth, &t->src[1], &t->src[5], seqs_of(t, &t->src[5]), 1, wkv6, wkv6_token, kind);
}
int PG_FN(gated_linear_attn_f32)(const pg_task *t, int ith, int nth) {
  const pg_chunk_kind kind = {.form = PG_CHUNK_PLAIN, .values_inside = 1};
  return run(t, ith, nth, &t->src[1], &t->src[4], seqs_of(t, &t->src[4]), 1, gla, gla_token, kind);
}
int PG_FN(rwkv_wkv7_f32)(const pg_task *t, int ith, int nth) {
  const pg_chunk_kind kind = {.form = PG_CHUNK_BESIDE, .a_before = 1};
  return run(t, ith, nth, &t->src[3], &t->src[6], seqs_of(t, &t->src[6]), 1, wkv7, wkv7_token, kind);
}
int PG_FN(gated_delta_net_f32)(const pg_task *t, int ith, int nth) {
  const pg_chunk_kind kind = {.form = PG_CHUNK_DELTA};
  return run(t, ith, nth, &t->src[2], &t->src[5], t->src[2].ne[3], (int64_t)t->param[0], delta_net, delta_net_token,
             kind);
}
