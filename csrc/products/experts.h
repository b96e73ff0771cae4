// Sort mul_mat_id's columns by expert, so that each expert's matrix is read once.
#pragma once
#include "kernel.h"

// Scratch memory in whole cache lines: the columns by expert [n_used * n_tokens], then where each expert's columns end
// [n_expert]. Every thread sorts for itself, because that takes less time than waiting for one that does.
static inline int64_t pg_sorted_bytes_of(const pg_tensor *ids, int64_t n_expert) {
  const int64_t columns = pg_times(ids->ne[0], ids->ne[1]);
  return pg_in_32_bits(columns, pg_plus(pg_times(pg_plus(columns, n_expert), 4), 63) / 64 * 64);
}

static inline int32_t pg_expert_of(const pg_tensor *ids, int64_t c) {
  return *(const int32_t *)(ids->data + c % ids->ne[0] * ids->nb[0] + c / ids->ne[0] * ids->nb[1]);
}

// A counting sort. end[e]: one past the last column of expert e. PG_E_INDEX: an id that is no expert's.
static inline int pg_sort_columns_of(const pg_task *t, int64_t n_expert, int32_t *list, int32_t *end) {
  const pg_tensor *ids = &t->src[2];
  const int64_t n = ids->ne[0] * ids->ne[1];
  memset(end, 0, n_expert * sizeof *end);
  for (int64_t c = 0; c < n; c++) {
    const int32_t e = pg_expert_of(ids, c);
    if (e < 0 || e >= n_expert) return pg_fail(t, PG_E_INDEX, e);
    end[e]++;
  }
  int32_t start = 0;
  for (int64_t e = 0; e < n_expert; e++) {
    const int32_t count = end[e];
    end[e] = start;
    start += count;
  }
  for (int64_t c = 0; c < n; c++) list[end[pg_expert_of(ids, c)]++] = (int32_t)c;
  return PG_OK;
}

static inline int pg_sort_columns(const pg_task *t, int32_t *list, int32_t *end) {
  return pg_sort_columns_of(t, t->src[0].ne[2], list, end);
}
