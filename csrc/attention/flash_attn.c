// Attention without storing the scores: a tile of query rows walks the keys in blocks, with a running maximum and sum
// (arXiv 2205.14135). All rows of a tile belong to one KV head, so its query heads share the work of reading K and V. A
// few rows (decode) use dot products straight from the cache (flash_attn_few.c); more rows use a small matrix product
// (flash_attn_tile.c).
// flash_attn_ext is the op of that name; attn_vt is mul_mat(v, soft_max(mul_mat(k, q))) in one pass (operands.h).
#include "attention/flash_attn.h"

#include "products/borders.h"

// When there are few tiles, their keys are split. Where they are split does not depend on the number of threads, so
// the result does not either.
enum { SPLIT_KEYS = 512, PARTS = 64 }; // least number of keys of a part; about how many parts the op has

static attention attn_unpack(attention a) {
  a = attn_sizes(a);
  a.tile = a.n_rows <= FEW ? FEW : a.n_rows <= VF_N ? VF_N : TILE;
  a.n_units = (a.n_rows + a.tile - 1) / a.tile * a.k->ne[2] * a.k->ne[3];
  a.n_splits = PG_MAX(1, PG_MIN(PARTS / a.n_units, a.n_kv / SPLIT_KEYS));
  return a;
}

// Permute a y that is stored with heads before tokens to the order that is used here.
static void heads_inside(pg_tensor *y) {
  const pg_tensor x = *y;
  for (int i = 1; i < 3; i++) {
    y->ne[i] = x.ne[3 - i];
    y->nb[i] = x.nb[3 - i];
  }
}

static attention unpack_flash_attn_ext(const pg_task *t) {
  const double cap = t->param[2];
  attention a = {.q = &t->src[0], .k = &t->src[1], .v = &t->src[2], .m = &t->src[3]};
  a.sinks = &t->src[4];
  a.y = t->dst;
  heads_inside(&a.y);
  a.cap = (float)cap;
  a.scale = (float)(cap > 0 ? t->param[0] / cap : t->param[0]);
  a.max_bias = t->param[1];
  return attn_unpack(a);
}

static attention unpack_attn_vt(const pg_task *t) {
  attention a = {.k = &t->src[PG_ATTN_K], .q = &t->src[PG_ATTN_Q], .v = &t->src[PG_ATTN_V], .m = &t->src[PG_ATTN_MASK]};
  const double scale = t->param[PG_ATTN_SCALE], cap = t->param[PG_ATTN_CAP];
  a.sinks = &t->src[PG_ATTN_SINKS];
  a.y = t->dst;
  a.transposed = t->param[PG_ATTN_IN_ROWS] == 0;
  if (t->param[PG_ATTN_MERGED] != 0) heads_inside(&a.y);
  a.none = NAN;
  a.cap = cap != 0 ? (float)scale : 0;
  a.scale = (float)(a.cap > 0 ? cap : scale);
  a.max_bias = t->param[PG_ATTN_MAX_BIAS];
  return attn_unpack(a);
}

// Whether the rows fill only half of each AVX-512 register. Then AMD's CPUs use AVX2's kernels: there, two instructions
// of AVX2 take no longer than one of AVX-512.
static int attn_is_narrow(const attention *a) {
  return VF_N == 16 && pg_cpu_is_amd && a->n_rows > FEW && a->n_rows <= VF_N / 2;
}

static int64_t attn_state_floats(const attention *a) { return a->tile * (a->dvp + 2); }

static int64_t attn_scratch_floats(const attention *a) {
  return a->tile * (a->dp + 3 * KEYS) + KEYS * PG_MAX(a->dp, a->dvp); // what `scratch` needs
}

static state attn_state_at(const attention *a, char *work, int64_t i) {
  float *p = (float *)work + i * attn_state_floats(a);
  return (state){p, p + a->tile, p + 2 * a->tile};
}

// Scratch memory holds the states first: one for each part of each tile's keys, or one for each thread. Then comes each
// thread's own scratch.
static int64_t attn_n_states(const attention *a, int nth) { return a->n_splits > 1 ? a->n_units * a->n_splits : nth; }

static int64_t attn_work_size(const attention *a, int nth) {
  return pg_times(
      4, pg_plus(pg_times(attn_n_states(a, nth), attn_state_floats(a)), pg_times(nth, attn_scratch_floats(a))));
}

static tile attn_tile_at(const attention *a, int64_t unit) {
  const int64_t per_head = a->n_units / (a->k->ne[2] * a->k->ne[3]);
  return tile_of_head(a, unit / per_head, unit % per_head);
}

static void attn_walk(const attention *a, const tile *x, const scratch *w, const state *st, int64_t first, int64_t last,
                      pg_attend many) {
  for (int64_t r = 0; r < a->tile; r++) st->top[r] = -INFINITY;
  memset(st->sum, 0, (size_t)(a->tile * (a->dvp + 1)) * sizeof(float));
  (a->tile == FEW ? PG_FN(attend_few) : many)(a, x, w, st, first, last);
}

// The score of row r's sink, which has no key and no value; -inf when there is no sink.
static float attn_sink_of(const attention *a, const tile *x, int r) {
  return a->sinks->data ? *(const float *)(a->sinks->data + tile_head(a, x, r) * a->sinks->nb[0]) : -INFINITY;
}

// One row of a tile, computed by itself: key after key, in double.
typedef struct lone {
  const attention *a;
  const tile *x;
  int r;
  float *row; // of k or v, as f32
} lone;

// Compute the score of a key. Returns 0 when the mask hides the key.
static int score_of(const lone *l, int64_t key, double *score) {
  const attention *a = l->a;
  float m = 0;
  if (a->m->data) pg_get_f32(&m, a->m, l->x->mask[l->r], key, 1);
  if (m == -INFINITY) return 0;
  const float *q = tile_query(a, l->x, l->r);
  double sum = 0;
  PG_FN(to_f32)(a->k->type)(tile_kv(a->k, l->x) + key * a->k->nb[1], l->row, a->d);
  for (int64_t c = 0; c < a->d; c++) sum += (double)q[c] * l->row[c];
  sum *= a->scale;
  if (a->cap > 0) sum = a->cap * tanh(sum);
  *score = a->m->data ? sum + (double)l->x->slope[l->r] * m : sum;
  return 1;
}

static void value_of(const lone *l, int64_t key) {
  const pg_tensor *v = l->a->v;
  const char *head = tile_kv(v, l->x);
  if (!l->a->transposed) {
    PG_FN(to_f32)(v->type)(head + key * v->nb[1], l->row, l->a->dv);
  } else {
    for (int64_t c = 0; c < l->a->dv; c++) pg_get_f32(l->row + c, v, head + c * v->nb[1], key, 1);
  }
}

// Compute a row with NaN or infinities in its result again. Sums over a tile may get these from keys that only other
// rows of the tile see, from weights that f32 rounds to 0, or from products that overflow f32.
static void attn_row_again(const lone *l, float sink, float *y) {
  const attention *a = l->a;
  double top = sink, s = 0;
  for (int64_t key = 0; key < a->n_kv && top < INFINITY; key++)
    if (score_of(l, key, &s) && !(s <= top)) top = s; // NaN, too
  const int is_sum = isfinite(top) != 0;
  for (int64_t c = 0; c < a->dv; c++) y[c] = is_sum ? 0 : top == -INFINITY ? a->none : NAN;
  if (!is_sum) return;
  double total = sink == -INFINITY ? 0 : exp(sink - top);
  for (int64_t key = 0; key < a->n_kv; key++)
    if (score_of(l, key, &s)) total += exp(s - top);
  for (int64_t key = 0; key < a->n_kv; key++)
    if (score_of(l, key, &s)) {
      const double weight = exp(s - top) / total;
      value_of(l, key);
      for (int64_t c = 0; c < a->dv; c++) y[c] = (float)(y[c] + weight * l->row[c]);
    }
}

// Join the states of all parts of the keys, add the sink, and write the tile's rows.
static void attn_write_tile(const attention *a, const tile *x, const state *st, int64_t n, const scratch *w) {
  const int64_t row_step = a->tile == FEW ? a->dvp : 1, step = a->tile == FEW ? 1 : a->tile;
  for (int r = 0; r < x->n; r++) {
    float *y = (float *)pg_row_at(&a->y, tile_token(a, x, r), tile_head(a, x, r), x->batch);
    const float sink = attn_sink_of(a, x, r);
    float top = sink;
    for (int64_t i = 0; i < n; i++) top = PG_MAX(st[i].top[r], top);
    float total = sink == -INFINITY ? 0 : expf(sink - top);
    for (int64_t i = 0; i < n; i++) {
      const float weight = st[i].sum[r] == 0 ? 0 : expf(st[i].top[r] - top);
      const float *out = st[i].out + r * row_step;
      total += weight * st[i].sum[r];
      for (int64_t c = 0; c < a->dv; c++) y[c] = (i ? y[c] : 0) + weight * out[c * step];
    }
    const float factor = 1 / total;
    for (int64_t c = 0; c < a->dv; c++) y[c] = total == 0 ? a->none : y[c] * factor;
    if (total != 0 && !pg_all_finite(y, a->dv)) attn_row_again(&(lone){a, x, r, w->kv}, sink, y);
  }
}

static int attn_run(const attention *a, const pg_task *t, int ith, int nth, pg_attend many) {
  float *p = (float *)t->work + attn_n_states(a, nth) * attn_state_floats(a) + ith * attn_scratch_floats(a);
  scratch w = {.q = p};
  w.s = w.q + a->tile * a->dp;
  w.bias = w.s + a->tile * KEYS;
  w.raw = w.bias + a->tile * KEYS;
  w.kv = w.raw + a->tile * KEYS;
  if (a->n_splits == 1) {
    const state st = attn_state_at(a, t->work, ith);
    for (int64_t u; (u = pg_next(t)) < a->n_units;) {
      const tile x =
          attn_tile_at(a, a->n_units - 1 - u); // late tokens first: under a causal mask they see the most keys
      attn_walk(a, &x, &w, &st, 0, a->n_kv, many);
      attn_write_tile(a, &x, &st, 1, &w);
    }
    return PG_OK;
  }
  for (int64_t u; (u = pg_next(t)) < a->n_units * a->n_splits;) {
    const tile x = attn_tile_at(a, u / a->n_splits);
    const state st = attn_state_at(a, t->work, u);
    const pg_range part = pg_share(a->n_kv / KEYS, (int)(u % a->n_splits), (int)a->n_splits);
    const int last = u % a->n_splits == a->n_splits - 1;
    attn_walk(a, &x, &w, &st, part.first * KEYS, last ? a->n_kv : part.last * KEYS, many);
  }
  pg_sync(t, nth);
  for (int64_t u = ith; u < a->n_units; u += nth) {
    state st[PARTS];
    const tile x = attn_tile_at(a, u);
    for (int64_t i = 0; i < a->n_splits; i++) st[i] = attn_state_at(a, t->work, u * a->n_splits + i);
    attn_write_tile(a, &x, st, a->n_splits, &w);
  }
  return PG_OK;
}

int64_t PG_FN(flash_attn_ext_work)(const pg_task *t, int nth) {
  const attention a = unpack_flash_attn_ext(t);
  return attn_is_narrow(&a) ? NARROW(flash_attn_ext_work)(t, nth) : attn_work_size(&a, nth);
}

int PG_FN(flash_attn_ext_with)(const pg_task *t, int ith, int nth, pg_attend many) {
  const attention a = unpack_flash_attn_ext(t);
  return attn_is_narrow(&a) ? NARROW(flash_attn_ext_any)(t, ith, nth) : attn_run(&a, t, ith, nth, many);
}

int PG_FN(flash_attn_ext_any)(const pg_task *t, int ith, int nth) {
  return PG_FN(flash_attn_ext_with)(t, ith, nth, PG_FN(attend_tile));
}

int64_t PG_FN(attn_vt_work)(const pg_task *t, int nth) {
  const attention a = unpack_attn_vt(t);
  return attn_is_narrow(&a) ? NARROW(attn_vt_work)(t, nth) : attn_work_size(&a, nth);
}

int PG_FN(attn_vt_with)(const pg_task *t, int ith, int nth, pg_attend many) {
  const attention a = unpack_attn_vt(t);
  return attn_is_narrow(&a) ? NARROW(attn_vt_any)(t, ith, nth) : attn_run(&a, t, ith, nth, many);
}

int PG_FN(attn_vt_any)(const pg_task *t, int ith, int nth) {
  return PG_FN(attn_vt_with)(t, ith, nth, PG_FN(attend_tile));
}
