// Find the keys that a tile sees, and convert blocks of K or V to f32.
#include "attention/flash_attn.h"

PG_INLINE vf float_load_n(const char *p, int64_t i, int n, int64_t type) {
  if (type == PG_F32) return vf_load_n((const float *)p + i, n);
  if (type == PG_F16) return vf_load_f16_n((const uint16_t *)p + i, n);
  return vf_load_bf16_n((const uint16_t *)p + i, n);
}

// Convert n floats of a type; pad with zeros to whole registers.
PG_INLINE void floats(const char *p, float *to, int64_t n, int64_t type) {
  int64_t i = 0;
  for (; i + 4 * VF_N <= n; i += 4 * VF_N)
    for (int v = 0; v < 4; v++) vf_store(to + i + v * VF_N, float_load(p, i + v * VF_N, type));
  for (; i + VF_N <= n; i += VF_N) vf_store(to + i, float_load(p, i, type));
  if (i < n) vf_store(to + i, float_load_n(p, i, (int)(n - i), type));
}

PG_INLINE void float_rows(const pg_tensor *x, const char *head, const block *b, float *to, int64_t ld, int64_t type) {
  for (int i = 0; i < b->n; i++) floats(head + b->keys[i] * x->nb[1], to + i * ld, x->ne[0], type);
}

void PG_FN(attention_rows)(const pg_tensor *x, const char *head, const block *b, float *to, int64_t ld) {
  if (x->type == PG_F32) {
    float_rows(x, head, b, to, ld, PG_F32);
  } else if (x->type == PG_F16) {
    float_rows(x, head, b, to, ld, PG_F16);
  } else if (x->type == PG_BF16) {
    float_rows(x, head, b, to, ld, PG_BF16);
  } else {
    const pg_to_f32 to_f32 = PG_FN(to_f32)(x->type);
    for (int i = 0; i < b->n; i++) {
      to_f32(head + b->keys[i] * x->nb[1], to + i * ld, x->ne[0]);
      for (int64_t c = x->ne[0]; c < ld; c++) to[i * ld + c] = 0;
    }
  }
}

PG_INLINE void float_columns(const pg_tensor *x, const char *head, const block *b, float *to, int64_t type) {
  const char *first = head + b->keys[0] * x->nb[0];
  for (int64_t c = 0; c < x->ne[1]; c++) floats(first + c * x->nb[1], to + c * KEYS, b->n, type);
}

void PG_FN(attention_columns)(const pg_tensor *x, const char *head, const block *b, float *to) {
  if (x->type == PG_F32) {
    float_columns(x, head, b, to, PG_F32);
  } else if (x->type == PG_F16) {
    float_columns(x, head, b, to, PG_F16);
  } else {
    float_columns(x, head, b, to, PG_BF16);
  }
}

// Keys i .. last, which lie within VF_N cells, of `rows` rows from `head` on.
PG_INLINE void turn(const pg_tensor *x, const char *head, int64_t rows, const block *b, int i, int last, float *to,
                    int64_t ld, int64_t type) {
  const int64_t key = b->keys[i], rest = x->ne[0] - key;
  const char *p = head + key * x->nb[0];
  vf lines[VF_N];
  if (rows >= VF_N && rest >= VF_N) {
    UNROLL for (int c = 0; c < VF_N; c++) lines[c] = float_load(p + c * x->nb[1], 0, type);
  } else {
    for (int c = 0; c < VF_N; c++)
      lines[c] = c >= rows      ? vf_zero()
                 : rest >= VF_N ? float_load(p + c * x->nb[1], 0, type)
                                : float_load_n(p + c * x->nb[1], 0, (int)rest, type);
  }
  vf_turn(lines);
  if (last - i == VF_N) {
    UNROLL for (int l = 0; l < VF_N; l++) vf_store(to + (i + l) * ld, lines[l]);
  } else {
    for (int l = i; l < last; l++) vf_store(to + l * ld, lines[b->keys[l] - key]);
  }
}

PG_INLINE void float_turned(const pg_tensor *x, const char *head, const block *b, float *to, int64_t ld, int64_t type) {
  for (int i = 0, last = 0; i < b->n; i = last) {
    while (last < b->n && b->keys[last] - b->keys[i] < VF_N) last++;
    for (int64_t c = 0; c < x->ne[1]; c += VF_N)
      turn(x, head + c * x->nb[1], x->ne[1] - c, b, i, last, to + c, ld, type);
  }
}

void PG_FN(attention_turned)(const pg_tensor *x, const char *head, const block *b, float *to, int64_t ld) {
  if (x->type == PG_F32) {
    float_turned(x, head, b, to, ld, PG_F32);
  } else if (x->type == PG_F16) {
    float_turned(x, head, b, to, ld, PG_F16);
  } else {
    float_turned(x, head, b, to, ld, PG_BF16);
  }
}

#if VF_N == 4
int PG_FN(attention_turned_16)(const pg_tensor *x, const char *head, const block *b, uint16_t *to, int64_t ld) {
  return 0;
}
#else
#if VF_N == 16
typedef __m512i shorts;
#define LOW16(a, b) _mm512_unpacklo_epi16(a, b)
#define HIGH16(a, b) _mm512_unpackhi_epi16(a, b)
#else
typedef __m256i shorts;
#define LOW16(a, b) _mm256_unpacklo_epi16(a, b)
#define HIGH16(a, b) _mm256_unpackhi_epi16(a, b)
#endif
enum { CHANNELS = 8, SHORTS = 2 * VF_N };

// The registers 0, 4, 1, 5, 2, 6, 3, 7 in turns: three times that transposes eight rows in each 128 bits.
PG_INLINE void take_turns(shorts *to, const shorts *x) {
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
    to[2 * i] = LOW16(x[i], x[i + 4]);
    to[2 * i + 1] = HIGH16(x[i], x[i + 4]);
  }
}

// SHORTS numbers of CHANNELS rows. Rows that come later are prefetched.
PG_INLINE void turn_16(const char *p, int64_t nb, uint16_t *to, int64_t ld) {
  shorts a[CHANNELS], b[CHANNELS];
  _Pragma("GCC unroll 8") for (int c = 0; c < CHANNELS; c++, p += nb) {
    memcpy(a + c, p, sizeof *a);
    __builtin_prefetch(p + KEYS * sizeof *to);
  }
  take_turns(b, a);
  take_turns(a, b);
  take_turns(b, a);
  _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++) {
    uint16_t *row = to + k * ld;
#if VF_N == 16
    const __m512 x = _mm512_castsi512_ps(b[k]);
    const __m256 half[2] = {_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)};
#else
    const __m256 half[1] = {_mm256_castsi256_ps(b[k])};
#endif
    _Pragma("GCC unroll 2") for (int h = 0; h < VF_N / 8; h++, row += 16 * ld) {
      _mm_storeu_ps((float *)row, _mm256_castps256_ps128(half[h]));
      _mm_storeu_ps((float *)(row + 8 * ld), _mm256_extractf128_ps(half[h], 1));
    }
  }
}

int PG_FN(attention_turned_16)(const pg_tensor *x, const char *head, const block *b, uint16_t *to, int64_t ld) {
  const int64_t n = attn_up(b->n, SHORTS);
  if (!b->run || x->type == PG_F32 || x->ne[1] != ld || b->keys[0] + n > x->ne[0]) return 0;
  for (int64_t c = 0; c < ld; c += CHANNELS)
    for (int64_t i = 0; i < n; i += SHORTS)
      turn_16(head + c * x->nb[1] + (b->keys[0] + i) * 2, x->nb[1], to + i * ld + c, ld);
  return 1;
}
#endif

// What a mask does with some keys, for all rows of a tile.
enum mask_kind { MASK_MIXED, MASK_HIDES, MASK_SHOWS }; // shows: it adds nothing, either

static enum mask_kind tile_mask_kind(const attention *a, const tile *t, int64_t first, int64_t n) {
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

// The keys found so far.
typedef struct found {
  sight *x;
  int64_t n;
  int n_masks;         // masks that differ
  uint32_t own;        // rows whose mask no row before has, as bits
  uint32_t bits[TILE]; // rows with the mask of row r, which is their own
  int32_t count[TILE]; // keys that row r has seen since its last group ended
  int64_t last[TILE];  // n after the last key that row r saw
} found;

// Note that groups of the rows `own` end with key i.
static void found_ends(found *f, int64_t i, uint32_t own) {
  block *b = f->x->blocks + i / KEYS;
  for (; own; own &= own - 1) f->x->ends[i] |= f->bits[__builtin_ctz(own)];
  b->split |= i % KEYS != KEYS - 1;
}

// All rows see the keys first .. first + n.
static void found_run(found *f, int64_t first, int n) {
  for (int i = 0; i < n; i++) f->x->keys[f->n + i] = (int32_t)(first + i);
  for (int i = 0; i < n; i++) f->x->seen[f->n + i] = f->own;
  f->x->n_seen += (int64_t)n * f->n_masks;
  for (uint32_t own = f->own; own; own &= own - 1) {
    const int r = __builtin_ctz(own), all = f->count[r] + n;
    if (all >= KEYS) found_ends(f, f->n + KEYS - 1 - f->count[r], 1u << r);
    f->count[r] = all % KEYS;
    f->last[r] = f->n + n;
  }
  f->n += n;
}

// The rows `seen` see a key.
PG_INLINE void found_key(found *f, int64_t key, uint32_t seen) {
  const int64_t i = f->n++;
  uint32_t full = 0;
  f->x->keys[i] = (int32_t)key;
  f->x->seen[i] = seen;
  f->x->n_seen += __builtin_popcount(seen);
  if (f->n_masks == 1) {
    full = ++f->count[0] == KEYS;
    f->count[0] &= KEYS - 1;
    f->last[0] = f->n;
  } else {
    for (int r = 0; r < TILE; r++) {
      const int one = seen >> r & 1;
      f->count[r] += one;
      f->last[r] = one ? f->n : f->last[r];
      full |= (uint32_t)(f->count[r] == KEYS) << r;
      f->count[r] &= KEYS - 1;
    }
  }
  if (full) found_ends(f, i, full);
}

static void found_some(found *f, const attention *a, const tile *t, const scratch *w, int64_t first, int n) {
  uint32_t seen[KEYS] = {0}, added[KEYS] = {0};
  for (uint32_t own = f->own; own; own &= own - 1) {
    const int r = __builtin_ctz(own);
    float *raw = w->raw;
    pg_get_f32(raw, a->m, t->mask[r], first, n);
    for (int j = 0; j < n; j++) {
      seen[j] |= (uint32_t)(raw[j] != -INFINITY) << r;
      added[j] |= raw[j] != 0;
      f->x->added |= raw[j] != 0 && raw[j] != -INFINITY;
    }
  }
  for (int j = 0; j < n; j++)
    if (seen[j]) {
      f->x->blocks[f->n / KEYS].biased |= (int)added[j];
      found_key(f, first + j, seen[j]);
    }
}

// Nothing is found yet among at most n keys.
static found found_none(sight *x, int64_t n) {
  const int64_t most = sight_blocks(n);
  memset(x->blocks, 0, (size_t)most * sizeof *x->blocks);
  memset(x->ends, 0, (size_t)(most * KEYS) * sizeof *x->ends);
  x->n_seen = x->added = 0;
  return (found){.x = x};
}

// All keys are found.
static void found_all(const found *f) {
  sight *x = f->x;
  x->own = f->own;
  x->n = f->n;
  x->n_blocks = (f->n + KEYS - 1) / KEYS;
  for (int64_t i = 0; i < x->n_blocks; i++) {
    block *b = x->blocks + i;
    b->keys = x->keys + i * KEYS;
    b->ends = x->ends + i * KEYS;
    b->n = (int)PG_MIN(KEYS, f->n - i * KEYS);
    b->run = b->keys[b->n - 1] - b->keys[0] == b->n - 1;
    b->done = ~0u;
    for (uint32_t own = f->own; own; own &= own - 1) {
      const int r = __builtin_ctz(own);
      if (f->last[r] > i * KEYS + b->n) b->done &= ~f->bits[r];
    }
  }
}

void PG_FN(attention_sight)(const attention *a, const tile *t, const scratch *w, sight *x) {
  found f = found_none(x, a->n_kv);
  for (int r = 0; r < t->n; r++) {
    const int own = a->m->data ? t->own[r] : 0;
    f.n_masks += own == r;
    f.own |= 1u << own;
    f.bits[own] |= 1u << r;
  }
  for (int64_t first = 0; first < a->n_kv; first += KEYS) {
    const int n = (int)PG_MIN(KEYS, a->n_kv - first);
    const enum mask_kind kind = a->m->data ? tile_mask_kind(a, t, first, n) : MASK_SHOWS;
    if (kind == MASK_SHOWS) found_run(&f, first, n);
    if (kind == MASK_MIXED) found_some(&f, a, t, w, first, n);
  }
  found_all(&f);
}

void PG_FN(attention_sight_of)(const sight *all, int r, sight *x) {
  found f = found_none(x, all->n);
  f.n_masks = f.own = 1;
  f.bits[0] = ~0u;
  for (int64_t i = 0; i < all->n; i++) {
    if (!(all->seen[i] >> r & 1)) continue;
    x->blocks[f.n / KEYS].biased |= all->added;
    found_key(&f, all->keys[i], 1);
  }
  found_all(&f);
}
