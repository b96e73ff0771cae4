// Shared by state-space models and linear attention: states that tokens change one after the other.
#pragma once
#include "kernel.h"

// The vectors of keys that a token may bring: the state fades by w, the token writes under k, reads with r; it reads
// along a, too, and writes what it has read there under b.
enum { PG_W, PG_K, PG_R, PG_A, PG_B, PG_VECS };

// The recurrence of an op. Each head of each sequence has a state of n_rows rows of n elements; each token gives it
// n_rows results. dst holds the results [n_rows, n_head, n_tokens, n_seqs], then n_slots times states
// [n, n_rows, n_head, n_seqs]: the last ones, those of a token earlier, and so on; zeros from before the first token.
typedef struct pg_scan {
  int64_t n, n_rows, n_head, n_tokens, n_seqs, n_slots;
  const pg_tensor *from; // the states before, dense
  int64_t n_from;        // number of these states
  const pg_tensor *ids;  // the state with which each sequence begins; NULL: the one with its number
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

// A token of a head of a sequence.
typedef struct pg_cell {
  int64_t head, token, seq;
} pg_cell;

// What a token does to a state. It first reads along = a . s. Then each row of keys becomes s * w + k * v, and
// is read: y = r . s.
typedef enum pg_turn_form {
  PG_TURN_PLAIN,  // nothing is read along a
  PG_TURN_VALUE,  // v is replaced by c * (v - along)
  PG_TURN_BESIDE, // b * along is added to the row
  PG_TURN_INSIDE  // values lie side by side in the state, which is read before it changes: y = c * v + r . s
} pg_turn_form;

typedef struct pg_turn {
  const float *w, *k, *a, *b, *r; // [n]
  const float *v;                 // [n_rows]
  float c;
} pg_turn;

// Find what a token brings. `memory` is for the vectors that are computed.
typedef void (*pg_turn_of)(const pg_task *t, const pg_cell *c, pg_turn *turn, float *memory);

enum { PG_TURNS = 8 }; // tokens whose vectors stay in the cache while rows of the state meet all of them

// Tokens of one head: their states and results.
typedef struct pg_turns {
  pg_turn turn[PG_TURNS];
  int64_t n_turns;
  int64_t n, n_rows;
  const float *from; // the state before
  float *s;          // and after, which may be the same
  int once;          // s will not be read soon
  float *y;          // [n_rows] of the first token
  int64_t y_step;    // from one token to the next
} pg_turns;

PG_INLINE void pg_sums(float *to, const vf *acc, int R) {
  if (R == 4) {
    vf_sum4(to, acc[0], acc[1], acc[2], acc[3]);
  } else {
    to[0] = vf_sum(acc[0]);
  }
}

#define PG_UNROLL _Pragma("GCC unroll 8")

enum {
  PG_TURN_AHEAD = 4096, // bytes of software prefetch
  PG_NEAR = 32          // rows that stay in the L1 cache
};

// along[r] = a . row r, for R rows, 1 or 4.
PG_INLINE void pg_turn_along(const float *a, const float *rows, int64_t n, float *along, int R) {
  const int64_t whole = n / VF_N * VF_N;
  vf acc[4];
  for (int r = 0; r < R; r++) acc[r] = vf_zero();
  for (int64_t l = 0; l < whole; l += VF_N) {
    const vf x = vf_load(a + l);
    for (int r = 0; r < R; r++) acc[r] = vf_fma(vf_load(rows + r * n + l), x, acc[r]);
  }
  pg_sums(along, acc, R);
  for (int64_t l = whole; l < n; l++)
    for (int r = 0; r < R; r++) along[r] += rows[r * n + l] * a[l];
}

// One token and R rows. `along` is what it reads before the change; with `next`, it becomes what the next token reads
// along that vector (then the rows need not be loaded once more).
PG_INLINE void pg_turn_rows(const pg_turn *x, const float *next, const float *from, float *s, int64_t n, const float *v,
                            float *along, float *y, int R, pg_turn_form form, int once) {
  const int64_t whole = n / VF_N * VF_N;
  const int beside = form == PG_TURN_BESIDE;
  float sum[4];
  vf acc[4], more[4], va[4], vv[4];
  for (int r = 0; r < R; r++) {
    acc[r] = more[r] = vf_zero(), va[r] = vf_set1(along[r]), vv[r] = vf_set1(v[r]);
    if (form == PG_TURN_VALUE) vv[r] = vf_set1(x->c) * (vv[r] - va[r]);
  }
  for (int64_t l = 0; l < whole; l += VF_N) {
    const vf w = vf_load(x->w + l), k = vf_load(x->k + l), b = beside ? vf_load(x->b + l) : vf_zero();
    const vf read = vf_load(x->r + l), a = next ? vf_load(next + l) : vf_zero();
    for (int r = 0; r < R; r++) {
      vf z = vf_fma(vf_load(from + r * n + l), w, k * vv[r]);
      if (once) __builtin_prefetch((const char *)(from + r * n + l) + PG_TURN_AHEAD);
      if (beside) z = vf_fma(b, va[r], z);
      if (once)
        vf_stream(s + r * n + l, z);
      else
        vf_store(s + r * n + l, z);
      acc[r] = vf_fma(z, read, acc[r]);
      if (next) more[r] = vf_fma(z, a, more[r]);
    }
  }
  pg_sums(sum, acc, R);
  for (int64_t l = whole; l < n; l++)
    for (int r = 0; r < R; r++) {
      float *z = s + r * n + l;
      *z = from[r * n + l] * x->w[l] + x->k[l] * vv[r][0] + (beside ? x->b[l] * along[r] : 0);
      sum[r] += *z * x->r[l];
    }
  for (int r = 0; r < R; r++) y[r] = sum[r];
  if (!next) return;
  pg_sums(along, more, R);
  for (int64_t l = whole; l < n; l++)
    for (int r = 0; r < R; r++) along[r] += s[r * n + l] * next[l];
}

// All tokens and `rows` rows from row i on, R at a time: PG_NEAR rows at most. Rows of a token do not wait for each
// other.
PG_INLINE void pg_turns_rows(const pg_turns *c, int64_t i, int64_t rows, int R, pg_turn_form form, int once) {
  const int64_t n = c->n;
  const int reads = form != PG_TURN_PLAIN;
  float *s = c->s + i * n, along[PG_NEAR] = {0};
  const float *from = c->from + i * n;
  for (int64_t r = 0; reads && r < rows; r += R) pg_turn_along(c->turn[0].a, from + r * n, n, along + r, R);
  for (int64_t t = 0; t < c->n_turns; t++, from = s) {
    const pg_turn *x = &c->turn[t];
    const int last = t + 1 == c->n_turns || !reads;
    float *y = c->y + t * c->y_step + i;
    // Two loops, so that each is compiled for its case.
    for (int64_t r = 0; last && r < rows; r += R)
      pg_turn_rows(x, NULL, from + r * n, s + r * n, n, x->v + i + r, along + r, y + r, R, form, once);
    for (int64_t r = 0; !last && r < rows; r += R)
      pg_turn_rows(x, x[1].a, from + r * n, s + r * n, n, x->v + i + r, along + r, y + r, R, form, once);
  }
}

// All tokens and R rows from row i on, which have L registers each and stay in registers. It does what pg_turns_rows
// does, in the same order.
PG_INLINE void pg_turns_held(const pg_turns *c, int64_t i, int R, int L, pg_turn_form form) {
  const int beside = form == PG_TURN_BESIDE, n = L * VF_N;
  vf z[4][8];
  for (int r = 0; r < R; r++) PG_UNROLL for (int l = 0; l < L; l++) z[r][l] = vf_load(c->from + (i + r) * n + l * VF_N);
  for (int64_t t = 0; t < c->n_turns; t++) {
    const pg_turn *x = &c->turn[t];
    float along[4] = {0}, sum[4];
    vf acc[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()}, va[4], vv[4];
    if (form != PG_TURN_PLAIN) {
      PG_UNROLL for (int l = 0; l < L; l++) {
        const vf a = vf_load(x->a + l * VF_N);
        PG_UNROLL for (int r = 0; r < R; r++) acc[r] = vf_fma(z[r][l], a, acc[r]);
      }
      vf_sum4(along, acc[0], acc[1], acc[2], acc[3]);
    }
    PG_UNROLL for (int r = 0; r < R; r++) {
      acc[r] = vf_zero(), va[r] = vf_set1(along[r]), vv[r] = vf_set1(x->v[i + r]);
      if (form == PG_TURN_VALUE) vv[r] = vf_set1(x->c) * (vv[r] - va[r]);
    }
    PG_UNROLL for (int l = 0; l < L; l++) {
      const vf w = vf_load(x->w + l * VF_N), k = vf_load(x->k + l * VF_N), read = vf_load(x->r + l * VF_N);
      PG_UNROLL for (int r = 0; r < R; r++) {
        z[r][l] = vf_fma(z[r][l], w, k * vv[r]);
        if (beside) z[r][l] = vf_fma(vf_load(x->b + l * VF_N), va[r], z[r][l]);
        acc[r] = vf_fma(z[r][l], read, acc[r]);
      }
    }
    vf_sum4(sum, acc[0], acc[1], acc[2], acc[3]);
    for (int r = 0; r < R; r++) c->y[t * c->y_step + i + r] = sum[r];
  }
  for (int r = 0; r < R; r++) PG_UNROLL for (int l = 0; l < L; l++) vf_store(c->s + (i + r) * n + l * VF_N, z[r][l]);
}

enum { PG_INSIDE = 8 }; // keys whose registers of values stay in registers for all tokens

// All tokens, `n_i` keys from key `first` on (PG_INSIDE at most), and N registers of values from value `at` on, when
// values lie side by side. Results of the keys before are in y.
PG_INLINE void pg_turns_inside(const pg_turns *c, int64_t at, int64_t first, int n_i, int N) {
  const int64_t step = c->n_rows;
  const float *from = c->from + at + first * step;
  float *s = c->s + at + first * step;
  vf z[PG_INSIDE][2];
  PG_UNROLL for (int i = 0; i < n_i; i++) for (int j = 0; j < N; j++) z[i][j] = vf_load(from + i * step + j * VF_N);
  for (int64_t t = 0; t < c->n_turns; t++) {
    const pg_turn *x = &c->turn[t];
    float *y = c->y + t * c->y_step + at;
    vf acc[2], v[2];
    for (int j = 0; j < N; j++) {
      v[j] = vf_load(x->v + at + j * VF_N);
      acc[j] = vf_set1(x->c) * v[j];
      if (first) acc[j] = vf_load(y + j * VF_N);
    }
    PG_UNROLL for (int i = 0; i < n_i; i++) {
      const vf w = vf_set1(x->w[first + i]), k = vf_set1(x->k[first + i]), r = vf_set1(x->r[first + i]);
      for (int j = 0; j < N; j++) {
        acc[j] = vf_fma(z[i][j], r, acc[j]);
        z[i][j] = vf_fma(z[i][j], w, k * v[j]);
      }
    }
    for (int j = 0; j < N; j++) vf_store(y + j * VF_N, acc[j]);
  }
  PG_UNROLL for (int i = 0; i < n_i; i++) for (int j = 0; j < N; j++) vf_store(s + i * step + j * VF_N, z[i][j]);
}

PG_INLINE void pg_turns_inside_all(const pg_turns *c, int64_t at, int N) {
  int64_t i = 0;
  for (; i + PG_INSIDE <= c->n; i += PG_INSIDE) pg_turns_inside(c, at, i, PG_INSIDE, N);
  for (; i < c->n; i++) pg_turns_inside(c, at, i, 1, N);
}

// The same for the value `at` alone.
PG_INLINE void pg_turns_inside_one(const pg_turns *c, int64_t at) {
  const float *from = c->from + at;
  for (int64_t t = 0; t < c->n_turns; t++, from = c->s + at) {
    const pg_turn *x = &c->turn[t];
    float sum = x->c * x->v[at];
    for (int64_t i = 0; i < c->n; i++) {
      const float z = from[i * c->n_rows];
      sum += z * x->r[i];
      c->s[at + i * c->n_rows] = z * x->w[i] + x->k[i] * x->v[at];
    }
    c->y[t * c->y_step + at] = sum;
  }
}

// A row is read and written by one token after the other, in the same way whatever the number of tokens: so a token's
// result does not depend on how many are evaluated at once.
PG_INLINE void pg_turns_run(const pg_turns *c, pg_turn_form form) {
  int64_t i = 0;
  if (form == PG_TURN_INSIDE) {
    for (; i + 2 * VF_N <= c->n_rows; i += 2 * VF_N) pg_turns_inside_all(c, i, 2);
    for (; i + VF_N <= c->n_rows; i += VF_N) pg_turns_inside_all(c, i, 1);
    for (; i < c->n_rows; i++) pg_turns_inside_one(c, i);
    return;
  }
  const int64_t fours = c->n_rows / 4 * 4;
  if (VF_N == 16 && c->n_turns > 1) {
    if (c->n == 4 * VF_N)
      for (; i < fours; i += 4) pg_turns_held(c, i, 4, 4, form);
    if (c->n == 8 * VF_N && form == PG_TURN_PLAIN)
      for (; i < fours; i += 2) pg_turns_held(c, i, 2, 8, form);
  }
  for (int64_t n; i < fours; i += n) {
    n = PG_MIN(PG_NEAR, fours - i);
    if (c->once)
      pg_turns_rows(c, i, n, 4, form, 1);
    else
      pg_turns_rows(c, i, n, 4, form, 0);
  }
  for (; i < c->n_rows; i++) pg_turns_rows(c, i, 1, 1, form, 0);
}

// Run a scan. `of` finds what tokens bring; it may compute vectors in `floats` floats for each of PG_TURNS tokens at
// `work`, which is the thread's own.
PG_INLINE void pg_scan_run(const pg_task *t, int ith, int nth, const pg_scan *x, pg_turn_of of, float *work,
                           int64_t floats, pg_turn_form form) {
  const int64_t head = x->n_rows * x->n, slot = x->n_seqs * x->n_head * head, row = x->n_head * x->n_rows;
  const int64_t per = x->n_slots > 1 ? 1 : PG_TURNS; // a state between two tokens is kept
  const size_t size = (size_t)head * sizeof(float);
  pg_turns turns = {.n = x->n, .n_rows = x->n_rows, .y_step = row};
  const pg_range r = pg_share(x->n_head * x->n_seqs, ith, nth);
  for (int64_t u = r.first; u < r.last; u++) {
    pg_cell c = {.head = u % x->n_head, .seq = u / x->n_head};
    turns.s = pg_scan_to(t, x, c.seq) + c.head * head;
    turns.from = pg_scan_from(x, c.seq) + c.head * head;
    turns.once = x->direct && x->n_tokens == 1 && x->n % VF_N == 0 && (uintptr_t)turns.s % sizeof(vf) == 0;
    for (int64_t first = 0; first < x->n_tokens; first += per, turns.from = turns.s) {
      turns.n_turns = PG_MIN(per, x->n_tokens - first);
      turns.y = (float *)t->dst.data + (c.seq * x->n_tokens + first) * row + c.head * x->n_rows;
      for (int64_t i = 0; i < turns.n_turns; i++) {
        c.token = first + i;
        of(t, &c, &turns.turn[i], work + i * floats);
      }
      pg_turns_run(&turns, form);
      const int64_t ago = x->n_tokens - 1 - first;
      if (ago > 0 && ago < x->n_slots) memcpy(turns.s + ago * slot, turns.s, size);
    }
    for (int64_t ago = x->n_tokens; ago < x->n_slots; ago++) memset(turns.s + ago * slot, 0, size);
  }
  vf_stream_end();
}
