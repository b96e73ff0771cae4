// Cut words into the longest texts, from the left.
#include <string.h>

#include "vocab/trie.h"
#include "vocab/watch.h"

// The longest text that text[0 .. n] begins with, and its length; -1 when there is none.
static int32_t longest_text(const pg_trie *t, const uint8_t *text, int64_t n, int64_t *length, int64_t *steps) {
  int32_t longest = -1, node = 0;
  int64_t end = 0;
  while (end < n && (node = trie_step(t, node, text[end]))) {
    end++;
    if (trie_text(t, node) >= 0) longest = trie_text(t, node), *length = end;
  }
  *steps = end + 1;
  return longest;
}

int64_t pg_longest_cut(const pg_trie *t, const uint8_t *bytes, int64_t n, int32_t unk, int32_t *ids, int watch) {
  text_watch w = watch_begin(watch);
  int64_t n_ids = 0, steps;
  for (int64_t at = 0, length; at < n; at += length) {
    length = 1;
    const int32_t id = longest_text(t, bytes + at, n - at, &length, &steps);
    ids[n_ids++] = id < 0 ? unk : id;
    if (watch_stops(&w, steps)) return watch_end(&w, PG_STOPPED);
  }
  return watch_end(&w, n_ids);
}

static int64_t put_utf8(uint8_t *out, uint32_t c) {
  if (c < 0x80) {
    out[0] = (uint8_t)c;
    return 1;
  }
  const int n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  for (int i = n - 1; i; i--, c >>= 6) out[i] = 0x80 | (c & 0x3F);
  out[0] = (uint8_t)(0xF00 >> n | c);
  return n;
}

// A word has parts. A part is either covered by texts or unknown, as a whole.
typedef struct {
  const pg_trie *t;
  int32_t unk;
  uint8_t *bytes; // the prefix, and the part that is being read
  int64_t n_prefix, n;
  int32_t *ids;
  int64_t n_ids;
  text_watch watch;
} reader;

// Returns whether SIGINT came.
static int longest_end_part(reader *r) {
  if (r->n == r->n_prefix) return 0;
  int64_t n_ids = r->n_ids, length, steps;
  for (int64_t at = 0; at < r->n; at += length) {
    const int32_t id = longest_text(r->t, r->bytes + at, r->n - at, &length, &steps);
    if (watch_stops(&r->watch, steps)) return 1;
    if (id < 0) { // the part is unknown
      n_ids = r->n_ids;
      if (r->unk >= 0) r->ids[n_ids++] = r->unk;
      break;
    }
    r->ids[n_ids++] = id;
  }
  r->n_ids = n_ids;
  r->n = r->n_prefix;
  return 0;
}

int64_t pg_longest_match(const pg_trie *t, const int32_t *codes, int64_t n_codes, const char *prefix, int32_t unk,
                         uint8_t *part, int32_t *ids, int64_t *ends, int watch) {
  const int64_t n_prefix = (int64_t)strlen(prefix);
  reader r = {.t = t, .unk = unk, .bytes = part, .n_prefix = n_prefix, .n = n_prefix, .ids = ids, .n_ids = 0};
  r.watch = watch_begin(watch);
  memcpy(part, prefix, n_prefix);
  for (int64_t i = 0; i < n_codes; i++) {
    const int32_t c = codes[i];
    const int ends_word = c == '\n';
    if ((c < 0 || ends_word) && longest_end_part(&r)) return watch_end(&r.watch, PG_STOPPED);
    if (c && !ends_word) r.n += put_utf8(part + r.n, (uint32_t)(c < 0 ? -c : c));
    if (c < 0 && longest_end_part(&r)) return watch_end(&r.watch, PG_STOPPED);
    if (ends_word) *ends++ = r.n_ids;
  }
  return watch_end(&r.watch, r.n_ids);
}
