// Shared by all kinds of attention: the unpacked op, a tile of query rows, the keys that it sees, and blocks of K and V
// as f32.
//
// The result of a row has the same bits whatever is computed beside it: other rows, keys of other sequences between its
// own, any number of threads. For that
// - keys that a row does not see change nothing: their weights are 0, and whatever is summed over keys is summed in the
//   order of cells, one key after the other, in lanes of its own;
// - sums are made of groups of KEYS keys, so that rounding errors do not grow with the number of keys; a row's groups
//   are counted in the keys that the row itself sees;
// - weights are exp(score - top) with the largest score of all keys, so all scores are computed before any weight;
// - the product of a query and a key has one order, see vf_sum4_in_turn.
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
  float scale, cap;    // cap > 0: scores become cap * tanh(scale * q k), scale already divided by cap
  double max_bias;
} attention;

#define UNROLL _Pragma("GCC unroll 16")

// Sums of a tile. The result is [tile][dvp] for FEW rows, else [dvp][tile]. A part is the sum of a group of keys that
// has not ended.
typedef struct state {
  float *top;            // [tile] largest score
  float *sum, *sum_part; // [tile] of the weights
  float *out, *out_part; // of weight * v
} state;

typedef struct scratch {
  float *q;    // [tile][dp] for FEW rows, else [dp][tile], scaled
  float *s;    // [tile][KEYS]
  float *bias; // as the scores of a block: [tile][KEYS] for FEW rows, else [KEYS][tile]
  float *raw;  // [tile][KEYS] the mask of some keys
  float *kv;   // [KEYS][dp] or [KEYS][dvp] or [dvp][KEYS]
} scratch;

typedef struct tile {
  int64_t head_kv, batch, row0;
  int n;                  // rows that exist
  const char *mask[TILE]; // per row
  int own[TILE];          // the first row with the same mask: heads of a token share one
  float slope[TILE];
} tile;

// KEYS keys that some row of the tile sees; the last block may have fewer.
typedef struct block {
  const int32_t *keys;  // their numbers, ascending
  const uint32_t *ends; // for each key, the rows (as bits) that have a group which ends with it
  int n;
  int run;       // they lie side by side
  int biased;    // the mask adds something to their scores, or hides some from some rows
  int split;     // groups end before the last key
  uint32_t done; // rows that see no key after this block
} block;

// All keys that a tile sees.
typedef struct sight {
  int64_t n_blocks;
  block *blocks;
  int32_t *keys;
  uint32_t *ends;
  uint32_t *seen; // for each key, the rows that see it, as bits: of rows with one mask only the first
  uint32_t own;   // these first rows
  int64_t n;      // keys
  int64_t n_seen; // keys that each of these rows sees, summed up
  int added;      // the mask adds something to scores
} sight;

static inline int64_t sight_blocks(int64_t n_kv) { return (n_kv + KEYS - 1) / KEYS; }

// Floats of memory for the sight of n_kv keys.
static inline int64_t sight_floats(int64_t n_kv) {
  const int64_t size = (int64_t)(sizeof(block) / sizeof(float)) + 3 * KEYS;
  return pg_times(sight_blocks(n_kv), size);
}

static inline sight sight_at(float *p, int64_t n_kv) {
  const int64_t n = sight_blocks(n_kv);
  sight x = {.blocks = (block *)p};
  x.keys = (int32_t *)(x.blocks + n);
  x.ends = (uint32_t *)(x.keys + n * KEYS);
  x.seen = x.ends + n * KEYS;
  return x;
}

// Find the keys that the rows of a tile see.
void PG_FN(attention_sight)(const attention *a, const tile *t, const scratch *w, sight *x);
// The same for rows of the tile that have one mask, the first of which is row r: `x` becomes what they see of `all`.
void PG_FN(attention_sight_of)(const sight *all, int r, sight *x);

// If the block is biased, bias[r * row_step + i * key_step] becomes what is added to the score of row r with key
// keys[i].
static inline void block_bias(const attention *a, const tile *t, const block *b, const scratch *w, int64_t row_step,
                              int64_t key_step) {
  for (int r = 0; b->biased && r < t->n; r++) {
    float *raw = w->raw + t->own[r] * KEYS, *bias = w->bias + r * row_step;
    const float slope = t->slope[r];
    if (t->own[r] == r) {
      if (b->run) {
        pg_get_f32(raw, a->m, t->mask[r], b->keys[0], b->n);
      } else {
        for (int i = 0; i < b->n; i++) pg_get_f32(raw + i, a->m, t->mask[r], b->keys[i], 1);
      }
    }
    if (slope != 0) {
      for (int i = 0; i < b->n; i++) bias[i * key_step] = slope * raw[i];
    } else { // -inf hides a key here, too
      for (int i = 0; i < b->n; i++) bias[i * key_step] = raw[i] == -INFINITY ? -INFINITY : 0 * raw[i];
    }
  }
}

// The rows that exist, as bits.
static inline uint32_t tile_rows(const tile *t) { return t->n == 32 ? ~0u : (1u << t->n) - 1; }

// The keys from i on until groups end, or the block does: one past the last one. `rows`: those whose groups end.
static inline int group_end(const block *b, int i, uint32_t *rows) {
  while (i < b->n - 1 && !b->ends[i]) i++;
  *rows = b->ends[i] | (i == b->n - 1 ? b->done : 0);
  return i + 1;
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
// The same for a transposed x.
void PG_FN(attention_turned)(const pg_tensor *x, const char *head, const block *b, float *to, int64_t ld);
// The same for keys that lie side by side, of 16-bit numbers, which stay as they are. Returns 0 when it cannot: the
// sizes must be whole registers.
int PG_FN(attention_turned_16)(const pg_tensor *x, const char *head, const block *b, uint16_t *to, int64_t ld);
// The columns of a transposed x, for keys that lie side by side: to[c * KEYS + i] = element keys[i] of row c; padded
// with zeros to whole registers.
void PG_FN(attention_columns)(const pg_tensor *x, const char *head, const block *b, float *to);

// How a tile is computed, in three steps. The scores of block i are at s + i * tile * KEYS: [tile][KEYS] for FEW rows,
// else [KEYS][tile].
typedef struct attend {
  // Compute the scores of blocks, and the largest one of each row.
  void (*scores)(const attention *a, const tile *t, const scratch *w, const sight *x, pg_range blocks, float *s,
                 float *top);
  // Turn the scores of a block into weights.
  void (*weights)(const attention *a, const tile *t, const block *b, float *s, const float *top);
  // Add all values to the sums, times their weights. `are_scores`: s has to be turned into weights first.
  void (*values)(const attention *a, const tile *t, const scratch *w, const sight *x, float *s, int are_scores,
                 const state *st);
} attend;
extern const attend PG_FN(attend_few), PG_FN(attend_tile);
