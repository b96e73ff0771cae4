// Hashes that depend on a seed.
#pragma once
#include "vocab/vocab.h"

static inline uint64_t seeded_hash(const pg_seed *seed, uint64_t key) {
  uint64_t hash = (key ^ seed->flip) * seed->factors[0];
  hash = (hash ^ hash >> 32) * seed->factors[1];
  return hash ^ hash >> 32;
}

// A text's hash is a polynomial of its bytes at `base`, modulo the prime 2^61 - 1. So two texts of n bytes have the
// same hash for at most n bases. The hashes of parts of a text can be computed from the hash of the whole.
static const uint64_t TEXT_PRIME = (1ull << 61) - 1;

static inline uint64_t text_modulo(unsigned __int128 a) { // a < 2^123
  uint64_t sum = (uint64_t)(a & TEXT_PRIME) + (uint64_t)(a >> 61);
  sum = (sum & TEXT_PRIME) + (sum >> 61);
  return sum >= TEXT_PRIME ? sum - TEXT_PRIME : sum;
}

static inline uint64_t text_times(uint64_t a, uint64_t b) { return text_modulo((unsigned __int128)a * b); }

// The hash of a text and a byte; that of no bytes is 0.
static inline uint64_t text_hash(const pg_seed *seed, uint64_t hash, uint8_t byte) {
  return text_times(hash + byte + 1, seed->base);
}

// The hash of n more bytes, up to four at once, so that their products do not wait for each other.
static inline uint64_t text_hash_of(const pg_seed *seed, uint64_t hash, const uint8_t *text, int64_t n) {
  for (int64_t i = 0; i < n; i += 4) {
    const uint64_t *power = seed->powers + (n - i < 4 ? n - i : 4);
    unsigned __int128 sum = (unsigned __int128)hash * power[-1];
    for (const uint8_t *end = text + (n - i < 4 ? n - i : 4); text < end; text++)
      sum += (unsigned __int128)(*text + 1u) * *--power;
    hash = text_modulo(sum);
  }
  return hash;
}

// The hash of n bytes without the first one, from the hash of all n; `power` is base^n.
static inline uint64_t text_hash_behind(uint64_t hash, uint8_t first, uint64_t power) {
  const uint64_t gone = text_times((uint64_t)first + 1, power);
  return hash >= gone ? hash - gone : hash + TEXT_PRIME - gone;
}
