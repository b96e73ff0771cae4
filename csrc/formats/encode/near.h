// Tables that narrow the search for the best point of a grid. A grid is part of a lattice: all points with digits 0, 1,
// .. as elements. The values to match are rounded to a lattice point, and for each of these a table has the nearest
// points of the grid.
#pragma once
#include <stdint.h>

enum { PG_NEAR = 16 };

typedef enum pg_grid {
  PG_GRID_IQ1,
  PG_GRID_IQ2_XXS,
  PG_GRID_IQ2_XS,
  PG_GRID_IQ2_S,
  PG_GRID_IQ3_XXS,
  PG_GRID_IQ3_S
} pg_grid;

// A lattice point is known by its number (digits in base `base`, element 0 the lowest) or packed (`bits` a digit).
typedef struct pg_near {
  int dim, base, bits;         // elements of a point, levels of an element
  float level[8];              // values of the digits, repeated to the end
  uint16_t (*packed)[PG_NEAR]; // for a lattice point the grid's points, nearest first
  uint16_t *point;             // for a lattice point in the grid, its number there
} pg_near;

// The tables are made on first use. Any thread may call it.
const pg_near *pg_near_of(pg_grid grid);
