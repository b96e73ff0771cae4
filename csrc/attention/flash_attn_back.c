// The gradients of flash_attn_ext by q, k, v and sinks. The scores of a tile of query rows are computed again; they are
// all that is kept of a row's keys, and for one tile of each thread alone.
//
// The rows of one head of K are shared out in parts, each of which sums up the gradients of K and V over its own tiles.
// Where the parts begin does not depend on the number of threads, so the sums do not either.
#include "attention/tile_product.h"
#include "products/product.h"

enum { PARTS = 16 }; // of all heads together, about

typedef struct backward {
  attention a;
  const pg_tensor *gy;
  pg_tensor result;          // y, as attention.y
  int64_t n_heads;           // of K, in all batches
  int64_t n_tiles, n_parts;  // of each of these
  float *of_q, *of_k, *of_v; // results: [batch][token or key][head][d or dv]
  float *of_sinks;           // [head]
  float factor;              // d score / d (q k), without that of tanh
} backward;

// Memory of one thread for a tile. Rows of vectors are [..][tile] unless said otherwise.
typedef struct tile_memory {
  scratch w;                   // its s: the gradients of a block's scores
  float *gy;                   // [dvp] the gradient of the result
  float *q_rows, *gy_rows;     // [dp / width][tile][width], [dvp / width][tile][width]: see put_rows
  float *of_q;                 // [dp]
  float *product;              // [KEYS][width]
  float *top, *part, *weighed; // largest score, 1 / sum of exp, gradient times result of each row
  float *weights, *tanh;       // [n_kv] of all keys
  sight sight;                 // of the tile
} tile_memory;

static backward back_unpack(const pg_task *t) {
  const double cap = t->param[2];
  backward b = {.gy = &t->src[6], .result = t->src[5]};
  b.a =
      attn_sizes((attention){.q = &t->src[0], .k = &t->src[1], .v = &t->src[2], .m = &t->src[3], .sinks = &t->src[4]});
  attention *a = &b.a;
  a->cap = (float)cap;
  a->scale = (float)(cap > 0 ? t->param[0] / cap : t->param[0]);
  a->max_bias = t->param[1];
  a->tile = a->n_rows <= VF_N ? VF_N : TILE;
  b.n_heads = a->k->ne[2] * a->k->ne[3];
  b.n_tiles = (a->n_rows + a->tile - 1) / a->tile;
  b.n_parts = PG_MAX(1, PG_MIN(PARTS / b.n_heads, b.n_tiles));
  b.of_q = (float *)t->dst.data;
  b.of_k = b.of_q + a->d * a->n_rows * b.n_heads;
  b.of_v = b.of_k + a->d * a->n_kv * b.n_heads;
  b.of_sinks = b.of_v + a->dv * a->n_kv * b.n_heads;
  b.factor = a->cap > 0 ? a->cap * a->scale : a->scale;
  return b;
}

// Floats of the sums of K and of V of one part.
static int64_t back_sums(const backward *b) { return pg_times(b->a.n_kv, b->a.dp + b->a.dvp); }

// Floats of the memory of a tile.
static int64_t back_tile_floats(const backward *b) {
  const attention *a = &b->a;
  const int64_t n_blocks = (a->n_kv + KEYS - 1) / KEYS, wide = PG_MAX(a->dp, a->dvp);
  const int64_t fixed = a->tile * (3 * a->dp + 2 * a->dvp + 3 * KEYS + 3) + KEYS * (wide + 2 * VF_N);
  const int64_t scores = pg_times(n_blocks, KEYS * a->tile * (a->cap > 0 ? 2 : 1));
  return attn_up(pg_plus(fixed, pg_plus(scores, sight_floats(a->n_kv))), VF_N);
}

static tile_memory back_memory(const backward *b, float *p) {
  const attention *a = &b->a;
  const int64_t n_blocks = (a->n_kv + KEYS - 1) / KEYS;
  tile_memory m;
#define TAKE(name, n) (m.name = p, p += (n))
  TAKE(w.q, a->tile * a->dp);
  TAKE(w.s, a->tile * KEYS);
  TAKE(w.bias, a->tile * KEYS);
  TAKE(w.raw, a->tile * KEYS);
  TAKE(w.kv, KEYS * PG_MAX(a->dp, a->dvp));
  TAKE(gy, a->tile * a->dvp);
  TAKE(q_rows, a->tile * a->dp);
  TAKE(gy_rows, a->tile * a->dvp);
  TAKE(of_q, a->tile * a->dp);
  TAKE(product, KEYS * 2 * VF_N);
  TAKE(top, a->tile);
  TAKE(part, a->tile);
  TAKE(weighed, a->tile);
  TAKE(weights, n_blocks * KEYS * a->tile);
  TAKE(tanh, a->cap > 0 ? n_blocks * KEYS * a->tile : 0);
#undef TAKE
  m.sight = sight_at(p, a->n_kv);
  return m;
}

// Whether each part has sums of its own, or each thread: a part that has all rows of a head is the result at once.
static int64_t back_n_sums(const backward *b, int nth) { return b->n_parts > 1 ? b->n_heads * b->n_parts : nth; }

// Floats of the sums of sinks, doubles: one for each query head of each part.
static int64_t back_sink_floats(const backward *b) { return attn_up(2 * b->n_heads * b->n_parts * b->a.group, VF_N); }

// Scratch memory: sums of sinks; sums of K and V; the memory of each thread.
int64_t PG_FN(flash_attn_ext_back_work)(const pg_task *t, int nth) {
  const backward b = back_unpack(t);
  const int64_t sums = pg_times(back_n_sums(&b, nth), back_sums(&b));
  const int64_t floats = pg_plus(back_sink_floats(&b), pg_plus(sums, pg_times(nth, back_tile_floats(&b))));
  return pg_in_32_bits(b.a.n_kv, pg_times(4, floats));
}

// The width of the columns from c on that are computed together: one or two registers.
PG_INLINE int64_t back_width(int64_t n, int64_t c) { return n - c >= 2 * VF_N ? 2 * VF_N : VF_N; }

// Put row r of n elements among those of a tile, in groups of columns: [group][tile][width].
static void back_put_row(float *to, const float *x, int64_t n, int64_t r, int64_t rows) {
  const int64_t np = attn_up(n, VF_N);
  for (int64_t c = 0, w; c < np; c += w) {
    w = back_width(np, c);
    float *row = to + c * rows + r * w;
    const int64_t some = PG_MIN(w, n - c);
    memcpy(row, x + c, (size_t)some * sizeof(float));
    memset(row + some, 0, (size_t)(w - some) * sizeof(float));
  }
}

// Read the tile's queries and the gradients of its results.
static void back_read(const backward *b, const tile *x, const tile_memory *m) {
  const attention *a = &b->a;
  put_queries(a, x, &m->w, a->tile);
  memset(m->gy, 0, (size_t)(a->dvp * a->tile) * sizeof(float));
  memset(m->weighed, 0, (size_t)a->tile * sizeof(float));
  for (int r = 0; r < x->n; r++) {
    const int64_t token = tile_token(a, x, r), head = tile_head(a, x, r);
    const float *gy = (const float *)pg_row_at(b->gy, head, token, x->batch);
    const float *y = (const float *)pg_row_at(&b->result, head, token, x->batch);
    double sum = 0;
    for (int64_t c = 0; c < a->dv; c++) {
      m->gy[c * a->tile + r] = gy[c];
      sum += (double)gy[c] * y[c];
    }
    m->weighed[r] = (float)sum;
    back_put_row(m->gy_rows, gy, a->dv, r, a->tile);
    back_put_row(m->q_rows, tile_query(a, x, r), a->d, r, a->tile);
  }
}

PG_INLINE void back_product(float *out, enum sums how, const float *f, int along, int64_t step, const float *lanes,
                            int64_t n_i, int64_t n_l, int64_t width) {
  const fetch none = {0};
  if (width == VF_N) {
    tile_product(out, how, f, along, step, lanes, n_i, n_l, none, 1);
  } else {
    tile_product(out, how, f, along, step, lanes, n_i, n_l, none, 2);
  }
}

// Compute the scores of a block, and the largest ones so far.
static void back_scores(const backward *b, const tile *x, const tile_memory *m, int64_t number) {
  const attention *a = &b->a;
  const block *at = m->sight.blocks + number;
  const fetch none = {0};
  const int64_t ld = a->tile, first = number * KEYS * ld;
  float *s = m->weights + first;
  PG_FN(attention_rows)(a->k, tile_kv(a->k, x), at, m->w.kv, a->dp);
  if (ld == VF_N) {
    tile_dots(s, m->w.kv, a->dp, m->w.q, at->n, a->d, none, 1);
  } else {
    tile_dots(s, m->w.kv, a->dp, m->w.q, at->n, a->d, none, 2);
  }
  block_bias(a, x, at, &m->w, 1, ld);
  for (int64_t v = 0; v < ld; v += VF_N) {
    vf top = vf_load(m->top + v);
    for (int64_t i = v; i < at->n * ld; i += ld) {
      vf score = vf_load(s + i);
      if (a->cap > 0) {
        const vf t = vf_tanh(score);
        vf_store(m->tanh + first + i, t);
        score = t * vf_set1(a->cap);
      }
      if (at->biased) {
        const vf bias = vf_load(m->w.bias + i);
        score = vf_masked(score + bias, bias);
      }
      vf_store(s + i, score);
      top = vf_max(score, top);
    }
    vf_store(m->top + v, top);
  }
}

// Turn the scores of all blocks into exp(score - top), and `part` into the factor that makes them weights. Adds the
// gradients of sinks.
static void back_weights(const backward *b, const tile *x, const tile_memory *m, double *of_sinks) {
  const attention *a = &b->a;
  const int64_t ld = a->tile;
  float sink[TILE], top[TILE], sum[TILE];
  for (int64_t r = 0; r < ld; r++) {
    sink[r] = a->sinks->data && r < x->n ? *(const float *)(a->sinks->data + tile_head(a, x, (int)r) * a->sinks->nb[0])
                                         : -INFINITY;
    top[r] = PG_MAX(m->top[r], sink[r]);
    if (top[r] == -INFINITY) top[r] = 0; // it sees no key
  }
  for (int64_t v = 0; v < ld; v += VF_N) {
    vf total = vf_zero();
    for (int64_t j = 0; j < m->sight.n_blocks; j++) {
      float *s = m->weights + j * KEYS * ld + v;
      vf some = vf_zero();
      for (int64_t i = 0; i < m->sight.blocks[j].n * ld; i += ld) {
        const vf e = vf_exp_below(vf_load(s + i) - vf_load(top + v));
        vf_store(s + i, e);
        some += e;
      }
      total += some;
    }
    vf_store(sum + v, total);
  }
  for (int r = 0; r < ld; r++) {
    const float of_sink = sink[r] == -INFINITY ? 0 : expf(sink[r] - top[r]), total = sum[r] + of_sink;
    m->part[r] = total == 0 ? 0 : 1 / total;
    if (r < x->n) of_sinks[tile_head(a, x, r) % a->group] -= (double)(of_sink * m->part[r]) * m->weighed[r];
  }
}

// sums[key][..] += sum over rows of f[key][row] * rows[row][..], for the keys of a block.
static void back_add_rows(const backward *b, const tile *x, const tile_memory *m, const block *at, const float *f,
                          const float *rows, int64_t n, float *sums) {
  const int64_t ld = b->a.tile;
  for (int64_t c = 0, w; c < n; c += w) {
    w = back_width(n, c);
    back_product(m->product, SUMS_NEW, f, 1, ld, rows + c * ld, at->n, x->n, w);
    for (int i = 0; i < at->n; i++) {
      float *to = sums + at->keys[i] * n + c;
      for (int64_t v = 0; v < w; v += VF_N) vf_store(to + v, vf_load(to + v) + vf_load(m->product + i * w + v));
    }
  }
}

// Add what a block has for the gradients of q, k and v.
static void back_block(const backward *b, const tile *x, const tile_memory *m, int64_t number, float *of_k,
                       float *of_v) {
  const attention *a = &b->a;
  const block *at = m->sight.blocks + number;
  const int64_t ld = a->tile, first = number * KEYS * ld;
  float *weights = m->weights + first, *gs = m->w.s;
  PG_FN(attention_rows)(a->v, tile_kv(a->v, x), at, m->w.kv, a->dvp);
  back_product(gs, SUMS_NEW, m->w.kv, 1, a->dvp, m->gy, at->n, a->dv, ld);
  for (int64_t v = 0; v < ld; v += VF_N) {
    const vf part = vf_load(m->part + v), weighed = vf_load(m->weighed + v);
    for (int64_t i = v; i < at->n * ld; i += ld) {
      const vf p = vf_load(weights + i) * part;
      vf g = p * (vf_load(gs + i) - weighed) * vf_set1(b->factor);
      if (a->cap > 0) {
        const vf t = vf_load(m->tanh + first + i);
        g = g * (vf_set1(1) - t * t);
      }
      vf_store(weights + i, p);
      vf_store(gs + i, g);
    }
  }
  PG_FN(attention_rows)(a->k, tile_kv(a->k, x), at, m->w.kv, a->dp);
  back_product(m->of_q, SUMS_ADD, m->w.kv, 0, a->dp, gs, a->d, at->n, ld);
  back_add_rows(b, x, m, at, weights, m->gy_rows, a->dvp, of_v);
  back_add_rows(b, x, m, at, gs, m->q_rows, a->dp, of_k);
}

static void back_tile(const backward *b, const tile *x, tile_memory *m, float *sums, double *of_sinks) {
  const attention *a = &b->a;
  float *of_k = sums, *of_v = of_k + a->n_kv * a->dp;
  back_read(b, x, m);
  for (int64_t r = 0; r < a->tile; r++) m->top[r] = -INFINITY;
  PG_FN(attention_sight)(a, x, &m->w, &m->sight);
  for (int64_t i = 0; i < m->sight.n_blocks; i++) back_scores(b, x, m, i);
  back_weights(b, x, m, of_sinks);
  memset(m->of_q, 0, (size_t)(a->dp * a->tile) * sizeof(float));
  for (int64_t i = 0; i < m->sight.n_blocks; i++) back_block(b, x, m, i, of_k, of_v);
  for (int r = 0; r < x->n; r++) {
    const int64_t token = tile_token(a, x, r) + x->batch * a->q->ne[1];
    float *y = b->of_q + (token * a->q->ne[2] + tile_head(a, x, r)) * a->d;
    for (int64_t c = 0; c < a->d; c++) y[c] = m->of_q[c * a->tile + r];
  }
}

// Write the gradients of keys first .. last of a head of K, sums over its parts.
static void back_write(const backward *b, int64_t head, const float *sums, pg_range keys) {
  const attention *a = &b->a;
  const int64_t heads = a->k->ne[2], step = back_sums(b);
  for (int64_t key = keys.first; key < keys.last; key++) {
    const int64_t row = (head / heads * a->n_kv + key) * heads + head % heads;
    float *of_k = b->of_k + row * a->d, *of_v = b->of_v + row * a->dv;
    const float *k = sums + key * a->dp, *v = sums + a->n_kv * a->dp + key * a->dvp;
    memcpy(of_k, k, (size_t)a->d * sizeof(float));
    memcpy(of_v, v, (size_t)a->dv * sizeof(float));
    for (int64_t i = 1; i < b->n_parts; i++) {
      for (int64_t c = 0; c < a->d; c++) of_k[c] += k[i * step + c];
      for (int64_t c = 0; c < a->dv; c++) of_v[c] += v[i * step + c];
    }
  }
}

// Write the gradients of sinks: sums over parts and batches.
static void back_write_sinks(const backward *b, const double *sums) {
  const attention *a = &b->a;
  for (int64_t h = 0; h < a->q->ne[2]; h++) {
    double sum = 0;
    for (int64_t head = h / a->group; head < b->n_heads; head += a->k->ne[2])
      for (int64_t i = 0; i < b->n_parts; i++) sum += sums[(head * b->n_parts + i) * a->group + h % a->group];
    b->of_sinks[h] = (float)sum;
  }
}

int PG_FN(flash_attn_ext_back_any)(const pg_task *t, int ith, int nth) {
  const backward b = back_unpack(t);
  const attention *a = &b.a;
  const int64_t step = back_sums(&b), n_sums = back_n_sums(&b, nth);
  const pg_range all = {0, a->n_kv};
  double *sinks = (double *)t->work;
  float *sums = (float *)t->work + back_sink_floats(&b);
  tile_memory m = back_memory(&b, sums + n_sums * step + ith * back_tile_floats(&b));
  for (int64_t i = pg_next_chunk(t, nth, -1); i < b.n_heads * b.n_parts; i = pg_next_chunk(t, nth, i)) {
    const int64_t head = i / b.n_parts;
    float *own = sums + (b.n_parts > 1 ? i : ith) * step;
    memset(own, 0, (size_t)step * sizeof(float));
    memset(sinks + i * a->group, 0, (size_t)a->group * sizeof(double));
    for (int64_t j = i % b.n_parts; j < b.n_tiles; j += b.n_parts) {
      const tile x = tile_of_head(a, head, j);
      back_tile(&b, &x, &m, own, sinks + i * a->group);
    }
    if (b.n_parts == 1) back_write(&b, head, own, all);
  }
  pg_sync(t, nth);
  if (b.n_parts > 1) {
    for (int64_t head = 0; head < b.n_heads; head++)
      back_write(&b, head, sums + head * b.n_parts * step, pg_share(a->n_kv, ith, nth));
  }
  if (a->sinks->data && ith == 0) back_write_sinks(&b, sinks);
  return PG_OK;
}
