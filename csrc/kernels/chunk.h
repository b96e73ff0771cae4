// Recurrences over several tokens (a chunk) at a time. A chunk reads the state before it and writes the state after it
// by products with vectors that all values share. How tokens within the chunk see each other is in small triangular
// matrices.
#pragma once
#include "kernels/state.h"

enum { PG_CHUNK = VF_N == 16 ? 8 : 4, PG_CHUNK_KEYS = 256, PG_KEYS_ROW = PG_CHUNK_KEYS + 16 };

// What a token does to the state s: s = w * s + k v^T, y = r s. In the other forms it also reads a vector `along` = a
// s. DELTA: it writes v + c * along instead of v. BESIDE: it writes b along^T in addition.
typedef enum pg_chunk_form { PG_CHUNK_PLAIN, PG_CHUNK_DELTA, PG_CHUNK_BESIDE } pg_chunk_form;

typedef struct pg_chunk_kind {
  pg_chunk_form form;
  int y_before, a_before; // the state is read before it fades
  int values_inside;      // the state is stored with values side by side; otherwise with keys
} pg_chunk_kind;

// A token of a head: its vectors of keys, its values, and c. `own` is the factor with which it reads what it writes
// itself: r . k unless `has_own`. `memory` holds the vectors that are computed, or must be padded.
enum { PG_W, PG_K, PG_R, PG_A, PG_B, PG_VECS };
typedef struct pg_chunk_token {
  const float *vecs[PG_VECS], *v; // [n, padded], [n_rows, padded]
  float c, own;
  int has_own;
  float memory[PG_VECS][PG_KEYS_ROW], *values; // 0 from element n on
} pg_chunk_token;

typedef void (*pg_chunk_fill)(const pg_task *t, const pg_cell *c, pg_chunk_token *token);

typedef struct pg_chunk_work {
  float read[2 * PG_CHUNK][PG_KEYS_ROW], write[2 * PG_CHUNK][PG_KEYS_ROW], fade[PG_KEYS_ROW];
  float yk[PG_CHUNK][PG_CHUNK], yb[PG_CHUNK][PG_CHUNK], ak[PG_CHUNK][PG_CHUNK], ab[PG_CHUNK][PG_CHUNK];
  pg_chunk_token tokens[PG_CHUNK];
} pg_chunk_work;

static int64_t pg_chunk_rows(int64_t n_rows) { return (n_rows + VF_N - 1) / VF_N * VF_N; }

// Bytes of work for a thread: the fixed part, values of a chunk, the state, tiles of [n][VF_N], and what a step needs.
static int64_t pg_chunk_bytes(int64_t n, int64_t n_rows, int64_t step_floats) {
  const int64_t floats = pg_plus(pg_times(pg_chunk_rows(n_rows), PG_CHUNK + n), step_floats);
  return pg_plus(sizeof(pg_chunk_work), pg_times(floats, sizeof(float)));
}

// Rows of x as they are, or padded.
PG_INLINE const float *pg_chunk_padded(float *memory, const float *x, int64_t n) {
  return n % VF_N ? memcpy(memory, x, (size_t)n * sizeof(float)) : x;
}

PG_INLINE void pg_chunk_vec(pg_chunk_token *to, int i, const float *x, int64_t n) {
  to->vecs[i] = pg_chunk_padded(to->memory[i], x, n);
}

static int pg_chunk_fits(const pg_scan *x) {
  return x->n_tokens >= PG_CHUNK && x->n_slots == 1 && x->n <= PG_CHUNK_KEYS && x->n_rows >= VF_N / 2;
}

// to[t][s], s <= t: how much token t reads (by r, or a) of the vector that token s has written (by k, or b), and that
// has faded since.
PG_INLINE void pg_chunk_triangle(const pg_chunk_work *m, float (*to)[PG_CHUNK], int64_t n, int by_a, int of_b,
                                 int before) {
  vf acc[PG_CHUNK][PG_CHUNK];
  for (int t = 0; t < PG_CHUNK; t++)
    for (int s = 0; s < PG_CHUNK; s++) acc[t][s] = vf_zero();
  for (int64_t l = 0; l < n; l += VF_N) {
    vf r[PG_CHUNK], w[PG_CHUNK];
    for (int t = 0; t < PG_CHUNK; t++) {
      r[t] = vf_load(m->tokens[t].vecs[by_a ? PG_A : PG_R] + l);
      w[t] = vf_load(m->tokens[t].vecs[PG_W] + l);
    }
#pragma GCC unroll 8
    for (int s = 0; s < PG_CHUNK; s++) {
      vf z = vf_load(m->tokens[s].vecs[of_b ? PG_B : PG_K] + l);
      acc[s][s] = vf_fma(r[s], z, acc[s][s]);
#pragma GCC unroll 8
      for (int t = s + 1; t < PG_CHUNK; t++) {
        const vf faded = z * w[t];
        acc[t][s] = vf_fma(r[t], before ? z : faded, acc[t][s]);
        z = faded;
      }
    }
  }
  for (int t = 0; t < PG_CHUNK; t++)
    for (int s = 0; s <= t; s += 4) vf_sum4(to[t] + s, acc[t][s], acc[t][s + 1], acc[t][s + 2], acc[t][s + 3]);
}

// Compute the vectors for reading and writing, and the triangles. n is padded, with zeros.
PG_INLINE void pg_chunk_prepare(pg_chunk_work *m, int64_t n, pg_chunk_kind kind) {
  const int delta = kind.form != PG_CHUNK_PLAIN, beside = kind.form == PG_CHUNK_BESIDE;
  for (int64_t l = 0; l < n; l += VF_N) {
    vf fade = vf_set1(1.0f);
    for (int t = 0; t < PG_CHUNK; t++) {
      const pg_chunk_token *x = &m->tokens[t];
      const vf after = fade * vf_load(x->vecs[PG_W] + l);
      vf_store(m->read[t] + l, vf_load(x->vecs[PG_R] + l) * (kind.y_before ? fade : after));
      if (delta) vf_store(m->read[PG_CHUNK + t] + l, vf_load(x->vecs[PG_A] + l) * (kind.a_before ? fade : after));
      fade = after;
    }
    vf_store(m->fade + l, fade);
    fade = vf_set1(1.0f);
    for (int t = PG_CHUNK - 1; t >= 0; t--) {
      const pg_chunk_token *x = &m->tokens[t];
      vf_store(m->write[t] + l, vf_load(x->vecs[PG_K] + l) * fade);
      if (beside) vf_store(m->write[PG_CHUNK + t] + l, vf_load(x->vecs[PG_B] + l) * fade);
      fade = fade * vf_load(x->vecs[PG_W] + l);
    }
  }
  pg_chunk_triangle(m, m->yk, n, 0, 0, kind.y_before);
  if (delta) pg_chunk_triangle(m, m->ak, n, 1, 0, kind.a_before);
  if (beside) pg_chunk_triangle(m, m->yb, n, 0, 1, kind.y_before);
  if (beside) pg_chunk_triangle(m, m->ab, n, 1, 1, kind.a_before);
  for (int t = 0; t < PG_CHUNK; t++)
    if (m->tokens[t].has_own) m->yk[t][t] = m->tokens[t].own;
}

// One tile of the state: values v .. v + VF_N of the chunk's tokens. y: [PG_CHUNK][VF_N].
PG_INLINE void pg_chunk_tile(const pg_chunk_work *m, float *s, int64_t n, int64_t v, float *y, pg_chunk_form form) {
  vf read[PG_CHUNK], along[PG_CHUNK], u[PG_CHUNK];
  for (int t = 0; t < PG_CHUNK; t++) read[t] = along[t] = vf_zero();
  for (int64_t j = 0; j < n; j++) {
    const vf z = vf_load(s + j * VF_N);
    for (int t = 0; t < PG_CHUNK; t++) read[t] = vf_fma(z, vf_set1(m->read[t][j]), read[t]);
    if (form != PG_CHUNK_PLAIN)
      for (int t = 0; t < PG_CHUNK; t++) along[t] = vf_fma(z, vf_set1(m->read[PG_CHUNK + t][j]), along[t]);
  }
#pragma GCC unroll 8
  for (int t = 0; t < PG_CHUNK; t++) {
    u[t] = vf_load(m->tokens[t].v + v);
    if (form != PG_CHUNK_PLAIN) {
#pragma GCC unroll 8
      for (int i = 0; i < t; i++) {
        along[t] = vf_fma(u[i], vf_set1(m->ak[t][i]), along[t]);
        if (form == PG_CHUNK_BESIDE) along[t] = vf_fma(along[i], vf_set1(m->ab[t][i]), along[t]);
      }
      if (form == PG_CHUNK_DELTA) u[t] = vf_fma(along[t], vf_set1(m->tokens[t].c), u[t]);
    }
#pragma GCC unroll 8
    for (int i = 0; i <= t; i++) {
      read[t] = vf_fma(u[i], vf_set1(m->yk[t][i]), read[t]);
      if (form == PG_CHUNK_BESIDE) read[t] = vf_fma(along[i], vf_set1(m->yb[t][i]), read[t]);
    }
    vf_store(y + t * VF_N, read[t]);
  }
  for (int64_t j = 0; j < n; j++) {
    vf z = vf_load(s + j * VF_N) * vf_set1(m->fade[j]);
    for (int t = 0; t < PG_CHUNK; t++) z = vf_fma(u[t], vf_set1(m->write[t][j]), z);
    if (form == PG_CHUNK_BESIDE)
      for (int t = 0; t < PG_CHUNK; t++) z = vf_fma(along[t], vf_set1(m->write[PG_CHUNK + t][j]), z);
    vf_store(s + j * VF_N, z);
  }
}

// Move the state of a head into tiles, or (`out`) back.
PG_INLINE void pg_chunk_move(float *tiles, float *s, int64_t n, int64_t n_rows, int values_inside, int out) {
  for (int64_t v = 0; v < n_rows; v += VF_N, tiles += n * VF_N) {
    const int64_t count = PG_MIN(VF_N, n_rows - v);
    for (int64_t j = 0; j < n; j++)
      for (int64_t i = 0; i < count; i++) {
        float *x = values_inside ? s + j * n_rows + v + i : s + (v + i) * n + j;
        if (out)
          *x = tiles[j * VF_N + i];
        else
          tiles[j * VF_N + i] = *x;
      }
  }
}

// The same as pg_scan_run, for sizes that pg_chunk_fits. When results or state of a head are not all finite, its tokens
// are computed again one after the other, because sums over a chunk spread NaN to other places.
PG_INLINE void pg_chunk_run(const pg_task *t, int ith, int nth, const pg_scan *x, pg_scan_step step,
                            int64_t step_floats, pg_chunk_fill fill, pg_chunk_kind kind) {
  const int64_t n = x->n, n_rows = x->n_rows, head = n_rows * n, row = x->n_head * n_rows;
  const int64_t rows = pg_chunk_rows(n_rows), padded = (n + VF_N - 1) / VF_N * VF_N;
  pg_chunk_work *m = (pg_chunk_work *)(t->work + ith * pg_chunk_bytes(n, n_rows, step_floats));
  float *values = (float *)(m + 1), *tiles = values + rows * PG_CHUNK;
  float *y = (float *)t->dst.data;
  memset(m->tokens, 0, sizeof m->tokens);
  memset(values, 0, (size_t)(rows * (PG_CHUNK + n)) * sizeof(float));
  for (int i = 0; i < PG_CHUNK; i++) m->tokens[i].values = values + i * rows;
  const pg_range r = pg_share(x->n_head * x->n_seqs, ith, nth);
  for (int64_t i = r.first; i < r.last; i++) {
    pg_cell c = {.head = i % x->n_head, .n_heads = 1, .seq = i / x->n_head};
    int finite = 1;
    pg_chunk_move(tiles, (float *)pg_scan_from(x, c.seq) + c.head * head, n, n_rows, kind.values_inside, 0);
    for (int64_t first = 0; first < x->n_tokens; first += PG_CHUNK) {
      const int64_t last = PG_MIN(first + PG_CHUNK, x->n_tokens);
      for (int k = 0; k < PG_CHUNK; k++) {
        pg_chunk_token *token = &m->tokens[k];
        c.token = first + k;
        if (c.token < last) {
          fill(t, &c, token);
        } else { // padding: a token that reads and writes nothing, and fades nothing
          float *v = token->values;
          memset(token, 0, sizeof *token);
          memset(v, 0, (size_t)rows * sizeof(float));
          token->v = token->values = v;
          for (int64_t l = 0; l < n; l++) token->memory[PG_W][l] = 1;
          for (int l = 0; l < PG_VECS; l++) token->vecs[l] = token->memory[l];
        }
      }
      pg_chunk_prepare(m, padded, kind);
      for (int64_t v = 0; v < rows; v += VF_N) {
        float part[PG_CHUNK * VF_N];
        pg_chunk_tile(m, tiles + v * n, n, v, part, kind.form);
        finite &= pg_all_finite(part, PG_CHUNK * VF_N);
        const size_t size = (size_t)PG_MIN(VF_N, n_rows - v) * sizeof(float);
        for (int64_t k = first; k < last; k++)
          memcpy(y + (c.seq * x->n_tokens + k) * row + c.head * n_rows + v, part + (k - first) * VF_N, size);
      }
    }
    if (finite && pg_all_finite(tiles, rows * n))
      pg_chunk_move(tiles, pg_scan_to(t, x, c.seq) + c.head * head, n, n_rows, kind.values_inside, 1);
    else
      pg_scan_tokens(t, x, &c, step, tiles + rows * n);
  }
}
