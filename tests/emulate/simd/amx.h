// csrc/simd/amx.h, computed. A tile that is used before the registers are configured ends the process, as it would.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

struct pg_tile_config { // as in csrc/simd/amx.h
  uint8_t palette, start_row, reserved[14];
  uint16_t line_bytes[16];
  uint8_t lines[16];
};
static const struct pg_tile_config em_whole = {
    1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

struct em_tiles {
  int configured;
  struct pg_tile_config shape; // what lies beyond it is 0
  uint8_t line[8][16][64];
};
__attribute__((weak)) _Thread_local struct em_tiles em_tiles; // one for all files

static inline void em_check(void) {
  if (!em_tiles.configured) __builtin_trap();
}
static inline void em_begin(const struct pg_tile_config *shape) { // NULL: none
  memset(&em_tiles, 0, sizeof em_tiles);
  if (!shape) return;
  em_tiles.configured = 1;
  em_tiles.shape = *shape;
}
static inline void em_zero(int t) {
  em_check();
  memset(em_tiles.line[t], 0, sizeof em_tiles.line[t]);
}
static inline void em_load(int t, const void *p, int64_t step) {
  em_zero(t);
  for (int i = 0; i < em_tiles.shape.lines[t]; i++)
    memcpy(em_tiles.line[t][i], (const char *)p + i * step, em_tiles.shape.line_bytes[t]);
}
static inline void em_store(int t, void *p, int64_t step) {
  em_check();
  for (int i = 0; i < em_tiles.shape.lines[t]; i++)
    memcpy((char *)p + i * step, em_tiles.line[t][i], em_tiles.shape.line_bytes[t]);
}
static inline float em_number(int t, int line, int i) {
  uint16_t b;
  memcpy(&b, em_tiles.line[t][line] + 2 * i, sizeof b);
  const uint32_t bits = (b & 0x7f80) == 0 ? 0 : (uint32_t)b << 16; // denormals are 0
  float v;
  memcpy(&v, &bits, sizeof v);
  return v;
}
static inline void em_dot(int sum, int a, int b) {
  em_check();
  float x[16][32], y[16][32];
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 32; k++) x[i][k] = em_number(a, i, k), y[i][k] = em_number(b, i, k);
  for (int i = 0; i < 16; i++) {
    float even[16] = {0}, odd[16] = {0}, old[16];
    for (int p = 0; p < 16; p++)
      for (int j = 0; j < 16; j++) {
        even[j] = fmaf(x[i][2 * p], y[p][2 * j], even[j]);
        odd[j] = fmaf(x[i][2 * p + 1], y[p][2 * j + 1], odd[j]);
      }
    memcpy(old, em_tiles.line[sum][i], sizeof old);
    for (int j = 0; j < 16; j++) old[j] += even[j] + odd[j];
    memcpy(em_tiles.line[sum][i], old, sizeof old);
  }
}

static inline int32_t em_byte(int t, int line, int i, int is_signed) {
  const uint8_t b = em_tiles.line[t][line][i];
  return is_signed ? (int8_t)b : b;
}
static inline void em_dot_bytes(int sum, int a, int b, int a_signed, int b_signed) {
  em_check();
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) {
      uint32_t v;
      memcpy(&v, em_tiles.line[sum][i] + 4 * j, sizeof v);
      for (int k = 0; k < 64; k++)
        v += (uint32_t)(em_byte(a, i, k, a_signed) * em_byte(b, k / 4, 4 * j + k % 4, b_signed));
      memcpy(em_tiles.line[sum][i] + 4 * j, &v, sizeof v);
    }
}

#define TILES_BEGIN_AS(config) em_begin(&(config))
#define TILES_BEGIN() em_begin(&em_whole)
#define TILES_END() em_begin(NULL)
#define TILE_ZERO(t) em_zero(t)
#define TILE_LOAD(t, p, step) em_load(t, p, step)
#define TILE_STORE(t, p, step) em_store(t, p, step)
#define TILE_DOT(sum, a, b) em_dot(sum, a, b)
#define TILE_DOT_SS(sum, a, b) em_dot_bytes(sum, a, b, 1, 1)
#define TILE_DOT_SU(sum, a, b) em_dot_bytes(sum, a, b, 1, 0)
#define TILE_DOT_US(sum, a, b) em_dot_bytes(sum, a, b, 0, 1)
#define TILE_DOT_UU(sum, a, b) em_dot_bytes(sum, a, b, 0, 0)
