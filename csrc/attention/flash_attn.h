// Shared by all kinds of attention: the unpacked op, a tile of query rows, its mask, and blocks of K and V as f32.
#pragma once
#include "formats/storage.h"
#include "simd/rows.h"
#include "kernels/softmax.h"

enum { KEYS = 64, FEW = 4, TILE = 2 * VF_N }; // keys of a block; few query rows; most query rows of a tile

typedef struct attention {
  const pg_tensor *q, *k, *v, *m, *sinks;
  pg_tensor y;         // ne [dv, n_tokens, n_head, n_batch]; its strides may be in another order
  int transposed;      // v is [n_kv, dv, n_head_kv, n_batch], not [dv, n_kv, ..]
  float none;          // the result of a row that sees no key
  int64_t d, dv;       // elements of a row of q and k; of a row of v
  int64_t dp, dvp;     // ... rounded up to whole registers
  int64_t n_kv, group; // keys; query heads per KV head
  int64_t n_rows;      // query rows per KV head: n_tokens * group, the heads of one token side by side
  int64_t tile;        // query rows per tile: FEW, VF_N or TILE
  int64_t n_units;     // tiles in all
  int64_t n_splits;    // parts of the keys, for threads to share
  float scale, cap;    // cap > 0: scores become cap * tanh(scale * q k), scale already divided by cap
  double max_bias;
} attention;

#define UNROLL _Pragma("GCC unroll 16")

// The result of a tile over the keys seen so far. out: [tile][dvp] for FEW rows, else [dvp][tile].
typedef struct state {
  float *top, *sum; // [tile] largest score; sum of exp(score - top)
  float *out;       // sum of exp(score - top) * v
} state;

typedef struct scratch {
  float *q;    // [tile][dp] for FEW rows, else [d][tile], scaled
  float *s;    // [tile][KEYS] for FEW rows, else [KEYS][tile]
  float *bias; // as s
  float *raw;  // [tile][KEYS] the mask of a block
  float *kv;   // [KEYS][dp] or [KEYS][dvp] or [dvp][KEYS]
} scratch;

typedef struct tile {
  int64_t head_kv, batch, row0;
  int n;                  // rows that exist
  const char *mask[TILE]; // per row
  int own[TILE];          // the first row with the same mask: heads of a token share one
  float slope[TILE];
} tile;

// The keys of a block that some row of the tile sees.
typedef struct block {
  int64_t first;      // of the block
  int n;              // keys seen
  int run;            // they lie side by side
  int biased;         // the mask adds something to their scores
  uint8_t keys[KEYS]; // the keys that are seen, counted from `first`
} block;

// What a mask does with some keys, for all rows of a tile.
enum mask_kind { MASK_MIXED, MASK_HIDES, MASK_SHOWS }; // shows: it adds nothing, either

static inline enum mask_kind tile_mask_kind(const attention *a, const tile *t, int64_t first, int64_t n) {
  uint32_t differs = 0, any = 0; // bits in which numbers differ from -inf; from 0
  for (int r = 0; r < t->n && !(differs && any); r++) {
    if (t->own[r] != r) continue;
    if (a->m->type == PG_F16) {
      const uint16_t *x = (const uint16_t *)t->mask[r] + first;
      uint16_t not_hidden = 0, some = 0;
      for (int64_t i = 0; i < n; i++) {
        not_hidden |= x[i] ^ 0xfc00;
        some |= x[i];
      }
      differs |= not_hidden;
      any |= some;
    } else {
      const uint32_t *x = (const uint32_t *)t->mask[r] + first;
      for (int64_t i = 0; i < n; i++) {
        differs |= x[i] ^ 0xff800000u;
        any |= x[i];
      }
    }
  }
  return !differs ? MASK_HIDES : any ? MASK_MIXED : MASK_SHOWS;
}

// The block of keys `first`..last (KEYS of them at most) for a tile. If biased, bias[r * row_step + i * key_step] is
// added to the score of row r with key keys[i].
static inline block tile_block(const attention *a, const tile *t, int64_t first, int64_t last, const scratch *w,
                               int64_t row_step, int64_t key_step) {
  const int n = (int)PG_MIN(KEYS, last - first);
  block b = {.first = first, .n = n, .run = 1};
  const enum mask_kind kind = a->m->data ? tile_mask_kind(a, t, first, n) : MASK_SHOWS;
  uint32_t seen[KEYS] = {0}, added[KEYS] = {0}, any = 0;
  if (kind == MASK_HIDES) return (block){.n = 0};
  for (int r = 0; kind == MASK_MIXED && r < t->n; r++) {
    if (t->own[r] != r) continue;
    float *raw = w->raw + r * KEYS;
    pg_get_f32(raw, a->m, t->mask[r], first, n);
    for (int j = 0; j < n; j++) {
      seen[j] |= raw[j] != -INFINITY;
      any |= added[j] |= raw[j] != 0;
    }
  }
  for (int j = 0; j < KEYS; j++) b.keys[j] = (uint8_t)j;
  if (!any) return b;
  b.n = 0;
  for (int j = 0; j < n; j++)
    if (seen[j]) {
      b.keys[b.n++] = (uint8_t)j;
      b.biased |= (int)added[j];
    }
  b.run = b.n && b.keys[b.n - 1] - b.keys[0] == b.n - 1;
  for (int r = 0; b.biased && r < t->n; r++) {
    const float *raw = w->raw + t->own[r] * KEYS, slope = t->slope[r];
    float *bias = w->bias + r * row_step;
    if (slope != 0) {
      for (int i = 0; i < b.n; i++) bias[i * key_step] = slope * raw[b.keys[i]];
    } else { // -inf hides a key here, too
      for (int i = 0; i < b.n; i++) bias[i * key_step] = raw[b.keys[i]] == -INFINITY ? -INFINITY : 0 * raw[b.keys[i]];
    }
  }
  return b;
}

static inline int64_t attn_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The sizes that follow from the operands; those of tiles do not.
static inline attention attn_sizes(attention a) {
  a.d = a.k->ne[0];
  a.dv = a.v->ne[a.transposed];
  a.dp = attn_up(a.d, VF_N);
  a.dvp = attn_up(a.dv, VF_N);
  a.n_kv = a.k->ne[1];
  a.group = a.q->ne[2] / a.k->ne[2];
  a.n_rows = a.q->ne[1] * a.group;
  return a;
}

static inline const char *tile_kv(const pg_tensor *x, const tile *t) { return pg_row_at(x, 0, t->head_kv, t->batch); }

// The token and the query head of row r.
static inline int64_t tile_token(const attention *a, const tile *t, int r) { return (t->row0 + r) / a->group; }
static inline int64_t tile_head(const attention *a, const tile *t, int r) {
  return t->head_kv * a->group + (t->row0 + r) % a->group;
}

// Tile number i of a head of K, counted through all batches.
static inline tile tile_of_head(const attention *a, int64_t head, int64_t i) {
  tile x = {.head_kv = head % a->k->ne[2], .batch = head / a->k->ne[2], .row0 = i * a->tile};
  x.n = (int)PG_MIN(a->tile, a->n_rows - x.row0);
  for (int r = 0; a->m->data && r < x.n; r++) {
    const int64_t h = tile_head(a, &x, r);
    x.mask[r] = pg_row_at(a->m, tile_token(a, &x, r), h % a->m->ne[2], x.batch % a->m->ne[3]);
    x.own[r] = r && x.mask[r] == x.mask[r - 1] ? x.own[r - 1] : r;
    x.slope[r] = (float)pg_alibi_slope(a->max_bias, h, a->q->ne[2]);
  }
  return x;
}

static inline const float *tile_query(const attention *a, const tile *t, int r) {
  return (const float *)pg_row_at(a->q, tile_token(a, t, r), tile_head(a, t, r), t->batch);
}

// Elements i.. of floats of a type at p.
PG_INLINE vf float_load(const char *p, int64_t i, int64_t type) {
  if (type == PG_F32) return vf_load((const float *)p + i);
  if (type == PG_F16) return vf_load_f16((const uint16_t *)p + i);
  return vf_load_bf16((const uint16_t *)p + i);
}

// Convert the rows of a block's keys to f32: to[i * ld ..] = row keys[i] of x, whose row 0 is at `head`.
void PG_FN(attention_rows)(const pg_tensor *x, const char *head, const block *b, float *to, int64_t ld);
// The same for a transposed x: to[c * KEYS + i] = element keys[i] of row c; padded with zeros to whole registers.
void PG_FN(attention_columns)(const pg_tensor *x, const char *head, const block *b, float *to);

// Adds keys first..last to a tile's state (which starts with top -inf, the rest 0).
void PG_FN(attend_few)(const attention *a, const tile *t, const scratch *w, const state *st, int64_t first,
                       int64_t last);
void PG_FN(attend_tile)(const attention *a, const tile *t, const scratch *w, const state *st, int64_t first,
                        int64_t last);

// Run the op with another function instead of attend_tile.
typedef void (*pg_attend)(const attention *a, const tile *t, const scratch *w, const state *st, int64_t first,
                          int64_t last);
int PG_FN(flash_attn_ext_with)(const pg_task *t, int ith, int nth, pg_attend many);
int PG_FN(attn_vt_with)(const pg_task *t, int ith, int nth, pg_attend many);

// Those of AVX2, for levels above it.
#if VF_N == 16
#define NARROW(name) PG_CAT(name, __, avx2)
#else
#define NARROW PG_FN
#endif
int64_t NARROW(flash_attn_ext_work)(const pg_task *t, int nth);
int NARROW(flash_attn_ext_any)(const pg_task *t, int ith, int nth);
int64_t NARROW(attn_vt_work)(const pg_task *t, int nth);
int NARROW(attn_vt_any)(const pg_task *t, int ith, int nth);
