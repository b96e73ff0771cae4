// A heap of keys, the least on top.
#pragma once
#include <stdint.h>

static inline void heap_push(uint64_t *heap, int64_t *n, uint64_t key) {
  int64_t i = (*n)++;
  for (; i > 0 && heap[(i - 1) / 2] > key; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
  heap[i] = key;
}

static inline uint64_t heap_pop(uint64_t *heap, int64_t *n) {
  const uint64_t least = heap[0], key = heap[--*n];
  int64_t i = 0;
  for (int64_t child = 1; child < *n; child = 2 * i + 1) {
    child += child + 1 < *n && heap[child + 1] < heap[child];
    if (heap[child] >= key) break;
    heap[i] = heap[child];
    i = child;
  }
  heap[i] = key;
  return least;
}
