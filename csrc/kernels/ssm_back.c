// The gradients of the selective scan (ssm_scan_back).
#include "kernels/scan_back.h"
#include "simd/vmath.h"

enum { GY, S, X, DT, A, B, C, IDS }; // sources
enum { PARTS = 16 };                 // at most, of the heads that share B and C: each sums their gradients by itself

// What a block adds to: its sums of B's and C's gradients [n_seqs][n_tokens][n], and of A's [rows][n].
typedef struct sums {
  float *x, *dt; // in dst
  float *b, *c;
  double *a;
} sums;

typedef struct layout {
  int64_t n, n_head, n_group, per_group, parts; // parts per group
  int fade;                                     // heads have one row
} layout;

static layout layout_of(const pg_task *t) {
  const pg_tensor *s = &t->src[S];
  layout l = {.n = s->ne[0], .n_head = s->ne[2], .n_group = t->src[B].ne[1], .fade = s->ne[1] == 1};
  l.per_group = l.n_head / l.n_group;
  const int64_t blocks = l.fade ? (l.per_group + PG_BACK_ROWS - 1) / PG_BACK_ROWS : l.per_group;
  l.parts = PG_MIN(blocks, (PARTS + l.n_group - 1) / l.n_group);
  return l;
}

// Floats of the sums of B's gradients, or C's.
static int64_t part_floats(const pg_task *t, const layout *l) {
  return pg_times(pg_times(t->src[X].ne[2], t->src[X].ne[3]), l->n);
}

// Of a thread, for the sums of A's gradients and all else.
static int64_t own_bytes(const pg_task *t, const layout *l) {
  const int64_t sums_a = pg_times(l->n * PG_BACK_ROWS, sizeof(double));
  return pg_plus(sums_a, pg_back_bytes(l->n, t->src[X].ne[2], l->fade)) / 64 * 64 + 64;
}

int64_t PG_FN(ssm_scan_back_work)(const pg_task *t, int nth) {
  const layout l = layout_of(t);
  const int64_t floats = pg_times(2 * l.n_group * l.parts, part_floats(t, &l));
  return pg_plus(pg_times(nth, own_bytes(t, &l)), pg_times(floats, sizeof(float)));
}

// dt of consecutive heads of a token.
static const float *steps(const pg_task *t, const pg_back_block *c) {
  return (const float *)pg_row_at(&t->src[DT], c->token, c->seq, 0) + c->head;
}

// to[i] = f(x[i])
PG_INLINE void each(vf (*f)(vf), float *to, const float *x, int64_t n) {
  for (int64_t i = 0; i < n; i += VF_N) {
    float y[VF_N];
    const int m = (int)PG_MIN(VF_N, n - i);
    vf_store(y, f(m < VF_N ? vf_load_n(x + i, m) : vf_load(x + i)));
    memcpy(to + i, y, (size_t)m * sizeof *y);
  }
}

// e^(A dt), zeros up to a whole register.
static void fade_of(float *w, const float *a, int64_t n_a, float dt, int64_t n) {
  const vf step = vf_set1(dt);
  if (n_a == 1) {
    float all[VF_N];
    vf_store(all, vf_exp(vf_set1(a[0]) * step));
    for (int64_t i = 0; i < n; i++) w[i] = all[0];
    return;
  }
  int64_t i = 0;
  for (; i + VF_N <= n; i += VF_N) vf_store(w + i, vf_exp(vf_load(a + i) * step));
  if (i < n) {
    float rest[VF_N];
    vf_store(rest, vf_exp(vf_load_n(a + i, (int)(n - i)) * step));
    memcpy(w + i, rest, (size_t)(n - i) * sizeof(float));
  }
}

static const float *x_of(const pg_task *t, const pg_back_block *c, int64_t head) {
  return (const float *)pg_row_at(&t->src[X], head, c->token, c->seq) + c->row;
}

static const float *a_of(const pg_task *t, int64_t head) { return (const float *)pg_row_at(&t->src[A], head, 0, 0); }

PG_INLINE void fill(const pg_task *t, const pg_back_block *c, pg_back_token *to, int fade) {
  const int64_t n = t->src[S].ne[0], group = c->head / (t->src[X].ne[1] / t->src[B].ne[1]), n_a = t->src[A].ne[0];
  each(vf_softplus, to->kept, steps(t, c), fade ? c->rows : 1);
  if (fade) {
    for (int64_t i = 0; i < c->rows; i++) {
      fade_of(to->memory[PG_W] + i * pg_back_padded(n), a_of(t, c->head + i), n_a, to->kept[i], n);
      to->v[i] = *x_of(t, c, c->head + i) * to->kept[i];
    }
  } else {
    const float *x = x_of(t, c, c->head);
    fade_of(to->memory[PG_W], a_of(t, c->head), n_a, to->kept[0], n);
    for (int64_t i = 0; i < c->rows; i++) to->v[i] = x[i] * to->kept[0];
  }
  to->vecs[PG_W] = to->memory[PG_W];
  pg_back_vec(to, PG_K, (const float *)pg_row_at(&t->src[B], group, c->token, c->seq), n);
  pg_back_vec(to, PG_R, (const float *)pg_row_at(&t->src[C], group, c->token, c->seq), n);
}

// With e the gradient of the exponents A dt: returns the sum of e A, and adds e dt to that of A.
static float exponents(double *ga, const float *gw, const float *w, const float *a, int64_t n_a, float dt, int64_t n) {
  vf all = vf_zero();
  for (int64_t i = 0; i < n; i += VF_N) {
    float e[VF_N];
    const int m = (int)PG_MIN(VF_N, n - i);
    const vf v = vf_load(gw + i) * vf_load(w + i);
    if (n_a == 1)
      all = all + v;
    else
      all = vf_fma(v, m < VF_N ? vf_load_n(a + i, m) : vf_load(a + i), all);
    vf_store(e, v * vf_set1(dt));
    for (int j = 0; j < m; j++) ga[i + j] += (double)e[j];
  }
  return n_a == 1 ? vf_sum(all) * a[0] : vf_sum(all);
}

PG_INLINE void finish(const pg_task *t, const pg_back_block *c, const pg_back_token *x, const pg_back_grads *g,
                      int fade) {
  const pg_tensor *tx = &t->src[X];
  const sums *to = c->own;
  const int64_t n = t->src[S].ne[0], n_a = t->src[A].ne[0], padded = pg_back_padded(n);
  const int64_t token = c->seq * tx->ne[2] + c->token, count = fade ? c->rows : 1;
  float *to_x = to->x + (token * tx->ne[1] + c->head) * tx->ne[0] + c->row,
        *to_dt = to->dt + token * tx->ne[1] + c->head;
  float slope[PG_BACK_ROWS];
  each(vf_sigmoid, slope, steps(t, c), count);
  for (int64_t i = 0; i < c->rows; i++) to_x[i] = g->v[i] * x->kept[fade ? i : 0];
  for (int64_t i = 0; i < count; i++) {
    const float *px = x_of(t, c, c->head + i);
    float sum = exponents(to->a + i * n, g->vecs[PG_W] + i * padded, x->vecs[PG_W] + i * padded, a_of(t, c->head + i),
                          n_a, x->kept[i], n);
    if (fade)
      sum += g->v[i] * px[0];
    else
      for (int64_t j = 0; j < c->rows; j++) sum += g->v[j] * px[j];
    to_dt[i] += sum * slope[i];
  }
  pg_back_add(to->b + token * n, g->vecs[PG_K], n);
  pg_back_add(to->c + token * n, g->vecs[PG_R], n);
}

static void fill_head(const pg_task *t, const pg_back_block *c, pg_back_token *to) { fill(t, c, to, 0); }
static void fill_rows(const pg_task *t, const pg_back_block *c, pg_back_token *to) { fill(t, c, to, 1); }
static void finish_head(const pg_task *t, const pg_back_block *c, const pg_back_token *x, const pg_back_grads *g) {
  finish(t, c, x, g, 0);
}
static void finish_rows(const pg_task *t, const pg_back_block *c, const pg_back_token *x, const pg_back_grads *g) {
  finish(t, c, x, g, 1);
}

int PG_FN(ssm_scan_back_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *s = &t->src[S], *x = &t->src[X], *a = &t->src[A], *ids = &t->src[IDS];
  const layout l = layout_of(t);
  const pg_back back = {.n = l.n,
                        .n_rows = s->ne[1],
                        .n_head = l.n_head,
                        .n_tokens = x->ne[2],
                        .n_seqs = x->ne[3],
                        .n_slots = (int64_t)t->param[0],
                        .gy = (const float *)t->src[GY].data};
  const int64_t state = l.n * back.n_rows * l.n_head, tokens = back.n_tokens * back.n_seqs, n_part = part_floats(t, &l);
  for (int64_t i = 0; i < back.n_seqs; i++) {
    const int64_t id = pg_scan_id(ids, i);
    if (id < 0 || id >= s->ne[3]) return pg_fail(t, PG_E_INDEX, id);
  }
  float *to_s = (float *)t->dst.data;
  sums to = {.x = to_s + state * s->ne[3]};
  to.dt = to.x + back.n_rows * l.n_head * tokens;
  float *to_a = to.dt + l.n_head * tokens, *to_b = to_a + a->ne[0] * l.n_head, *to_c = to_b + l.n * l.n_group * tokens;
  to.a = (double *)(t->work + ith * own_bytes(t, &l));
  char *work = (char *)(to.a + l.n * PG_BACK_ROWS);
  float *parts = (float *)(t->work + nth * own_bytes(t, &l)); // [n_group][parts][B, C][n_part]
  pg_back_clear(t, ith, nth);
  const pg_range units = pg_share(l.n_group * l.parts, ith, nth);
  for (int64_t u = units.first; u < units.last; u++) {
    const pg_range heads = pg_share(l.per_group, (int)(u % l.parts), (int)l.parts);
    const int64_t group = u / l.parts * l.per_group;
    to.b = parts + 2 * u * n_part;
    to.c = to.b + n_part;
    memset(to.b, 0, (size_t)(2 * n_part) * sizeof(float));
    pg_back_block c = {.own = &to};
    for (c.seq = 0; c.seq < back.n_seqs; c.seq++) {
      const int64_t at = pg_scan_id(ids, c.seq) * state;
      const float *from = (const float *)s->data + at;
      for (int64_t h = heads.first; h < heads.last; h += l.fade ? PG_BACK_ROWS : 1) {
        c.head = group + h;
        const int64_t n_a = l.fade ? PG_MIN(PG_BACK_ROWS, heads.last - h) : 1;
        memset(to.a, 0, (size_t)(l.n * PG_BACK_ROWS) * sizeof(double));
        if (l.fade) {
          c.rows = n_a;
          pg_back_run(t, &back, &c, from, to_s + at, work, fill_rows, finish_rows, (pg_back_kind){.rows_fade = 1});
        } else {
          for (c.row = 0; c.row < back.n_rows; c.row += PG_BACK_ROWS) {
            c.rows = PG_MIN(PG_BACK_ROWS, back.n_rows - c.row);
            pg_back_run(t, &back, &c, from, to_s + at, work, fill_head, finish_head, (pg_back_kind){0});
          }
          c.row = 0;
        }
        for (int64_t i = 0; i < n_a; i++)
          for (int64_t j = 0; j < l.n; j++) // A has one number per head, or one for each element
            to_a[(c.head + i) * a->ne[0] + (a->ne[0] > 1 ? j : 0)] += (float)to.a[i * l.n + j];
      }
    }
  }
  pg_sync(t, nth);
  const pg_range r = pg_share(tokens * l.n_group, ith, nth);
  for (int64_t i = r.first; i < r.last; i++)
    for (int64_t p = 0; p < l.parts; p++) {
      const float *from = parts + 2 * (i % l.n_group * l.parts + p) * n_part + i / l.n_group * l.n;
      pg_back_add(to_b + i * l.n, from, l.n);
      pg_back_add(to_c + i * l.n, from + n_part, l.n);
    }
  return PG_OK;
}
