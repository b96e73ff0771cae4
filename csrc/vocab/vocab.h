// The C part of vocabularies: lists of strings, finding texts by their bytes, cutting words into tokens. Functions with
// `watch` may read texts of any length. When `watch` is not 0, SIGINT stops them: they return PG_STOPPED, and their
// results must not be read.
#pragma once
#include <stdint.h>

enum { PG_STOPPED = -1 };

// The seed of the hashes of tables. It is not known outside the process, so that nobody can make a vocabulary whose
// texts all fall into one chain of a table. 0 < base < 2^61 - 1; base * inverse = 1 and powers[i] = base^(i + 1) modulo
// 2^61 - 1; the factors are odd.
typedef struct {
  uint64_t base, inverse, powers[4], flip, factors[2];
} pg_seed;

// Read strings of a GGUF file, which stand after their lengths of 8 bytes each: up to n of them, from data + *at on.
// Returns how many lie within `size` bytes; *at becomes the place of the next one. `packed`, unless it is NULL, gets
// their bytes, with a NUL after each.
int64_t pg_gguf_strings(const uint8_t *data, int64_t size, int64_t *at, int64_t n, uint8_t *packed);

// Numbered texts, to be found by their bytes (vocab/texts.h): text i ends at bytes + ends[i], where a NUL stands, and
// the next text begins after that. n_slots is a power of two, more than there are texts; slots are 0 before
// pg_texts_index.
typedef struct {
  const uint8_t *bytes;
  const int64_t *ends;
  uint64_t *slots;
  int64_t n_slots;
  pg_seed seed;
} pg_texts;
void pg_texts_index(const pg_texts *t, int64_t n);

// Numbered texts, to be found from their beginnings (vocab/trie.h). Each beginning is a node, the empty one node 0. A
// node has the number of the text that ends there + 1, or 0, and the byte + 1 that leads to the node after it in
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
  int32_t first[256]; // the node to which this byte leads from node 0, or 0
} pg_trie;
void pg_trie_index(pg_trie *t, const uint8_t *bytes, const int64_t *ends, int64_t n);

// Byte-pair merging (vocab/bpe.c). Pair i of symbols, left[i] and right[i], becomes merged[i]. Its rank is ranks[i], or
// i when `ranks` is NULL. `slots` is a table that finds a pair: a power of two of slots, more than there are pairs, all
// -1 before pg_bpe_index fills it; the first of equal pairs counts. pg_bpe_merge merges words of symbols; word i ends
// at ends[i], and has less than 2^31 symbols. The merged symbols replace the front of `symbols`, the new ends of words
// replace `ends`, and the number of symbols is returned. Scratch memory: links for the longest word, and three times as
// many heap entries.
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

// Pairs of symbols (vocab/pairs.c). pg_pairs_of_merges takes n merges, each "left right", packed as texts are. It gives
// the texts of both sides and of their union; -1 when there is none. The other function takes n texts, and finds all
// pairs of texts or single characters that make one of them. It returns the number of pairs, at most one for each byte.
// A character that is not a text is given as -1 - its code point.
void pg_pairs_of_merges(const pg_texts *t, const uint8_t *merges, const int64_t *ends, int64_t n, int32_t *left,
                        int32_t *right, int32_t *merged);
int64_t pg_pairs_of_texts(const pg_texts *t, int64_t n, int32_t *left, int32_t *right, int32_t *merged);

// Cut words into texts by the longest match from the left (vocab/longest.c). Both functions return the number of ids.
// pg_longest_match reads words of characters; `ends` gets the place where the ids of each word end. In `codes`, 0 is
// skipped, a negative code is a part of its own, and 10 ends a word. Each part is read with `prefix` before it; a part
// that texts do not cover is `unk` (-1: nothing). `part` needs room for all bytes and a prefix for each code; there are
// never more ids than that. pg_longest_cut reads bytes; a byte with which no text begins is `unk`.
int64_t pg_longest_match(const pg_trie *t, const int32_t *codes, int64_t n_codes, const char *prefix, int32_t unk,
                         uint8_t *part, int32_t *ids, int64_t *ends, int watch);
int64_t pg_longest_cut(const pg_trie *t, const uint8_t *bytes, int64_t n, int32_t unk, int32_t *ids, int watch);

// Cut words into the texts with the highest sum of scores (vocab/best_cut.c). Word i ends at ends[i], and has less than
// 2^31 bytes. Returns the number of ids; `ends` then says where the ids of each word end. A character may become `unk`,
// with the score `unknown`, when no text is this character, or `always`. `best` and `step` have one entry more than the
// longest word has bytes; there are never more ids than bytes.
typedef struct {
  int32_t token, from;
} pg_step;
int64_t pg_best_cut(const pg_trie *t, const double *scores, const uint8_t *words, int64_t *ends, int64_t n_words,
                    double unknown, int32_t unk, int always, double *best, pg_step *step, int32_t *ids, int watch);

// Cut texts out of another text (vocab/special.c): text 0 wherever it occurs, then text 1 in what is left, and so on.
// The texts of the trie are numbered from the longest to the shortest. how[i] has PG_CUT when text i counts, and
// PG_LSTRIP or PG_RSTRIP when it swallows white space before or after it. pg_special_begin returns the number of
// places where a text that counts begins, and puts the longest text of each place into `heap`, unless that is NULL.
// pg_special_cut takes this heap, as many `places`, the lengths of texts, and n zeroed marks. It returns the number of
// parts, at most one more than twice the places, with the beginning and end of each part, and its text's number (-1:
// text between). n < 2^32.
enum pg_special { PG_CUT = 1, PG_LSTRIP = 2, PG_RSTRIP = 4 };
typedef struct {
  int64_t begin, end, text;
} pg_part;
int64_t pg_special_begin(const pg_trie *t, const uint8_t *how, const uint8_t *bytes, int64_t n, uint64_t *heap,
                         int watch);
int64_t pg_special_cut(const pg_trie *t, const uint8_t *how, const int32_t *lengths, const uint8_t *bytes, int64_t n,
                       uint64_t *heap, int64_t n_heap, int64_t *places, int32_t *marks, pg_part *parts, int watch);
