// Tries: every beginning of a text is a node, found in one table by the node before it and its last byte.
#include "vocab/trie.h"

int pg_trie_index(pg_trie *t, const uint8_t *bytes, const int64_t *ends, int64_t n) {
  int64_t n_nodes = 1;
  for (int64_t i = 0, at = 0; i < n; at = ends[i++] + 1) {
    if (at < ends[i]) t->begins[bytes[at]] = 1;
    int32_t node = 0;
    for (int64_t j = at; j < ends[i]; j++) {
      uint64_t *slot = trie_slot(t, node, bytes[j]);
      if (!*slot) {
        if (n_nodes == t->n_slots / 2 || n_nodes >> TRIE_NODE_BITS) return 0;
        *slot = ((uint64_t)node << 8 | bytes[j]) << TRIE_NODE_BITS | (uint64_t)n_nodes++;
      }
      node = trie_child(*slot);
    }
    if (node && t->texts[node] < 0) t->texts[node] = (int32_t)i;
  }
  return 1;
}
