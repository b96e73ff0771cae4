// Tile registers (AMX): 8 registers of 16 lines of 64 bytes. The compiler does not know them, so all instructions on
// them are volatile, and stay in order.
#pragma once
#include <stdint.h>

// The configuration: all registers are whole. gcc 12's own function for it may drop fields that it believes are unused.
static const struct pg_tile_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t line_bytes[16];
  uint8_t lines[16];
} pg_tile_config __attribute__((aligned(64))) = {
    .palette = 1, .line_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .lines = {16, 16, 16, 16, 16, 16, 16, 16}};

// A thread begins and ends its use of tiles, because the system saves those in use whenever it switches threads.
#define TILES_BEGIN_AS(config) __asm__ volatile("ldtilecfg %0" ::"m"(config))
#define TILES_BEGIN() TILES_BEGIN_AS(pg_tile_config)
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
// i32 sum[i][j] += a[i][4p + q] * b[p][4j + q] for all p and q: a is 16 x 64 bytes, b 64 x 16, four of its rows to a
// line. The bytes of a, then those of b, are signed (S) or unsigned (U).
#define TILE_DOT_SS(sum, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#define TILE_DOT_SU(sum, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#define TILE_DOT_US(sum, a, b) __asm__ volatile("tdpbusd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#define TILE_DOT_UU(sum, a, b) __asm__ volatile("tdpbuud %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
