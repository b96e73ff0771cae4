// Reading texts from their beginnings, byte by byte.
#pragma once
#include "vocab/hash.h"

enum { TRIE_NODE_BITS = 28 };

static inline int32_t trie_child(uint64_t entry) { return (int32_t)(entry & ((1 << TRIE_NODE_BITS) - 1)); }

// The slot of the node behind `node` and this byte, or the free one that is its place. An entry is parent, byte, node.
static inline uint64_t *trie_slot(const pg_trie *t, int32_t node, uint8_t byte) {
  const uint64_t key = (uint64_t)node << 8 | byte, last = (uint64_t)t->n_slots - 1;
  uint64_t s = seeded_hash(&t->seed, key) & last;
  while (t->slots[s] && t->slots[s] >> TRIE_NODE_BITS != key) s = (s + 1) & last;
  return &t->slots[s];
}

// The node behind `node` and this byte, 0 where no text goes on so.
static inline int32_t trie_step(const pg_trie *t, int32_t node, uint8_t byte) {
  return trie_child(*trie_slot(t, node, byte));
}
