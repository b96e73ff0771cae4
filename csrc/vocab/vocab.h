// What vocabularies need of C: lists of strings, texts found by their bytes, words into tokens. The functions with
// `watch` go over texts of any length. Where `watch` is not 0, SIGINT stops them: they return PG_STOPPED, and what they
// were to write is not to be read.
#pragma once
#include <stdint.h>

enum { PG_STOPPED = -1 };

// What the hashes of tables depend on. Nobody outside the process knows it, so that no vocabulary can be made to fill
// one chain of a table. 0 < base < 2^61 - 1; base * inverse = 1 and powers[i] = base^(i + 1) modulo 2^61 - 1;
// the factors are odd.
typedef struct {
  uint64_t base, inverse, powers[4], flip, factors[2];
} pg_seed;

// Strings as GGUF has them, a length of 8 bytes before each: walks up to n of them from data + *at on, and returns how
// many lie within `size` bytes; *at is then where the next would begin. `packed`, unless it is NULL, gets their bytes,
// a NUL behind each.
int64_t pg_gguf_strings(const uint8_t *data, int64_t size, int64_t *at, int64_t n, uint8_t *packed);

// Numbered texts, to be found by their bytes (vocab/texts.h): text i ends at bytes + ends[i], where a NUL stands, and
// the next begins behind that. n_slots is a power of two, more than there are texts; slots are 0 before pg_texts_index.
typedef struct {
  const uint8_t *bytes;
  const int64_t *ends;
  uint64_t *slots;
  int64_t n_slots;
  pg_seed seed;
} pg_texts;
void pg_texts_index(const pg_texts *t, int64_t n);

// Numbered texts, to be found from their beginnings (vocab/trie.h). Each beginning is a node, the empty one node 0. A
// node has the number of the text that ends there + 1, or 0, and the byte + 1 that leads to the node behind it in
// `nodes`, or 0. All other ways from a node to the next are in `slots`, at most one for each text: n_slots is a power
// of two, more than there are texts. `nodes` has one more than texts have bytes, below 2^28; both are 0 before
// pg_trie_index, which takes texts as they are packed in pg_texts, and of equal ones the first.
typedef struct {
  int32_t text, next;
} pg_node;
typedef struct {
  uint64_t *slots;
  pg_node *nodes;
  int64_t n_slots;
  pg_seed seed;
  int32_t first[256]; // the node behind node 0 and this byte, or 0
} pg_trie;
void pg_trie_index(pg_trie *t, const uint8_t *bytes, const int64_t *ends, int64_t n);

// Byte-pair merging (vocab/bpe.c). Pair i of symbols, left[i] and right[i], becomes merged[i]; its rank is ranks[i], or
// i where `ranks` is NULL. `slots` finds a pair: a power of two of them, more than there are pairs, -1 each before
// pg_bpe_index, which takes the first of equal pairs. pg_bpe_merge merges words of symbols, word i up to ends[i], less
// than 2^31 each; what comes out is put at the front of `symbols`, where each word ends now into `ends`, and its number
// returned. Scratch memory: links for the longest word, and three times as many heap entries.
typedef struct {
  const int32_t *left, *right, *merged, *ranks;
  int32_t *slots;
  int64_t n_slots;
  pg_seed seed;
} pg_bpe;
typedef struct {
  int32_t prev, next, pair, alive;
} pg_bpe_link;
void pg_bpe_index(const pg_bpe *b, int64_t n);
int64_t pg_bpe_merge(const pg_bpe *b, int32_t *symbols, int64_t *ends, int64_t n_words, pg_bpe_link *links,
                     uint64_t *heap, int watch);

// Pairs of symbols (vocab/pairs.c). Of n merges, "left right" each, packed as texts are: the texts of both sides and of
// their union, -1 where there is none. Of n texts: all pairs of texts or single characters that make one, which are
// returned by their number, at most one for each byte; a character that is no text is -1 - its code point.
void pg_pairs_of_merges(const pg_texts *t, const uint8_t *merges, const int64_t *ends, int64_t n, int32_t *left,
                        int32_t *right, int32_t *merged);
int64_t pg_pairs_of_texts(const pg_texts *t, int64_t n, int32_t *left, int32_t *right, int32_t *merged);

// Words into texts by the longest match from the left (vocab/longest.c); the number of ids is returned.
// pg_longest_match reads words of characters, and `ends` says where the ids of each end: of `codes`, 0 counts for
// nothing, a negative one is a part of its own, and 10 ends a word. Each part is read with `prefix` before it, and is
// `unk` (none: -1) where texts do not cover it. `part` has room for all bytes; there are never more ids than those, and
// a prefix for each code. pg_longest_cut reads bytes; one that no text begins with is `unk`.
int64_t pg_longest_match(const pg_trie *t, const int32_t *codes, int64_t n_codes, const char *prefix, int32_t unk,
                         uint8_t *part, int32_t *ids, int64_t *ends, int watch);
int64_t pg_longest_cut(const pg_trie *t, const uint8_t *bytes, int64_t n, int32_t unk, int32_t *ids, int watch);

// Words into the texts with the highest sum of scores (vocab/best_cut.c). Word i ends at ends[i], less than 2^31 bytes
// behind where it begins; the number of ids is returned, and `ends` says then where those of each word end. A character
// may be `unk`, which scores `unknown`: where no text is this character, or `always`. `best` and `step` have an entry
// more than the longest word has bytes; there are never more ids than bytes.
typedef struct {
  int32_t token, from;
} pg_step;
int64_t pg_best_cut(const pg_trie *t, const double *scores, const uint8_t *words, int64_t *ends, int64_t n_words,
                    double unknown, int32_t unk, int always, double *best, pg_step *step, int32_t *ids, int watch);

// Texts cut out of another (vocab/special.c), text 0 wherever it occurs, then text 1 in what is left, and so on: the
// texts of the trie are numbered from the longest to the shortest. how[i] has PG_CUT where text i counts, and
// PG_LSTRIP and PG_RSTRIP where it takes white space before and behind it along. pg_special_begin returns at how many
// places one that counts begins, and puts the longest of each place into `heap`, unless that is NULL. pg_special_cut
// takes this heap and as many `places`, lengths of texts, n zeroed marks, and returns the number of parts, at most one
// more than twice the places: where each begins and ends, and its text's number, -1 for what lies between. n < 2^32.
enum pg_special { PG_CUT = 1, PG_LSTRIP = 2, PG_RSTRIP = 4 };
typedef struct {
  int64_t begin, end, text;
} pg_part;
int64_t pg_special_begin(const pg_trie *t, const uint8_t *how, const uint8_t *bytes, int64_t n, uint64_t *heap,
                         int watch);
int64_t pg_special_cut(const pg_trie *t, const uint8_t *how, const int32_t *lengths, const uint8_t *bytes, int64_t n,
                       uint64_t *heap, int64_t n_heap, int64_t *places, int32_t *marks, pg_part *parts, int watch);
