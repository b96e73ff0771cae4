// Shared by state-space models and linear attention: states that tokens change one after the other.
#pragma once
#include "kernel.h"

// The recurrence of an op. Each head of each sequence has a state of n_rows rows of n elements; each token gives it
// n_rows results. dst holds the results [n_rows, n_head, n_tokens, n_seqs], then n_slots times states
// [n, n_rows, n_head, n_seqs]: the last ones, those of a token earlier, and so on; zeros from before the first token.
typedef struct pg_scan {
  int64_t n, n_rows, n_head, n_tokens, n_seqs, n_slots;
  const pg_tensor *from; // the states before, dense
  int64_t n_from;        // number of these states
  const pg_tensor *ids;  // the state with which each sequence begins; NULL: the one with its number
  int64_t block;         // heads that go through the tokens together
  int direct;            // the last states go to their cells at once (pg_scan_begin) ...
  float *states;         // ... else here, one after the other
} pg_scan;

PG_INLINE int64_t pg_scan_id(const pg_tensor *ids, int64_t seq) {
  return *(const int32_t *)(ids->data + seq * ids->nb[0]);
}

// Begin a scan. PG_E_INDEX: a cell does not exist. No cell is overwritten before its state has been read: when a state
// goes to the cell of another sequence, all states are stored at the end.
PG_INLINE int pg_scan_begin(const pg_task *t, pg_scan *x) {
  const pg_tensor *cells = &t->src[PG_CELLS], *write = &t->src[PG_WRITE];
  x->direct = cells->data != NULL;
  x->states = (float *)t->dst.data + x->n_rows * x->n_head * x->n_tokens * x->n_seqs;
  for (int64_t i = 0; i < x->n_seqs; i++) {
    const int64_t id = x->ids ? pg_scan_id(x->ids, i) : 0;
    if (id < 0 || id >= x->n_from) return pg_fail(t, PG_E_INDEX, id);
    if (!cells->data) continue;
    const int64_t to = pg_scan_id(write, i);
    if (to < 0 || to >= cells->ne[1]) return pg_fail(t, PG_E_INDEX, to);
    for (int64_t k = 0; k < x->n_seqs && x->direct; k++)
      x->direct = k == i || (pg_scan_id(write, k) != to && !(x->ids && pg_scan_id(x->ids, k) == to));
  }
  return PG_OK;
}

// The state of a sequence before its first token; and the place of its state after the last token.
PG_INLINE const float *pg_scan_from(const pg_scan *x, int64_t seq) {
  const int64_t id = x->ids ? pg_scan_id(x->ids, seq) : seq;
  return (const float *)x->from->data + id * x->n_head * x->n_rows * x->n;
}

PG_INLINE float *pg_scan_to(const pg_task *t, const pg_scan *x, int64_t seq) {
  if (x->direct) return (float *)(t->src[PG_CELLS].data + pg_scan_id(&t->src[PG_WRITE], seq) * t->src[PG_CELLS].nb[1]);
  return x->states + seq * x->n_head * x->n_rows * x->n;
}

// End a scan: all threads call it when they have done their share.
PG_INLINE void pg_scan_end(const pg_task *t, int ith, int nth, const pg_scan *x) {
  const pg_tensor *cells = &t->src[PG_CELLS], *write = &t->src[PG_WRITE];
  if (!cells->data || x->direct) return;
  pg_sync(t, nth);
  const pg_range r = pg_share(x->n_head * x->n_rows * x->n, ith, nth);
  for (int64_t i = 0; i < x->n_seqs; i++)
    memcpy((float *)(cells->data + pg_scan_id(write, i) * cells->nb[1]) + r.first, pg_scan_to(t, x, i) + r.first,
           (size_t)(r.last - r.first) * sizeof(float));
}

// One token of some heads of a sequence.
typedef struct pg_cell {
  int64_t head, n_heads, token, seq;
  const float *from; // [n_heads][n_rows][n] before it
  float *s;          // and after it, which may be the same
  int once;          // s will not be read soon
  float *y;          // [n_heads][n_rows]
} pg_cell;

typedef void (*pg_scan_step)(const pg_task *t, const pg_cell *c, float *work);

// All tokens of the heads that `at` names.
PG_INLINE void pg_scan_tokens(const pg_task *t, const pg_scan *x, const pg_cell *at, pg_scan_step step, float *work) {
  const int64_t head = x->n_rows * x->n, slot = x->n_seqs * x->n_head * head, row = x->n_head * x->n_rows;
  const size_t size = (size_t)(at->n_heads * head) * sizeof(float);
  pg_cell c = *at;
  c.s = pg_scan_to(t, x, c.seq) + c.head * head;
  c.from = pg_scan_from(x, c.seq) + c.head * head;
  c.once = x->direct && x->n_tokens == 1 && x->n % VF_N == 0 && (uintptr_t)c.s % sizeof(vf) == 0;
  for (c.token = 0; c.token < x->n_tokens; c.token++, c.from = c.s) {
    c.y = (float *)t->dst.data + (c.seq * x->n_tokens + c.token) * row + c.head * x->n_rows;
    step(t, &c, work);
    const int64_t ago = x->n_tokens - 1 - c.token;
    if (ago > 0 && ago < x->n_slots) memcpy(c.s + ago * slot, c.s, size);
  }
  for (int64_t ago = x->n_tokens; ago < x->n_slots; ago++) memset(c.s + ago * slot, 0, size);
}

PG_INLINE void pg_scan_run(const pg_task *t, int ith, int nth, const pg_scan *x, pg_scan_step step, float *work) {
  const int64_t blocks = (x->n_head + x->block - 1) / x->block;
  const pg_range r = pg_share(blocks * x->n_seqs, ith, nth);
  for (int64_t u = r.first; u < r.last; u++) {
    pg_cell c = {.head = u % blocks * x->block, .seq = u / blocks};
    c.n_heads = PG_MIN(x->block, x->n_head - c.head);
    pg_scan_tokens(t, x, &c, step, work);
  }
  vf_stream_end();
}

// What a token does to a state. With along = a . s before the change, row i becomes s * w + k * u[i]. In the form
// VALUE, u is c * (v - along), otherwise v. In the form BESIDE, b * along is added. Then the row is read: y[i] = r . s.
typedef enum pg_turn_form { PG_TURN_PLAIN, PG_TURN_VALUE, PG_TURN_BESIDE } pg_turn_form;

typedef struct pg_turn {
  const float *w, *k, *a, *b, *r; // [n]
  const float *v;                 // [n_rows]
  float c;
} pg_turn;

PG_INLINE void pg_sums(float *to, const vf *acc, int R) {
  if (R == 4) {
    vf_sum4(to, acc[0], acc[1], acc[2], acc[3]);
  } else {
    to[0] = vf_sum(acc[0]);
  }
}

enum { PG_TURN_AHEAD = 4096 }; // bytes of software prefetch

// R rows, 1 or 4, from row i on. once: past the caches.
PG_INLINE void pg_turn_part(const pg_cell *c, int64_t at, int64_t n, const pg_turn *x, int64_t i, float *y, int R,
                            pg_turn_form form, int once) {
  const int64_t whole = n / VF_N * VF_N;
  const int beside = form == PG_TURN_BESIDE;
  const float *from = c->from + at + i * n;
  float *s = c->s + at + i * n, along[4] = {0}, sum[4];
  vf acc[4], va[4], vv[4];
  if (form != PG_TURN_PLAIN) {
    for (int r = 0; r < R; r++) acc[r] = vf_zero();
    for (int64_t l = 0; l < whole; l += VF_N) {
      const vf a = vf_load(x->a + l);
      for (int r = 0; r < R; r++) acc[r] = vf_fma(vf_load(from + r * n + l), a, acc[r]);
    }
    pg_sums(along, acc, R);
    for (int64_t l = whole; l < n; l++)
      for (int r = 0; r < R; r++) along[r] += from[r * n + l] * x->a[l];
  }
  for (int r = 0; r < R; r++) {
    acc[r] = vf_zero(), va[r] = vf_set1(along[r]), vv[r] = vf_set1(x->v[i + r]);
    if (form == PG_TURN_VALUE) vv[r] = vf_set1(x->c) * (vv[r] - va[r]);
  }
  for (int64_t l = 0; l < whole; l += VF_N) {
    const vf w = vf_load(x->w + l), k = vf_load(x->k + l), b = beside ? vf_load(x->b + l) : vf_zero();
    const vf read = vf_load(x->r + l);
    for (int r = 0; r < R; r++) {
      vf z = vf_fma(vf_load(from + r * n + l), w, k * vv[r]);
      if (once) __builtin_prefetch((const char *)(from + r * n + l) + PG_TURN_AHEAD);
      if (beside) z = vf_fma(b, va[r], z);
      if (once)
        vf_stream(s + r * n + l, z);
      else
        vf_store(s + r * n + l, z);
      acc[r] = vf_fma(z, read, acc[r]);
    }
  }
  pg_sums(sum, acc, R);
  for (int64_t l = whole; l < n; l++)
    for (int r = 0; r < R; r++) {
      float *z = s + r * n + l;
      *z = from[r * n + l] * x->w[l] + x->k[l] * vv[r][0] + (beside ? x->b[l] * along[r] : 0);
      sum[r] += *z * x->r[l];
    }
  for (int r = 0; r < R; r++) y[i + r] = sum[r];
}

// Rows of a head whose state begins `at` floats after the first state of c.
PG_INLINE void pg_turn_rows(const pg_cell *c, int64_t at, int64_t n_rows, int64_t n, const pg_turn *x, float *y,
                            pg_turn_form form) {
  int64_t i = 0;
  if (c->once)
    for (; i + 4 <= n_rows; i += 4) pg_turn_part(c, at, n, x, i, y, 4, form, 1);
  for (; i + 4 <= n_rows; i += 4) pg_turn_part(c, at, n, x, i, y, 4, form, 0);
  for (; i < n_rows; i++) pg_turn_part(c, at, n, x, i, y, 1, form, 0);
}
