// Attention of many query rows with tile registers. It works as flash_attn_tile.c does, but each operand becomes two
// bf16 numbers: the rounded number and the rest that rounding left. Products of two rests are left out, so the error of
// a score is about 2**-16 of |q| |k|.
#include "simd/amx.h"
#include "simd/to_bf16.h"
#include "attention/flash_attn_tile.h"

// The rest of attention is avx512's.
#define AVX512(name) PG_CAT(name, __, avx512)
extern const attend AVX512(attend_tile);
void AVX512(attention_rows)(const pg_tensor *x, const char *head, const block *b, float *to, int64_t ld);
void AVX512(attention_turned)(const pg_tensor *x, const char *head, const block *b, float *to, int64_t ld);
void AVX512(attention_columns)(const pg_tensor *x, const char *head, const block *b, float *to);
int AVX512(flash_attn_ext_with)(const pg_task *t, int ith, int nth, const attend *many);
int AVX512(attn_vt_with)(const pg_task *t, int ith, int nth, const attend *many);
int64_t AVX512(flash_attn_ext_work)(const pg_task *t, int nth);
int64_t AVX512(attn_vt_work)(const pg_task *t, int nth);

enum { UNIT = 32, HALF = 16, LANES = 32 };

// Replace the floats of an operand by its numbers and rests, in the same memory. For sums along a row: 32 floats become
// a line of numbers and a line of rests.
PG_INLINE void split_row(float *x, int64_t n) {
  for (int64_t i = 0; i < n; i += UNIT) {
    const vf low = vf_load(x + i), high = vf_load(x + i + HALF);
    _mm512_storeu_si512(x + i, bf16_of(low, high));
    _mm512_storeu_si512(x + i + HALF, bf16_of(bf16_rest(low), bf16_rest(high)));
  }
}

// For sums across rows, which are LANES wide: two rows become four lines of pairs, for each half its numbers and its
// rests. n is even.
PG_INLINE void pair_rows(float *to, const float *x, int64_t n) {
  for (int64_t i = 0; i < n; i += 2, x += 2 * LANES, to += 2 * LANES) {
    const vf even[2] = {vf_load(x), vf_load(x + HALF)}, odd[2] = {vf_load(x + LANES), vf_load(x + LANES + HALF)};
    for (int h = 0; h < 2; h++) {
      _mm512_storeu_si512(to + h * LANES, bf16_pairs(even[h], odd[h]));
      _mm512_storeu_si512(to + h * LANES + HALF, bf16_pairs(bf16_rest(even[h]), bf16_rest(odd[h])));
    }
  }
}

// Transpose an operand, when the sum runs across the rows of x but tiles need it along rows: HALF columns of the n rows
// of x, `ld` wide, become rows of `to`, KEYS wide, in the form of split_row.
PG_INLINE void turn_columns(float *to, const float *x, int64_t ld, int64_t n) {
  for (int64_t i = 0; i < n; i += UNIT) {
    __m512i numbers[HALF], rests[HALF];
    for (int p = 0; p < HALF; p++) {
      const vf even = vf_load(x + (i + 2 * p) * ld), odd = vf_load(x + (i + 2 * p + 1) * ld);
      numbers[p] = bf16_pairs(even, odd);
      rests[p] = bf16_pairs(bf16_rest(even), bf16_rest(odd));
    }
    bf16_turn(to + i, KEYS * sizeof(float), numbers);
    bf16_turn(to + i + HALF, KEYS * sizeof(float), rests);
  }
}

// Load one part (0: numbers, 1: rests) of either operand. Tile registers: 0 and 1 rows, 2 and 3 lanes, 4 to 7 sums.
#define LOAD_ROWS(part)                                                                                                \
  TILE_LOAD(0, a + (part)*HALF, ld * 4);                                                                               \
  if (both) TILE_LOAD(1, a + HALF * ld + (part)*HALF, ld * 4)
#define LOAD_LANES(part)                                                                                               \
  TILE_LOAD(2, b + (part)*HALF, 2 * LANES * 4);                                                                        \
  TILE_LOAD(3, b + LANES + (part)*HALF, 2 * LANES * 4)
#define ADD_TERM()                                                                                                     \
  TILE_DOT(4, 0, 2);                                                                                                   \
  TILE_DOT(5, 0, 3);                                                                                                   \
  if (both) {                                                                                                          \
    TILE_DOT(6, 1, 2);                                                                                                 \
    TILE_DOT(7, 1, 3);                                                                                                 \
  }

// out[i][lane] = sum over n of rows a, `ld` apart, times lanes b; for HALF rows, or for `both` halves.
PG_INLINE void amx_product(float *out, const float *a, int64_t ld, const float *b, int64_t n, int both) {
  TILE_ZERO(4);
  TILE_ZERO(5);
  TILE_ZERO(6);
  TILE_ZERO(7);
  for (int64_t i = 0; i < n; i += UNIT, a += UNIT, b += UNIT * LANES) {
    LOAD_LANES(1);
    LOAD_ROWS(0);
    ADD_TERM();
    LOAD_LANES(0);
    ADD_TERM();
    LOAD_ROWS(1);
    ADD_TERM();
  }
  TILE_STORE(4, out, LANES * 4);
  TILE_STORE(5, out + HALF, LANES * 4);
  if (!both) return;
  TILE_STORE(6, out + HALF * LANES, LANES * 4);
  TILE_STORE(7, out + HALF * LANES + HALF, LANES * 4);
}

static void amx_product_of(float *out, const float *a, int64_t ld, const float *b, int64_t n, int64_t rows) {
  if (rows > HALF) {
    amx_product(out, a, ld, b, n, 1);
  } else {
    amx_product(out, a, ld, b, n, 0);
  }
}

static void scores_of_block(const attention *a, const scratch *w, const block *b, const char *k, float *s, fetch next) {
  AVX512(attention_rows)(a->k, k, b, w->kv, a->dp);
  for (int i = 0; i < b->n; i++) split_row(w->kv + i * a->dp, a->d);
  for (int i = 0; i < b->n; i += 2 * HALF) {
    fetch_up_to(&next, i + 2 * HALF, KEYS);
    amx_product_of(s + i * LANES, w->kv + i * a->dp, a->dp, w->q, a->d, b->n - i);
  }
  fetch_up_to(&next, 1, 1);
}

// Here the groups of a sum are the blocks.
static void add_values(const attention *a, const tile *t, const scratch *w, const block *b, const char *v,
                       const float *s, const state *st, int ends, fetch next) {
  const int64_t n = (b->n + UNIT - 1) / UNIT * UNIT;
  const int in_columns = a->transposed && b->run;
  memcpy(w->s, s, (size_t)b->n * LANES * sizeof(float));
  memset(w->s + b->n * LANES, 0, (size_t)(n - b->n) * LANES * sizeof(float));
  pair_rows(w->s, w->s, n);
  if (in_columns) {
    AVX512(attention_columns)(a->v, v, b, w->kv);
    for (int64_t c = 0; c < a->dv; c++) {
      float *row = w->kv + c * KEYS;
      for (int64_t i = b->n; i < n; i++) row[i] = 0;
      split_row(row, n);
    }
  } else {
    if (a->transposed) {
      AVX512(attention_turned)(a->v, v, b, w->kv, a->dvp);
    } else {
      AVX512(attention_rows)(a->v, v, b, w->kv, a->dvp);
    }
    memset(w->kv + b->n * a->dvp, 0, (size_t)((n - b->n) * a->dvp) * sizeof(float));
  }
  for (int64_t c = 0; c < a->dv; c += 2 * HALF) {
    const int64_t rows = PG_MIN(2 * HALF, a->dv - c);
    float turned[2 * HALF][KEYS], sums[2 * HALF][LANES], *out = st->out + c * LANES;
    const float *values = w->kv + c * KEYS;
    if (!in_columns) {
      for (int64_t i = 0; i < rows; i += HALF) turn_columns(turned[i], w->kv + c + i, a->dvp, n);
      values = turned[0];
    }
    fetch_up_to(&next, c + rows, a->dv);
    amx_product_of(sums[0], values, KEYS, w->s, n, rows);
    for (int64_t i = 0; i < rows; i++, out += LANES)
      for (int l = 0; l < LANES; l += HALF) vf_store(out + l, vf_load(out + l) + vf_load(sums[i] + l));
  }
}

static int with_tiles(const attention *a) {
  const int exact = a->k->type == PG_F32 || a->v->type == PG_F32; // a cache in f32 gets the precision of f32
  return !exact && a->tile == LANES && a->d % UNIT == 0 && a->dv % HALF == 0;
}

static void amx_scores(const attention *a, const tile *t, const scratch *w, const sight *x, pg_range blocks, float *s,
                       float *top) {
  if (!with_tiles(a)) {
    AVX512(attend_tile).scores(a, t, w, x, blocks, s, top);
    return;
  }
  put_queries(a, t, w, LANES);
  pair_rows(w->q, w->q, a->d);
  walk_scores(a, t, w, x, blocks, s, top, 2, scores_of_block);
}

static void amx_weights(const attention *a, const tile *t, const block *b, float *s, const float *top) {
  AVX512(attend_tile).weights(a, t, b, s, top);
}

static void amx_values(const attention *a, const tile *t, const scratch *w, const sight *x, float *s, int are_scores,
                       const state *st) {
  if (!with_tiles(a)) {
    AVX512(attend_tile).values(a, t, w, x, s, are_scores, st);
  } else {
    walk_values(a, t, w, x, s, are_scores, st, 2, add_values);
  }
}

static const attend attend_amx = {amx_scores, amx_weights, amx_values};

int64_t PG_FN(flash_attn_ext_work)(const pg_task *t, int nth) { return AVX512(flash_attn_ext_work)(t, nth); }
int64_t PG_FN(attn_vt_work)(const pg_task *t, int nth) { return AVX512(attn_vt_work)(t, nth); }

int PG_FN(flash_attn_ext_any)(const pg_task *t, int ith, int nth) {
  TILES_BEGIN();
  const int status = AVX512(flash_attn_ext_with)(t, ith, nth, &attend_amx);
  TILES_END();
  return status;
}

int PG_FN(attn_vt_any)(const pg_task *t, int ith, int nth) {
  TILES_BEGIN();
  const int status = AVX512(attn_vt_with)(t, ith, nth, &attend_amx);
  TILES_END();
  return status;
}
