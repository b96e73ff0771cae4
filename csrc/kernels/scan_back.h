// The gradients of recurrences. From the last token to the first, the gradient of a state is what the token before
// gets, and what a token brought gets its own from that and from the state as it was. States are not kept: they are
// computed again from those before every chunk of tokens, about the square root of their number long.
#pragma once
#include "kernels/state.h"

// Rows of a state that go through all tokens together, so that their states stay in the cache: a multiple of 4.
enum { PG_BACK_ROWS = 16 };

// What a token does to a row s: along = a . s, u = v + c along, s = w s + k u + b along, and y = r . s is read.
typedef struct pg_back_kind {
  int delta, beside; // whether there is c; b. Without both, nothing is read along a
  int y_before;      // y = r . s of s as it was, plus own * v
  int rows_fade;     // each row has a w of its own: the rows are those of heads of one row
  int values_inside; // the state is stored with values side by side; otherwise with keys
} pg_back_kind;

// The recurrence: as pg_scan. gy has the gradients of results [n_rows, n_head, n_tokens, n_seqs], then n_slots times
// those of states.
typedef struct pg_back {
  int64_t n, n_rows, n_head, n_tokens, n_seqs, n_slots;
  const float *gy;
} pg_back;

// A token of a block of rows. Vectors are padded to whole registers, with zeros; rows to a multiple of 4.
typedef struct pg_back_token {
  const float *vecs[PG_VECS]; // w: [rows][n] when rows_fade
  float *memory[PG_VECS];     // for vectors that are computed, or padded
  float v[PG_BACK_ROWS], c, own;
  float kept[PG_BACK_ROWS];                   // for the op's own use
  float u[PG_BACK_ROWS], along[PG_BACK_ROWS]; // computed here
} pg_back_token;

// The gradients of what it brought, and that of its results.
typedef struct pg_back_grads {
  float *vecs[PG_VECS], v[PG_BACK_ROWS], y[PG_BACK_ROWS];
  double c, own;
} pg_back_grads;

typedef struct pg_back_block {
  int64_t head, row, rows, seq, token;
  void *own; // of the op
} pg_back_block;

typedef void (*pg_back_fill)(const pg_task *t, const pg_back_block *c, pg_back_token *token);
typedef void (*pg_back_finish)(const pg_task *t, const pg_back_block *c, const pg_back_token *token,
                               const pg_back_grads *g);

PG_INLINE int64_t pg_back_padded(int64_t n) { return (n + VF_N - 1) / VF_N * VF_N; }

PG_INLINE int64_t pg_back_chunk(int64_t n_tokens) {
  int64_t n = 1;
  while (n * n < n_tokens) n++;
  return n;
}

// Floats of vectors of a token or of its gradients.
PG_INLINE int64_t pg_back_vec_floats(int64_t n, int rows_fade) {
  return (PG_VECS - 1 + (rows_fade ? PG_BACK_ROWS : 1)) * pg_back_padded(n);
}

// Scratch bytes of a thread: states before chunks and within one, the gradient of a state, tokens of a chunk.
PG_INLINE int64_t pg_back_bytes(int64_t n, int64_t n_tokens, int rows_fade) {
  const int64_t chunk = pg_back_chunk(n_tokens), states = (n_tokens + chunk - 1) / chunk + chunk + 2;
  const int64_t floats = pg_plus(pg_times(states * PG_BACK_ROWS, pg_back_padded(n)),
                                 pg_times(chunk + 1, pg_back_vec_floats(n, rows_fade)));
  return pg_plus(pg_times(floats, sizeof(float)), pg_times(chunk, sizeof(pg_back_token))) / 64 * 64 + 64;
}

PG_INLINE void pg_back_vec(pg_back_token *to, int i, const float *x, int64_t n) {
  to->vecs[i] = n % VF_N ? memcpy(to->memory[i], x, (size_t)n * sizeof(float)) : x;
}

PG_INLINE void pg_back_add(float *to, const float *x, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] += x[i];
}

// The states after a token from those before it, as far as gradients need them.
PG_INLINE void pg_back_forward(pg_back_token *x, const float *from, float *to, int64_t n, int64_t rows,
                               pg_back_kind kind) {
  const int along = kind.delta || kind.beside;
  for (int64_t r = 0; r < rows; r += 4, from += 4 * n, to += 4 * n) {
    vf u[4], va[4], acc[4];
    if (along) {
      for (int i = 0; i < 4; i++) acc[i] = vf_zero();
      for (int64_t l = 0; l < n; l += VF_N) {
        const vf a = vf_load(x->vecs[PG_A] + l);
        for (int i = 0; i < 4; i++) acc[i] = vf_fma(vf_load(from + i * n + l), a, acc[i]);
      }
      vf_sum4(x->along + r, acc[0], acc[1], acc[2], acc[3]);
    }
    for (int i = 0; i < 4; i++) {
      x->u[r + i] = kind.delta ? x->v[r + i] + x->c * x->along[r + i] : x->v[r + i];
      u[i] = vf_set1(x->u[r + i]);
      va[i] = kind.beside ? vf_set1(x->along[r + i]) : vf_zero();
    }
    const float *w = x->vecs[PG_W] + (kind.rows_fade ? r * n : 0);
    for (int64_t l = 0; l < n; l += VF_N) {
      const vf k = vf_load(x->vecs[PG_K] + l), b = kind.beside ? vf_load(x->vecs[PG_B] + l) : vf_zero();
      for (int i = 0; i < 4; i++) {
        vf z = vf_fma(vf_load(from + i * n + l), vf_load(w + (kind.rows_fade ? i * n : 0) + l), k * u[i]);
        if (kind.beside) z = vf_fma(b, va[i], z);
        vf_store(to + i * n + l, z);
      }
    }
  }
}

// m, the gradient of the states after a token, becomes that of the states before it.
PG_INLINE void pg_back_step(const pg_back_token *x, pg_back_grads *g, const float *before, const float *after, float *m,
                            int64_t n, int64_t rows, pg_back_kind kind) {
  const int along = kind.delta || kind.beside;
  const float *pr = x->vecs[PG_R], *pk = x->vecs[PG_K], *pa = x->vecs[PG_A], *pb = x->vecs[PG_B];
  for (int64_t row = 0; row < rows; row += 4, before += 4 * n, after += 4 * n, m += 4 * n) {
    vf gy[4], u[4], va[4], of_a[4], acc[4], acc_b[4];
    float sum[4], sum_b[4] = {0};
    for (int i = 0; i < 4; i++) {
      gy[i] = vf_set1(g->y[row + i]), u[i] = vf_set1(x->u[row + i]);
      va[i] = kind.beside ? vf_set1(x->along[row + i]) : vf_zero();
      acc[i] = acc_b[i] = vf_zero();
    }
    for (int64_t l = 0; l < n; l += VF_N) {
      const vf r = vf_load(pr + l), k = vf_load(pk + l), b = kind.beside ? vf_load(pb + l) : vf_zero();
      vf gr = vf_load(g->vecs[PG_R] + l);
      for (int i = 0; i < 4; i++) {
        vf z = vf_load(m + i * n + l);
        gr = vf_fma(vf_load((kind.y_before ? before : after) + i * n + l), gy[i], gr);
        if (!kind.y_before) vf_store(m + i * n + l, z = vf_fma(r, gy[i], z));
        acc[i] = vf_fma(k, z, acc[i]);
        if (kind.beside) acc_b[i] = vf_fma(b, z, acc_b[i]);
      }
      vf_store(g->vecs[PG_R] + l, gr);
    }
    vf_sum4(sum, acc[0], acc[1], acc[2], acc[3]);
    if (kind.beside) vf_sum4(sum_b, acc_b[0], acc_b[1], acc_b[2], acc_b[3]);
    for (int i = 0; i < 4; i++) {
      g->v[row + i] = kind.y_before ? sum[i] + x->own * g->y[row + i] : sum[i];
      if (kind.y_before) g->own += (double)g->y[row + i] * x->v[row + i];
      if (kind.delta) g->c += (double)sum[i] * x->along[row + i];
      of_a[i] = along ? vf_set1(kind.delta ? x->c * sum[i] + sum_b[i] : sum_b[i]) : vf_zero();
    }
    const float *w = x->vecs[PG_W] + (kind.rows_fade ? row * n : 0);
    float *pgw = g->vecs[PG_W] + (kind.rows_fade ? row * n : 0);
    for (int64_t l = 0; l < n; l += VF_N) {
      vf gw = kind.rows_fade ? vf_zero() : vf_load(pgw + l), gk = vf_load(g->vecs[PG_K] + l);
      vf ga = along ? vf_load(g->vecs[PG_A] + l) : vf_zero(), gb = kind.beside ? vf_load(g->vecs[PG_B] + l) : vf_zero();
      for (int i = 0; i < 4; i++) {
        const vf s = vf_load(before + i * n + l), z = vf_load(m + i * n + l);
        vf next = z * vf_load(w + (kind.rows_fade ? i * n : 0) + l);
        gk = vf_fma(u[i], z, gk);
        if (kind.rows_fade)
          vf_store(pgw + i * n + l, s * z);
        else
          gw = vf_fma(s, z, gw);
        if (along) {
          ga = vf_fma(s, of_a[i], ga);
          next = vf_fma(vf_load(pa + l), of_a[i], next);
        }
        if (kind.beside) gb = vf_fma(va[i], z, gb);
        if (kind.y_before) next = vf_fma(vf_load(pr + l), gy[i], next);
        vf_store(m + i * n + l, next);
      }
      vf_store(g->vecs[PG_K] + l, gk);
      if (!kind.rows_fade) vf_store(pgw + l, gw);
      if (along) vf_store(g->vecs[PG_A] + l, ga);
      if (kind.beside) vf_store(g->vecs[PG_B] + l, gb);
    }
  }
}

// The place of element 0 of a block's rows in states; of each row and element after it.
typedef struct pg_back_lies {
  int64_t first, row, element;
} pg_back_lies;

PG_INLINE pg_back_lies pg_back_lies_of(const pg_back *x, const pg_back_block *c, pg_back_kind kind) {
  const int64_t head = c->head * x->n_rows * x->n;
  return kind.values_inside ? (pg_back_lies){head + c->row, 1, x->n_rows}
                            : (pg_back_lies){head + c->row * x->n, x->n, 1};
}

// The rows of a block, each of n_m floats, += those of states.
PG_INLINE void pg_back_get(float *m, int64_t n_m, const float *from, const pg_back *x, const pg_back_block *c,
                           pg_back_kind kind) {
  const pg_back_lies at = pg_back_lies_of(x, c, kind);
  for (int64_t i = 0; i < c->rows; i++)
    for (int64_t j = 0; j < x->n; j++) m[i * n_m + j] += from[at.first + i * at.row + j * at.element];
}

// The gradients of a block of rows, from the state `from` of its sequence. That of the state is added to `to`. Memory
// for it: pg_back_bytes.
PG_INLINE void pg_back_run(const pg_task *t, const pg_back *x, pg_back_block *c, const float *from, float *to,
                           char *work, pg_back_fill fill, pg_back_finish finish, pg_back_kind kind) {
  const int64_t n = pg_back_padded(x->n), rows = (c->rows + 3) / 4 * 4, size = PG_BACK_ROWS * n;
  const int64_t chunk = pg_back_chunk(x->n_tokens), chunks = (x->n_tokens + chunk - 1) / chunk;
  const int64_t vecs = pg_back_vec_floats(x->n, kind.rows_fade), state = x->n_head * x->n_rows * x->n;
  pg_back_token *tokens = (pg_back_token *)work;
  float *saved = (float *)(tokens + chunk), *within = saved + chunks * size, *m = within + (chunk + 1) * size;
  float *memory = m + size;
  memset(tokens, 0, (size_t)chunk * sizeof *tokens);
  memset(saved, 0, (size_t)((chunks + chunk + 2) * size + (chunk + 1) * vecs) * sizeof *saved);
  pg_back_grads g = {{0}, {0}, {0}, 0, 0};
  for (int64_t i = 0; i <= chunk; i++)
    for (int j = 0; j < PG_VECS; j++) { // w is last: it may be as large as all rows
      float *at = memory + i * vecs + (j == PG_W ? PG_VECS - 1 : j - 1) * n;
      if (i < chunk)
        tokens[i].memory[j] = at;
      else
        g.vecs[j] = at;
    }
  pg_back_get(saved, n, from, x, c, kind);
  for (int64_t i = 0; i + 1 < chunks; i++) {
    const float *s = saved + i * size;
    for (c->token = i * chunk; c->token < (i + 1) * chunk; c->token++) {
      fill(t, c, tokens);
      pg_back_forward(tokens, s, saved + (i + 1) * size, n, rows, kind);
      s = saved + (i + 1) * size;
    }
  }
  for (int64_t i = chunks - 1; i >= 0; i--) {
    const int64_t first = i * chunk, count = PG_MIN(chunk, x->n_tokens - first);
    memcpy(within, saved + i * size, (size_t)size * sizeof *within);
    for (int64_t k = 0; k < count; k++) {
      c->token = first + k;
      fill(t, c, tokens + k);
      pg_back_forward(tokens + k, within + k * size, within + (k + 1) * size, n, rows, kind);
    }
    for (int64_t k = count - 1; k >= 0; k--) {
      c->token = first + k;
      const int64_t ago = x->n_tokens - 1 - c->token, results = x->n_rows * x->n_head;
      if (ago < x->n_slots)
        pg_back_get(m, n, x->gy + results * x->n_tokens * x->n_seqs + (ago * x->n_seqs + c->seq) * state, x, c, kind);
      memcpy(g.y, x->gy + (c->seq * x->n_tokens + c->token) * results + c->head * x->n_rows + c->row,
             (size_t)c->rows * sizeof *g.y);
      memset(g.vecs[PG_K], 0, (size_t)(kind.rows_fade ? PG_VECS - 1 : PG_VECS) * n * sizeof(float));
      g.c = g.own = 0;
      pg_back_step(tokens + k, &g, within + k * size, within + (k + 1) * size, m, n, rows, kind);
      finish(t, c, tokens + k, &g);
    }
  }
  const pg_back_lies at = pg_back_lies_of(x, c, kind);
  for (int64_t i = 0; i < c->rows; i++)
    for (int64_t j = 0; j < x->n; j++) to[at.first + i * at.row + j * at.element] += m[i * n + j];
}

// Zeros in dst, to which all gradients are added.
PG_INLINE void pg_back_clear(const pg_task *t, int ith, int nth) {
  const pg_range r = pg_share(t->dst.ne[0], ith, nth);
  memset((float *)t->dst.data + r.first, 0, (size_t)(r.last - r.first) * sizeof(float));
  pg_sync(t, nth);
}
