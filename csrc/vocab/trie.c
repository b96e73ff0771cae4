// Build tries. Texts that begin alike share nodes; the further nodes of a text follow each other in memory.
#include "vocab/trie.h"

void pg_trie_index(pg_trie *t, const uint8_t *bytes, const int64_t *ends, int64_t n) {
  int32_t n_nodes = 1;
  for (int64_t i = 0, at = 0; i < n; at = ends[i++] + 1) {
    int32_t node = 0;
    for (int64_t j = at; j < ends[i]; j++) {
      int32_t next = trie_step(t, node, bytes[j]);
      if (!next) {
        next = n_nodes++;
        if (!node) {
          t->first[bytes[j]] = next;
        } else if (next == node + 1) {
          t->nodes[node].next = bytes[j] + 1;
        } else {
          *trie_slot(t, node, bytes[j]) = ((uint64_t)node << 8 | bytes[j]) << TRIE_NODE_BITS | (uint64_t)next;
        }
      }
      node = next;
    }
    if (node && !t->nodes[node].text) t->nodes[node].text = (int32_t)i + 1;
  }
}
