// Cut texts out of another text, the longest first. A heap has an entry for each place where one may begin: the longest
// text that lies in the part not taken yet. When a cut has taken some of its bytes, the entry is put back with the next
// shorter text of its place. Each cut does this to fewer places than it has bytes, so that there are n log n steps,
// besides the lengths of texts.
#include <stddef.h>

#include "vocab/heap.h"
#include "vocab/trie.h"
#include "vocab/watch.h"

enum { INSIDE = -1, STRIPPED = -2 }; // marks of bytes: 0 when it is not taken, a text's number + 1 where it begins

typedef struct {
  const pg_trie *t;
  const uint8_t *how, *bytes;
  int64_t n;
  int32_t *marks; // NULL: nothing is taken
  text_watch watch;
} cutter;

// The longest text that begins at `at` and lies in the part not taken; -1 when there is none. `any`: any such text.
static int32_t special_text_here(cutter *c, int64_t at, int any) {
  int32_t found = -1, node = 0;
  for (;
       at < c->n && !(any && found >= 0) && !(c->marks && c->marks[at]) && (node = trie_step(c->t, node, c->bytes[at]));
       at++) {
    const int32_t text = trie_text(c->t, node);
    if (text >= 0 && c->how[text] & PG_CUT) found = text;
    c->watch.steps++;
  }
  return found;
}

int64_t pg_special_begin(const pg_trie *t, const uint8_t *how, const uint8_t *bytes, int64_t n, uint64_t *heap,
                         int watch) {
  cutter c = {.t = t, .how = how, .bytes = bytes, .n = n, .marks = NULL, .watch = watch_begin(watch)};
  int64_t n_heap = 0;
  for (int64_t at = 0; at < n; at++) {
    if (watch_stops(&c.watch, 1)) return watch_end(&c.watch, PG_STOPPED);
    if (!t->first[bytes[at]]) continue;
    const int32_t text = special_text_here(&c, at, !heap);
    if (text < 0) continue;
    if (heap) {
      heap_push(heap, &n_heap, (uint64_t)text << 32 | (uint64_t)at);
    } else {
      n_heap++;
    }
  }
  return watch_end(&c.watch, n_heap);
}

static int is_space(uint8_t c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

static void special_strip(cutter *c, int64_t from, int64_t step) {
  for (int64_t at = from; at >= 0 && at < c->n && !c->marks[at] && is_space(c->bytes[at]); at += step)
    c->marks[at] = STRIPPED;
}

static int64_t special_list_parts(const cutter *c, pg_part *parts) {
  int64_t n_parts = 0;
  for (int64_t at = 0, begin; at < c->n;) {
    begin = at;
    const int32_t mark = c->marks[at++];
    if (mark == STRIPPED) continue;
    while (at < c->n && c->marks[at] == (mark ? INSIDE : 0)) at++;
    parts[n_parts++] = (pg_part){.begin = begin, .end = at, .text = mark ? mark - 1 : -1};
  }
  return n_parts;
}

int64_t pg_special_cut(const pg_trie *t, const uint8_t *how, const int32_t *lengths, const uint8_t *bytes, int64_t n,
                       uint64_t *heap, int64_t n_heap, int64_t *places, int32_t *marks, pg_part *parts, int watch) {
  cutter c = {.t = t, .how = how, .bytes = bytes, .n = n, .marks = marks, .watch = watch_begin(watch)};
  int64_t n_places = 0; // where the text that is being cut out was found
  while (n_heap) {
    const uint64_t key = heap_pop(heap, &n_heap);
    const int32_t text = (int32_t)(key >> 32), length = lengths[text];
    const int64_t at = (int64_t)(uint32_t)key;
    if (!marks[at] && !marks[at + length - 1]) { // enough, because every run of taken bytes is longer than this text
      marks[at] = text + 1;
      for (int64_t i = 1; i < length; i++) marks[at + i] = INSIDE;
      places[n_places++] = at;
    } else if (!marks[at]) {
      const int32_t next = special_text_here(&c, at, 0);
      if (next >= 0) heap_push(heap, &n_heap, (uint64_t)next << 32 | (uint64_t)at);
    }
    if (!n_heap || (int32_t)(heap[0] >> 32) != text) {
      for (int64_t i = 0; i < n_places; i++) {
        if (how[text] & PG_LSTRIP) special_strip(&c, places[i] - 1, -1);
        if (how[text] & PG_RSTRIP) special_strip(&c, places[i] + length, 1);
      }
      n_places = 0;
    }
    if (watch_stops(&c.watch, length)) return watch_end(&c.watch, PG_STOPPED);
  }
  return watch_end(&c.watch, special_list_parts(&c, parts));
}
