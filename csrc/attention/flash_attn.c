// Attention of a tile of query rows at a time, so that only a tile's scores are stored. All rows of a tile belong to
// one KV head, so its query heads share the work of reading K and V. A few rows (decode) use dot products straight from
// the cache (flash_attn_few.c); more rows use a small matrix product (flash_attn_tile.c). Which of these it is, and how
// the work is shared out to threads, does not change a bit of the result (flash_attn.h). flash_attn_ext is the op of
// that name; attn_vt is mul_mat(v, soft_max(mul_mat(k, q))) in one pass (operands.h).
#include "attention/flash_attn.h"

#include "simd/units.h"

// When there are too few tiles for the threads, these share the work of each tile: its scores in parts of its keys, its
// values in slices of their channels.
enum { SHARED_KEYS = 256, PARTS = 16, SLICE = 32 }; // least number of keys for that; most parts; channels of a slice
enum { APART = 4 }; // tokens of a tile are apart when together they see so many times the keys that each sees

static attention attn_unpack(attention a) {
  a = attn_sizes(a);
  // FEW rows read K and V as they are stored: two such tiles take 0.5 to 0.7 of the time of one larger tile. That does
  // not hold for a transposed V, which would be turned for each of the two.
  a.tile = a.n_rows <= (a.transposed ? 1 : 2) * FEW ? FEW : a.n_rows <= VF_N ? VF_N : TILE;
  a.n_units = (a.n_rows + a.tile - 1) / a.tile * a.k->ne[2] * a.k->ne[3];
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

static int attn_is_shared(const attention *a, int nth) {
  return a->n_units % nth != 0 && a->n_units < 4 * nth && a->n_kv >= SHARED_KEYS;
}

// Memory of a tile: what it sees, and its scores. Of a shared tile also the number of blocks, and the largest scores of
// each part.
typedef struct tile_keys {
  sight x;
  int64_t *n_blocks;
  float *s, *tops;
} tile_keys;

static int64_t attn_keys_floats(const attention *a) {
  const int64_t scores = pg_times(sight_blocks(a->n_kv) * KEYS, a->tile);
  return attn_up(pg_plus(pg_plus(sight_floats(a->n_kv), scores), PARTS * a->tile + 4), VF_N);
}

static tile_keys attn_keys_at(const attention *a, float *p) {
  tile_keys k = {.x = sight_at(p + 4, a->n_kv), .n_blocks = (int64_t *)p, .tops = p + 4 + sight_floats(a->n_kv)};
  k.s = k.tops + PARTS * a->tile;
  return k;
}

static int64_t attn_state_floats(const attention *a) { return attn_up(a->tile * (2 * a->dvp + 3), VF_N); }

static state attn_state_at(const attention *a, float *p) {
  state st = {.top = p, .sum = p + a->tile};
  st.sum_part = st.sum + a->tile;
  st.out = st.sum_part + a->tile;
  st.out_part = st.out + a->tile * a->dvp;
  return st;
}

static int64_t attn_scratch_floats(const attention *a) {
  return a->tile * (a->dp + 3 * KEYS) + KEYS * PG_MAX(a->dp, a->dvp);
}

static scratch attn_scratch_at(const attention *a, float *p) {
  scratch w = {.q = p};
  w.s = w.q + a->tile * a->dp;
  w.bias = w.s + a->tile * KEYS;
  w.raw = w.bias + a->tile * KEYS;
  w.kv = w.raw + a->tile * KEYS;
  return w;
}

// Scratch memory: the keys of each tile, when tiles are shared, or of each thread's tile; then the state and the
// scratch of each thread. Fewer threads than nth may share where nth do not (8 tiles: 3 threads, but not 4), and those
// that do not share are at most as many as there are tiles.
static int64_t attn_n_keys(const attention *a, int nth) {
  return a->n_units < 4 * nth && a->n_kv >= SHARED_KEYS ? a->n_units : nth;
}

static int64_t attn_own_floats(const attention *a) { return attn_state_floats(a) + attn_scratch_floats(a); }

// The same op for tiles of FEW rows.
static attention attn_few(const attention *a) {
  attention few = *a;
  few.tile = FEW;
  return few;
}

// The keys of a token that is apart.
static int64_t attn_few_floats(const attention *a) {
  const attention few = attn_few(a);
  return a->tile == FEW || a->transposed ? 0 : attn_keys_floats(&few);
}

static int64_t attn_work_size(const attention *a, int nth) {
  const int64_t own = pg_times(nth, attn_few_floats(a));
  const int64_t keys = pg_plus(own, pg_times(attn_n_keys(a, nth), attn_keys_floats(a)));
  return pg_in_32_bits(a->n_kv, pg_times(4, pg_plus(keys, pg_times(nth, attn_own_floats(a)))));
}

static tile attn_tile_at(const attention *a, int64_t unit) {
  const int64_t per_head = a->n_units / (a->k->ne[2] * a->k->ne[3]);
  return tile_of_head(a, unit / per_head, unit % per_head);
}

static const attend *attn_way(const attention *a) { return a->tile == FEW ? &PG_FN(attend_few) : &PG_FN(attend_tile); }

static void attn_clear(const attention *a, const state *st) {
  memset(st->sum, 0, (size_t)(2 * a->tile * (a->dvp + 1)) * sizeof(float));
}

// Compute the sums of a tile over the keys that it sees.
static void attn_walk(const attention *a, const tile *x, const scratch *w, tile_keys *k, const state *st,
                      const attend *way) {
  for (int64_t r = 0; r < a->tile; r++) st->top[r] = -INFINITY;
  attn_clear(a, st);
  way->scores(a, x, w, &k->x, (pg_range){0, k->x.n_blocks}, k->s, st->top);
  way->values(a, x, w, &k->x, k->s, 1, st);
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

// Compute a row with NaN or infinities in its result once more, from numbers that overflow f32, or weights that it
// rounds to 0.
static void attn_row_exact(const lone *l, float sink, float *y) {
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

static float *attn_result(const attention *a, const tile *x, int r) {
  return (float *)pg_row_at(&a->y, tile_token(a, x, r), tile_head(a, x, r), x->batch);
}

// Write row r of a tile, with its sink. Returns 0 when it is not finite.
static int attn_write_row(const attention *a, const tile *x, int r, const state *st, float *y) {
  const int64_t step = a->tile == FEW ? 1 : a->tile;
  const float *out = st->out + (a->tile == FEW ? r * a->dvp : r), sink = attn_sink_of(a, x, r);
  const float top = PG_MAX(st->top[r], sink), weight = st->sum[r] == 0 ? 0 : expf(st->top[r] - top);
  const float total = (sink == -INFINITY ? 0 : expf(sink - top)) + weight * st->sum[r], factor = 1 / total;
  for (int64_t c = 0; c < a->dv; c++) y[c] = total == 0 ? a->none : weight * out[c * step] * factor;
  return total == 0 || pg_all_finite(y, a->dv);
}

// n of the rows of a tile, which have one mask, as a tile of their own.
static tile tile_part(const tile *x, int r, int n) {
  tile part = {.head_kv = x->head_kv, .batch = x->batch, .row0 = x->row0 + r, .n = n};
  for (int i = 0; i < n; i++) {
    part.mask[i] = x->mask[r + i];
    part.slope[i] = x->slope[r + i];
  }
  return part;
}

// Compute a row that is not finite again by itself, because it may have got that from keys that only other rows see.
// `k` and `st` get the row's.
static void attn_row_again(const attention *a, const tile *x, int r, const scratch *w, tile_keys *k, const state *st) {
  float *y = attn_result(a, x, r);
  const tile alone = tile_part(x, r, 1);
  const attention few = attn_few(a);
  const scratch own = attn_scratch_at(&few, w->q);
  const state sums = attn_state_at(&few, st->top);
  tile_keys keys = attn_keys_at(&few, (float *)k->n_blocks);
  PG_FN(attention_sight)(&few, &alone, &own, &keys.x);
  attn_walk(&few, &alone, &own, &keys, &sums, &PG_FN(attend_few));
  if (!attn_write_row(&few, &alone, 0, &sums, y))
    attn_row_exact(&(lone){&few, &alone, 0, own.kv}, attn_sink_of(a, x, r), y);
}

// Write the rows of a tile. Returns those that are not finite, as bits.
static uint32_t attn_write_tile(const attention *a, const tile *x, const state *st) {
  uint32_t again = 0;
  for (int r = 0; r < x->n; r++)
    if (!attn_write_row(a, x, r, st, attn_result(a, x, r))) again |= 1u << r;
  return again;
}

static void attn_rows_again(const attention *a, const tile *x, uint32_t rows, const scratch *w, tile_keys *k,
                            const state *st) {
  for (; rows; rows &= rows - 1) attn_row_again(a, x, __builtin_ctz(rows), w, k, st);
}

// The part of the op that has channels first .. last of v and of the result.
static attention attn_slice(const attention *a, pg_tensor *v, int64_t first, int64_t last) {
  attention s = *a;
  *v = *a->v;
  v->ne[a->transposed] = last - first;
  v->data += a->transposed ? first * v->nb[1] : first / pg_block_size(v->type) * v->nb[0];
  s.v = v;
  s.dv = last - first;
  s.dvp = attn_up(s.dv, VF_N);
  s.y.data += first * (int64_t)sizeof(float);
  return s;
}

static tile_keys attn_shared_keys(const attention *a, float *p, int64_t unit) {
  tile_keys k = attn_keys_at(a, p + unit * attn_keys_floats(a));
  k.x.n_blocks = *k.n_blocks;
  return k;
}

// The largest scores of a shared tile's rows.
static void attn_tops(const attention *a, const tile_keys *k, float *top) {
  for (int64_t r = 0; r < a->tile; r++) {
    top[r] = -INFINITY;
    for (int i = 0; i < PARTS; i++) top[r] = PG_MAX(k->tops[i * a->tile + r], top[r]);
  }
}

// All threads share each tile.
static void attn_run_shared(const attention *a, const pg_task *t, int ith, int nth) {
  const attend *way = attn_way(a);
  const int64_t width = PG_MAX(SLICE, pg_block_size(a->v->type)), slices = (a->dv + width - 1) / width;
  float *p = (float *)t->work, *own = p + a->n_units * attn_keys_floats(a) + ith * attn_own_floats(a);
  const scratch w = attn_scratch_at(a, own + attn_state_floats(a));
  for (int64_t u = ith; u < a->n_units; u += nth) {
    tile_keys k = attn_keys_at(a, p + u * attn_keys_floats(a));
    const tile x = attn_tile_at(a, u);
    PG_FN(attention_sight)(a, &x, &w, &k.x);
    *k.n_blocks = k.x.n_blocks;
  }
  pg_sync(t, nth);
  for (int64_t i = ith; i < a->n_units * PARTS; i += nth) {
    const tile_keys k = attn_shared_keys(a, p, i / PARTS);
    const tile x = attn_tile_at(a, i / PARTS);
    const int part = (int)(i % PARTS);
    float *tops = k.tops + part * a->tile;
    for (int64_t r = 0; r < a->tile; r++) tops[r] = -INFINITY;
    way->scores(a, &x, &w, &k.x, pg_share(k.x.n_blocks, part, PARTS), k.s, tops);
  }
  pg_sync(t, nth);
  for (int64_t i = ith; i < a->n_units * PARTS; i += nth) {
    const tile_keys k = attn_shared_keys(a, p, i / PARTS);
    const tile x = attn_tile_at(a, i / PARTS);
    const pg_range blocks = pg_share(k.x.n_blocks, (int)(i % PARTS), PARTS);
    attn_tops(a, &k, own);
    for (int64_t j = blocks.first; j < blocks.last; j++)
      way->weights(a, &x, k.x.blocks + j, k.s + j * KEYS * a->tile, own);
  }
  pg_sync(t, nth);
  for (int64_t i = ith; i < a->n_units * slices; i += nth) {
    const tile_keys k = attn_shared_keys(a, p, i / slices);
    const tile x = attn_tile_at(a, i / slices);
    const int64_t first = i % slices * width;
    pg_tensor v;
    const attention slice = attn_slice(a, &v, first, PG_MIN(first + width, a->dv));
    const state st = attn_state_at(&slice, own);
    attn_tops(a, &k, st.top);
    attn_clear(&slice, &st);
    way->values(&slice, &x, &w, &k.x, k.s, 0, &st);
    attn_write_tile(&slice, &x, &st);
  }
  pg_sync(t, nth);
  const state st = attn_state_at(a, own);
  for (int64_t u = ith; u < a->n_units; u += nth) {
    tile_keys k = attn_shared_keys(a, p, u);
    const tile x = attn_tile_at(a, u);
    uint32_t again = 0;
    for (int r = 0; r < x.n; r++) again |= (uint32_t)!pg_all_finite(attn_result(a, &x, r), a->dv) << r;
    attn_rows_again(a, &x, again, &w, &k, &st);
  }
}

// Whether the tokens of a tile see few keys together, as when each continues a text of its own: then most scores of the
// tile would be hidden. (A transposed V has the values of scattered keys in lines of their own, which a tile shares.)
static int attn_is_apart(const attention *a, const sight *x) {
  return a->tile != FEW && !a->transposed && x->n * __builtin_popcount(x->own) > APART * x->n_seen;
}

// Compute the rows of a tile token by token. `k`: memory for the keys of FEW rows.
static void attn_run_apart(const attention *a, const tile *x, const sight *all, const scratch *w, tile_keys *k,
                           const state *st) {
  const attention few = attn_few(a);
  const scratch own = attn_scratch_at(&few, w->q);
  const state sums = attn_state_at(&few, st->top);
  for (int r = 0, n; r < x->n; r += n) {
    for (n = 1; n < FEW && r + n < x->n && x->own[r + n] == x->own[r];) n++;
    const tile part = tile_part(x, r, n);
    PG_FN(attention_sight_of)(all, x->own[r], &k->x);
    attn_walk(&few, &part, &own, k, &sums, &PG_FN(attend_few));
    attn_rows_again(&few, &part, attn_write_tile(&few, &part, &sums), &own, k, &sums);
  }
}

static int attn_run(const attention *a, const pg_task *t, int ith, int nth) {
  if (attn_is_shared(a, nth)) {
    attn_run_shared(a, t, ith, nth);
    return PG_OK;
  }
  float *p = (float *)t->work, *few = p + nth * attn_keys_floats(a) + ith * attn_few_floats(a);
  float *own = p + nth * (attn_keys_floats(a) + attn_few_floats(a)) + ith * attn_own_floats(a);
  tile_keys k = attn_keys_at(a, p + ith * attn_keys_floats(a)),
            k_few = attn_keys_at(&(attention){.n_kv = a->n_kv, .tile = FEW}, few);
  const state st = attn_state_at(a, own);
  const scratch w = attn_scratch_at(a, own + attn_state_floats(a));
  for (int64_t u; (u = pg_next(t)) < a->n_units;) {
    const tile x = attn_tile_at(a, a->n_units - 1 - u); // late tokens first: under a causal mask they see the most keys
    PG_FN(attention_sight)(a, &x, &w, &k.x);
    if (attn_is_apart(a, &k.x)) {
      attn_run_apart(a, &x, &k.x, &w, &k_few, &st);
      continue;
    }
    attn_walk(a, &x, &w, &k, &st, attn_way(a));
    attn_rows_again(a, &x, attn_write_tile(a, &x, &st), &w, &k, &st);
  }
  return PG_OK;
}

int64_t PG_FN(flash_attn_ext_work)(const pg_task *t, int nth) {
  const attention a = unpack_flash_attn_ext(t);
  return attn_work_size(&a, nth);
}

int PG_FN(flash_attn_ext_any)(const pg_task *t, int ith, int nth) {
  const attention a = unpack_flash_attn_ext(t);
  return attn_run(&a, t, ith, nth);
}

int64_t PG_FN(attn_vt_work)(const pg_task *t, int nth) {
  const attention a = unpack_attn_vt(t);
  return attn_work_size(&a, nth);
}

int PG_FN(attn_vt_any)(const pg_task *t, int ith, int nth) {
  const attention a = unpack_attn_vt(t);
  return attn_run(&a, t, ith, nth);
}
