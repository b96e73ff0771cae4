// Where to look for the best point of a grid: for every point of the lattice that it is a part of (all digits 0, 1, ..
// for the elements, rounded from the values to match), the grid's points that are nearest.
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
  uint16_t (*packed)[PG_NEAR]; // of a lattice point, nearest first: points of the grid
  uint16_t *point;             // of a lattice point that is in the grid: which of the grid's
} pg_near;

// Made when first asked for. Any thread may ask.
const pg_near *pg_near_of(pg_grid grid);
