// Tile registers (AMX): 8 of 16 lines of 64 bytes. The compiler knows nothing of them, so all that touches them is
// volatile, and stays in order.
#pragma once
#include <stdint.h>

// What the registers are: all whole. A compiler's own function for this (gcc 12) may drop what it does not see used.
static const struct pg_tile_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t line_bytes[16];
  uint8_t lines[16];
} pg_tile_config __attribute__((aligned(64))) = {
    .palette = 1, .line_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .lines = {16, 16, 16, 16, 16, 16, 16, 16}};

// What a thread does before it uses tiles, and after: they are part of what the system saves of a thread.
#define TILES_BEGIN() __asm__ volatile("ldtilecfg %0" ::"m"(pg_tile_config))
#define TILES_END() __asm__ volatile("tilerelease" ::)

#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
// `step`: bytes from one line to the next.
#define TILE_LOAD(t, p, step)                                                                                          \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((int64_t)(step)) : "memory")
#define TILE_STORE(t, p, step)                                                                                         \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((int64_t)(step)) : "memory")
// f32 sum[i][j] += a[i][2p] * b[p][2j] + a[i][2p + 1] * b[p][2j + 1] for all p: a is 16 x 32 numbers of bf16, b 32 x
// 16, two of its rows to a line.
#define TILE_DOT(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
