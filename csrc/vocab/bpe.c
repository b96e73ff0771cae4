// Byte-pair merging: the adjacent pair of the lowest rank in a word becomes one symbol (among equals the leftmost),
// until no pair has a rank. A heap of (rank, place) makes it n log n; entries that a merge has made stale are skipped.
#include "vocab/hash.h"
#include "vocab/heap.h"
#include "vocab/watch.h"

static uint64_t bpe_slot(const pg_bpe *b, int32_t left, int32_t right) {
  const uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
  return seeded_hash(&b->seed, key) & (uint64_t)(b->n_slots - 1);
}

static int32_t bpe_find(const pg_bpe *b, int32_t left, int32_t right) {
  for (uint64_t s = bpe_slot(b, left, right);; s = (s + 1) & (uint64_t)(b->n_slots - 1)) {
    const int32_t i = b->slots[s];
    if (i < 0 || (b->left[i] == left && b->right[i] == right)) return i;
  }
}

static int32_t bpe_rank(const pg_bpe *b, int32_t pair) { return b->ranks ? b->ranks[pair] : pair; }

void pg_bpe_index(const pg_bpe *b, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    uint64_t s = bpe_slot(b, b->left[i], b->right[i]);
    while (b->slots[s] >= 0 && !(b->left[b->slots[s]] == b->left[i] && b->right[b->slots[s]] == b->right[i]))
      s = (s + 1) & (uint64_t)(b->n_slots - 1);
    if (b->slots[s] < 0) b->slots[s] = (int32_t)i;
  }
}

typedef struct {
  const pg_bpe *b;
  int32_t *symbols;
  pg_bpe_link *links;
  uint64_t *heap;
  int64_t n_heap;
} word;

// Put the pair of the symbol at `i` and the next one onto the heap, if it has a rank.
static void bpe_offer(word *w, int32_t i) {
  const int32_t next = w->links[i].next, pair = next < 0 ? -1 : bpe_find(w->b, w->symbols[i], w->symbols[next]);
  w->links[i].pair = pair;
  if (pair >= 0) heap_push(w->heap, &w->n_heap, (uint64_t)bpe_rank(w->b, pair) << 32 | (uint32_t)i);
}

// Returns whether SIGINT came.
static int merge_word(word *w, int32_t n, text_watch *watch) {
  pg_bpe_link *links = w->links;
  for (int32_t i = 0; i < n; i++) {
    links[i] = (pg_bpe_link){.prev = i - 1, .next = i + 1 < n ? i + 1 : -1, .pair = -1, .alive = 1};
  }
  for (int32_t i = 0; i < n; i++) bpe_offer(w, i);
  while (w->n_heap) {
    if (watch_stops(watch, 16)) return 1; // a merge costs more than a step elsewhere
    const uint64_t best = heap_pop(w->heap, &w->n_heap);
    const int32_t i = (int32_t)(uint32_t)best, pair = links[i].pair;
    if (!links[i].alive || pair < 0 || bpe_rank(w->b, pair) != (int32_t)(best >> 32)) continue;
    const int32_t gone = links[i].next, next = links[gone].next;
    w->symbols[i] = w->b->merged[pair];
    links[gone].alive = 0;
    links[i].next = next;
    if (next >= 0) links[next].prev = i;
    if (links[i].prev >= 0) bpe_offer(w, links[i].prev);
    bpe_offer(w, i);
  }
  return 0;
}

int64_t pg_bpe_merge(const pg_bpe *b, int32_t *symbols, int64_t *ends, int64_t n_words, pg_bpe_link *links,
                     uint64_t *heap, int watch) {
  text_watch at_work = watch_begin(watch);
  int64_t n_out = 0, first = 0;
  for (int64_t i = 0; i < n_words; i++) {
    word w = {.b = b, .symbols = symbols + first, .links = links, .heap = heap, .n_heap = 0};
    const int32_t n = (int32_t)(ends[i] - first);
    if (merge_word(&w, n, &at_work)) return watch_end(&at_work, PG_STOPPED);
    for (int32_t j = 0; j < n; j++) {
      if (links[j].alive) symbols[n_out++] = w.symbols[j];
    }
    first = ends[i];
    ends[i] = n_out;
  }
  return watch_end(&at_work, n_out);
}
