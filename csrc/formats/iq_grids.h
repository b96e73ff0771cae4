// The lattice points of the IQ formats, element values as the formats use them (IQ1: -1, 0, 1). Filled at load.
#pragma once
#include <stdint.h>

// [point][element]
extern int8_t pg_grid_iq1[2048][8], pg_grid_iq2_xxs[256][8], pg_grid_iq2_xs[512][8], pg_grid_iq2_s[1024][8];
extern int8_t pg_grid_iq3_xxs[256][4], pg_grid_iq3_s[512][4];
