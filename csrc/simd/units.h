// Treat tensors as units of bytes (an element, or a block of a block type), for kernels that move data of any type.
#pragma once
#include "formats/formats.h"
#include "kernel.h"

// Elements per block.
static inline int64_t pg_block_size(int64_t type) {
  switch (type) {
#define X(name, symbol, elements, ...)                                                                                 \
  case PG_##name:                                                                                                      \
    return elements;
    BLOCK_FORMATS(X)
#undef X
  default:
    return 1;
  }
}

// Bytes of one unit of the tensor. The blocks of a block type always lie side by side.
static inline int64_t pg_unit_size(const pg_tensor *t) {
  switch (t->type) {
  case PG_I8:
    return 1;
  case PG_F16:
  case PG_BF16:
  case PG_I16:
    return 2;
  case PG_F32:
  case PG_I32:
    return 4;
  case PG_F64:
  case PG_I64:
    return 8;
  default:
    return t->nb[0];
  }
}

#define PG_MOVE(type)                                                                                                  \
  for (int64_t i = 0; i < n; i++) *(type *)(pd + i * sd) = *(const type *)(ps + i * ss)

// n units, `sd` and `ss` bytes apart; ss == 0 repeats one.
static inline void pg_move_units(char *pd, int64_t sd, const char *ps, int64_t ss, int64_t n, int64_t unit) {
  if (sd == unit && ss == unit) {
    memcpy(pd, ps, n * unit);
    return;
  }
  switch (unit) {
  case 1:
    PG_MOVE(int8_t);
    break;
  case 2:
    PG_MOVE(int16_t);
    break;
  case 4:
    PG_MOVE(int32_t);
    break;
  case 8:
    PG_MOVE(int64_t);
    break;
  default:
    for (int64_t i = 0; i < n; i++) memcpy(pd + i * sd, ps + i * ss, unit);
  }
}
#undef PG_MOVE
