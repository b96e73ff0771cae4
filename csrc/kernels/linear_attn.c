// Linear attention and related ops: each head has a state [S, S], which keys and values change and queries read.
#include "kernels/state.h"
#include "simd/vmath.h"

enum { VECTORS = 3 }; // vectors of S floats that a token may need

static int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

static const float *row(const pg_tensor *x, const pg_cell *c) {
  return (const float *)pg_row_at(x, c->head, c->token, c->seq);
}

// Run an op. `values` gives S, heads and tokens; `from` has the states.
PG_INLINE int run(const pg_task *t, int ith, int nth, const pg_tensor *values, const pg_tensor *from, int64_t n_seqs,
                  int64_t n_slots, pg_turn_of of, pg_turn_form form) {
  const int64_t n = values->ne[0], n_tokens = values->ne[2] * values->ne[3] / n_seqs, floats = VECTORS * padded(n);
  pg_scan scan = {.n = n, .n_rows = n, .n_head = values->ne[1], .n_tokens = n_tokens, .n_seqs = n_seqs};
  scan.n_slots = n_slots;
  scan.from = from;
  scan.ids = t->src[PG_READ].data ? &t->src[PG_READ] : NULL;
  scan.n_from = scan.ids ? from->ne[1] : n_seqs;
  const int status = pg_scan_begin(t, &scan);
  if (status) return status;
  pg_scan_run(t, ith, nth, &scan, of, (float *)t->work + ith * PG_TURNS * floats, floats, form);
  pg_scan_end(t, ith, nth, &scan);
  return PG_OK;
}

// The number of sequences: rows of `state`, or ids of the rows to read from it.
static int64_t seqs_of(const pg_task *t, const pg_tensor *state) {
  return t->src[PG_READ].data ? t->src[PG_READ].ne[0] : state->ne[1];
}

// The cell's rows in x, in which the tokens of all sequences follow each other.
static pg_cell flat(const pg_tensor *x, int64_t n_seqs, const pg_cell *c) {
  pg_cell f = *c;
  f.token += c->seq * (x->ne[2] / n_seqs);
  f.seq = 0;
  return f;
}

// The sum of x * y, or of x * y * z.
static float own_of(const float *x, const float *y, const float *z, int64_t n) {
  vf acc = vf_zero();
  int64_t i = 0;
  for (; i + VF_N <= n; i += VF_N) {
    const vf xy = vf_load(x + i) * vf_load(y + i);
    if (z)
      acc = vf_fma(xy, vf_load(z + i), acc);
    else
      acc += xy;
  }
  float sum = vf_sum(acc);
  for (; i < n; i++) sum += x[i] * y[i] * (z ? z[i] : 1);
  return sum;
}

// -- a row of the state per key ---------------------------------------------------------------------------------------

// Sources k, v, r, tf, td, state. A token reads itself with the factor tf; the state decays after it has been read.
static void wkv6(const pg_task *t, const pg_cell *cell, pg_turn *x, float *memory) {
  const int64_t n = t->src[0].ne[0];
  const pg_cell c = flat(&t->src[0], seqs_of(t, &t->src[5]), cell);
  const float *k = row(&t->src[0], &c), *r = row(&t->src[2], &c);
  const float *tf = (const float *)pg_row_at(&t->src[3], c.head, 0, 0);
  *x = (pg_turn){.w = row(&t->src[4], &c), .k = k, .r = r, .v = row(&t->src[1], &c), .c = own_of(r, tf, k, n)};
}

// Sources k, v, q, g, state. q reads the state after it has decayed by g and the token was added.
static void gla(const pg_task *t, const pg_cell *cell, pg_turn *x, float *memory) {
  const int64_t n = t->src[0].ne[0];
  const pg_cell c = flat(&t->src[0], seqs_of(t, &t->src[4]), cell);
  const float *k = row(&t->src[0], &c), *q = row(&t->src[2], &c), *g = row(&t->src[3], &c);
  const float scale = (float)t->param[0];
  for (int64_t i = 0; i < n; i++) memory[i] = q[i] * g[i] * scale;
  *x = (pg_turn){.w = g, .k = k, .r = memory, .v = row(&t->src[1], &c), .c = own_of(q, k, NULL, n) * scale};
}

// -- a row of the state per value: what the state has under a key is replaced -----------------------------------------

// r, w, k, v, a, b, state
static void wkv7(const pg_task *t, const pg_cell *cell, pg_turn *x, float *memory) {
  const pg_cell c = flat(&t->src[0], seqs_of(t, &t->src[6]), cell);
  *x = (pg_turn){.r = row(&t->src[0], &c),
                 .w = row(&t->src[1], &c),
                 .k = row(&t->src[2], &c),
                 .v = row(&t->src[3], &c),
                 .a = row(&t->src[4], &c),
                 .b = row(&t->src[5], &c)};
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
static void delta_net(const pg_task *t, const pg_cell *c, pg_turn *x, float *memory) {
  const int64_t n = t->src[2].ne[0], n_seqs = t->src[2].ne[3];
  const float *q = shared_row(&t->src[0], c, n_seqs), *k = shared_row(&t->src[1], c, n_seqs);
  const float scale = 1 / sqrtf((float)n);
  float *w = memory, *a = w + padded(n), *r = a + padded(n);
  decay_of(w, row(&t->src[3], c), t->src[3].ne[0], n);
  for (int64_t i = 0; i < n; i++) a[i] = w[i] * k[i], r[i] = q[i] * scale;
  *x = (pg_turn){.w = w, .k = k, .a = a, .r = r, .v = row(&t->src[2], c), .c = *row(&t->src[4], c)};
}

// -- ops --------------------------------------------------------------------------------------------------------------

int64_t PG_FN(linear_attn_work)(const pg_task *t, int nth) {
  return pg_times(nth, pg_times(PG_TURNS * VECTORS * (int64_t)sizeof(float), padded(t->src[0].ne[0])));
}

int PG_FN(rwkv_wkv6_f32)(const pg_task *t, int ith, int nth) {
  return run(t, ith, nth, &t->src[1], &t->src[5], seqs_of(t, &t->src[5]), 1, wkv6, PG_TURN_INSIDE);
}
int PG_FN(gated_linear_attn_f32)(const pg_task *t, int ith, int nth) {
  return run(t, ith, nth, &t->src[1], &t->src[4], seqs_of(t, &t->src[4]), 1, gla, PG_TURN_INSIDE);
}
int PG_FN(rwkv_wkv7_f32)(const pg_task *t, int ith, int nth) {
  return run(t, ith, nth, &t->src[3], &t->src[6], seqs_of(t, &t->src[6]), 1, wkv7, PG_TURN_BESIDE);
}
int PG_FN(gated_delta_net_f32)(const pg_task *t, int ith, int nth) {
  const int64_t n_slots = (int64_t)t->param[0];
  return run(t, ith, nth, &t->src[2], &t->src[5], t->src[2].ne[3], n_slots, delta_net, PG_TURN_VALUE);
}
