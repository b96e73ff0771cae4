// Words into the longest texts from the left. A word is parts, each of which is covered or unknown as a whole.
#include "vocab/texts.h"

// Texts that cover part[0 .. n]: their number, -1 where none do.
static int64_t cover(const pg_texts *t, const uint8_t *part, int64_t n, int32_t *ids) {
  int64_t n_ids = 0;
  for (int64_t at = 0; at < n;) {
    int64_t longest = 0;
    uint64_t hash = TEXT_HASH;
    for (int64_t end = at; end < n;) {
      hash = text_hash(hash, part[end++]);
      if (!text_goes_on(t, hash)) break;
      const int32_t id = text_at(t, hash, part + at, end - at);
      if (id >= 0) ids[n_ids] = id, longest = end - at;
    }
    if (!longest) return -1;
    n_ids++;
    at += longest;
  }
  return n_ids;
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

typedef struct {
  const pg_texts *t;
  int32_t unk;
  uint8_t *bytes; // of the part that is being read, behind the prefix
  int64_t n_prefix, n;
  int32_t *ids;
  int64_t n_ids;
} reader;

static void end_part(reader *r) {
  if (r->n == r->n_prefix) return;
  const int64_t n = cover(r->t, r->bytes, r->n, r->ids + r->n_ids);
  if (n < 0 && r->unk >= 0) r->ids[r->n_ids++] = r->unk;
  if (n > 0) r->n_ids += n;
  r->n = r->n_prefix;
}

int64_t pg_longest_match(const pg_texts *t, const int32_t *codes, int64_t n_codes, const char *prefix, int32_t unk,
                         uint8_t *part, int32_t *ids, int64_t *ends) {
  const int64_t n_prefix = (int64_t)strlen(prefix);
  reader r = {.t = t, .unk = unk, .bytes = part, .n_prefix = n_prefix, .n = n_prefix, .ids = ids, .n_ids = 0};
  memcpy(part, prefix, n_prefix);
  for (int64_t i = 0; i < n_codes; i++) {
    const int32_t c = codes[i];
    const int ends_word = c == '\n';
    if (c < 0 || ends_word) end_part(&r);
    if (c && !ends_word) r.n += put_utf8(part + r.n, c < 0 ? -c : c);
    if (c < 0) end_part(&r);
    if (ends_word) *ends++ = r.n_ids;
  }
  return r.n_ids;
}
