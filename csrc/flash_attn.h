// What the two ways through flash_attn_ext share: the op unpacked, a tile of query rows, its mask.
#pragma once
#include "blocks.h"
#include "rows.h"
#include "softmax.h"

enum { KEYS = 64, FEW = 4, TILE = 2 * VF_N }; // keys per block; query rows: few, and at most

typedef struct attention {
  const pg_tensor *q, *k, *v, *m, *y;
  int64_t d, dv;       // elements of a row of k and of v
  int64_t dp, dvp;     // ... rounded up to whole registers
  int64_t n_kv, group; // keys; query heads per KV head
  int64_t n_rows;      // query rows per KV head: n_tokens * group, the heads of one token side by side
  int64_t tile;        // query rows per tile: FEW, VF_N or TILE
  int64_t n_units;     // tiles in all
  int64_t n_splits;    // parts of the keys that different threads take
  float scale, cap;    // cap > 0: scores become cap * tanh(scale * q k), scale already divided by cap
  pg_to_f32 k_to_f32, v_to_f32;
} attention;

// A tile's running result over the keys seen so far. out: [tile][dvp] for FEW rows, else [dv][tile].
typedef struct state {
  float *top, *sum; // [tile] largest score; sum of exp(score - top)
  float *out;       // sum of exp(score - top) * v
} state;

typedef struct scratch {
  float *q;    // [tile][dp] for FEW rows, else [d][tile], scaled
  float *s;    // [tile][KEYS] for FEW rows, else [KEYS][tile]
  float *bias; // as s
  float *raw;  // [tile][KEYS] the mask of a block
  float *kv;   // [KEYS][max(dp, dvp)]
} scratch;

typedef struct tile {
  int64_t head_kv, batch, row0;
  int n;                  // rows that exist
  const char *mask[TILE]; // per row
  float slope[TILE];
} tile;

enum visibility { HIDDEN, OPEN, MIXED };

// The mask of keys j0.. (n of them) on a tile: keys[0..*n_keys) are those (less j0) that some row sees; if MIXED,
// bias[r * row_step + i * key_step] is what row r adds to its score with key keys[i].
static inline enum visibility tile_mask(const attention *a, const tile *t, int64_t j0, int n, const scratch *w,
                                        int64_t row_step, int64_t key_step, uint8_t *keys, int *n_keys) {
  uint32_t seen[KEYS] = {0}, biased = 0;
  if (a->m->data) {
    for (int r = 0; r < t->n; r++) {
      float *raw = w->raw + r * KEYS;
      if (r && t->mask[r] == t->mask[r - 1]) { // heads of one token
        memcpy(raw, raw - KEYS, n * sizeof *raw);
        continue;
      }
      pg_get_f32(raw, a->m, t->mask[r], j0, n);
      for (int j = 0; j < n; j++) {
        seen[j] |= raw[j] != -INFINITY;
        biased |= raw[j] != 0;
      }
    }
  }
  *n_keys = 0;
  for (int j = 0; j < n; j++)
    if (seen[j] || !a->m->data) keys[(*n_keys)++] = (uint8_t)j;
  if (!*n_keys) return HIDDEN;
  if (!biased) return OPEN;
  for (int r = 0; r < t->n; r++)
    for (int i = 0; i < *n_keys; i++) w->bias[r * row_step + i * key_step] = t->slope[r] * w->raw[r * KEYS + keys[i]];
  return MIXED;
}

static inline const char *tile_kv(const pg_tensor *x, const tile *t) { return pg_row_at(x, 0, t->head_kv, t->batch); }

static inline const float *tile_query(const attention *a, const tile *t, int r) {
  const int64_t row = t->row0 + r;
  return (const float *)pg_row_at(a->q, row / a->group, t->head_kv * a->group + row % a->group, t->batch);
}

// Adds keys first..last to a tile's state (which starts with top -inf, the rest 0).
void PG_FN(attend_few)(const attention *a, const tile *t, const scratch *w, const state *st, int64_t first,
                       int64_t last);
void PG_FN(attend_tile)(const attention *a, const tile *t, const scratch *w, const state *st, int64_t first,
                        int64_t last);
