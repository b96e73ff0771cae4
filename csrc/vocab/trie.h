// Walk a trie: find texts from their beginnings, byte by byte.
#pragma once
#include "vocab/hash.h"

enum { TRIE_NODE_BITS = 28 };

// The slot of the step from `node` with this byte, or the free slot where it belongs. An entry is node, byte, next
// node.
static inline uint64_t *trie_slot(const pg_trie *t, int32_t node, uint8_t byte) {
  const uint64_t key = (uint64_t)node << 8 | byte, last = (uint64_t)t->n_slots - 1;
  uint64_t s = seeded_hash(&t->seed, key) & last;
  while (t->slots[s] && t->slots[s] >> TRIE_NODE_BITS != key) s = (s + 1) & last;
  return &t->slots[s];
}

// The node to which this byte leads from `node`; 0 when no text goes on with the byte.
static inline int32_t trie_step(const pg_trie *t, int32_t node, uint8_t byte) {
  if (!node) return t->first[byte];
  if (t->nodes[node].next == byte + 1) return node + 1;
  return (int32_t)(*trie_slot(t, node, byte) & ((1 << TRIE_NODE_BITS) - 1));
}

// The text that ends at `node`; -1 when there is none.
static inline int32_t trie_text(const pg_trie *t, int32_t node) { return t->nodes[node].text - 1; }
