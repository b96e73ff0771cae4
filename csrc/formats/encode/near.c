#include "formats/encode/near.h"
#include "formats/iq_grids.h"
#include "os/thread.h"

enum { MAX_POINTS = 2048, LATTICE_3 = 6561, LATTICE_8 = 4096 };

// A grid's points, element by element.
typedef struct digits {
  int n;
  int16_t of[8][MAX_POINTS];
  uint16_t packed[MAX_POINTS];
} digits;

static void read_digits(const pg_near *t, const int8_t *points, int n, digits *d) {
  d->n = n;
  for (int j = 0; j < n; j++) {
    int number = 0, packed = 0;
    for (int i = t->dim - 1; i >= 0; i--) {
      int digit = 0;
      while ((float)points[j * t->dim + i] != t->level[digit]) digit++;
      d->of[i][j] = (int16_t)digit;
      number = number * t->base + digit;
      packed = packed << t->bits | digit;
    }
    d->packed[j] = (uint16_t)packed;
    t->point[number] = (uint16_t)j;
  }
}

// Find the points nearest to lattice point `number`, by the squared distance of their digits; among equal distances the
// first points.
static void find_near(const pg_near *t, const digits *d, int number) {
  int16_t distance[MAX_POINTS] = {0};
  for (int i = 0, rest = number; i < t->dim; i++, rest /= t->base) {
    const int16_t digit = (int16_t)(rest % t->base);
    for (int j = 0; j < d->n; j++) {
      const int16_t by = (int16_t)(d->of[i][j] - digit);
      distance[j] = (int16_t)(distance[j] + by * by);
    }
  }
  int key[PG_NEAR], n = 0; // rising
  for (int j = 0; j < d->n; j++) {
    const int k = distance[j] * MAX_POINTS + j;
    if (n == PG_NEAR && k > key[n - 1]) continue;
    int at = n < PG_NEAR ? n++ : n - 1;
    for (; at > 0 && key[at - 1] > k; at--) key[at] = key[at - 1];
    key[at] = k;
  }
  for (int i = 0; i < PG_NEAR; i++) t->packed[number][i] = d->packed[key[i] % MAX_POINTS];
}

static void make(pg_near *t, const int8_t *points, int n) {
  digits d;
  read_digits(t, points, n, &d);
  int lattice = 1;
  for (int i = 0; i < t->dim; i++) lattice *= t->base;
  for (int number = 0; number < lattice; number++) find_near(t, &d, number);
}

#define IQ1_LEVELS                                                                                                     \
  { -1, 0, 1, 0, -1, 0, 1, 0 }
#define IQ2_LEVELS                                                                                                     \
  { 8, 25, 43, 0, 8, 25, 43, 0 }
#define IQ3_XXS_LEVELS                                                                                                 \
  { 4, 12, 20, 28, 36, 44, 52, 62 }
#define IQ3_S_LEVELS                                                                                                   \
  { 1, 3, 5, 7, 9, 11, 13, 15 }

#define NEAR(name, n, elements, levels, lattice, values)                                                               \
  static uint16_t packed_##name[lattice][PG_NEAR], point_##name[lattice];                                              \
  static pg_near near_##name = {.dim = elements,                                                                       \
                                .base = levels,                                                                        \
                                .bits = (levels) == 3 ? 2 : 3,                                                         \
                                .level = values,                                                                       \
                                .packed = packed_##name,                                                               \
                                .point = point_##name};                                                                \
  static pg_once once_##name;                                                                                          \
  static void make_##name(void) { make(&near_##name, pg_grid_##name[0], n); }

NEAR(iq1, 2048, 8, 3, LATTICE_3, IQ1_LEVELS)
NEAR(iq2_xxs, 256, 8, 3, LATTICE_3, IQ2_LEVELS)
NEAR(iq2_xs, 512, 8, 3, LATTICE_3, IQ2_LEVELS)
NEAR(iq2_s, 1024, 8, 3, LATTICE_3, IQ2_LEVELS)
NEAR(iq3_xxs, 256, 4, 8, LATTICE_8, IQ3_XXS_LEVELS)
NEAR(iq3_s, 512, 4, 8, LATTICE_8, IQ3_S_LEVELS)

#define CASE(grid, name)                                                                                               \
  case grid:                                                                                                           \
    pg_do_once(&once_##name, make_##name);                                                                             \
    return &near_##name;

const pg_near *pg_near_of(pg_grid grid) {
  switch (grid) {
    CASE(PG_GRID_IQ1, iq1)
    CASE(PG_GRID_IQ2_XXS, iq2_xxs)
    CASE(PG_GRID_IQ2_XS, iq2_xs)
    CASE(PG_GRID_IQ2_S, iq2_s)
    CASE(PG_GRID_IQ3_XXS, iq3_xxs)
    CASE(PG_GRID_IQ3_S, iq3_s)
  }
  return 0;
}
