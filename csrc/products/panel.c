#include "products/panel.h"

#define UNROLL _Pragma("GCC unroll 16")

// One panel.
PG_INLINE void tile(int n, int lies, const float *a, const float *b, int64_t k, float *const *y, int add) {
  const int column = lies == PG_BY_COLUMN ? PG_COLUMN : 1, element = lies == PG_BY_COLUMN ? 1 : PG_GROUP;
  vf acc[PG_GROUP][2];
  UNROLL for (int j = 0; j < n; j++) acc[j][0] = acc[j][1] = vf_zero();
  for (int64_t i = 0; i < k; i++, a += PG_PANEL, b += element) {
    const vf a0 = vf_load(a), a1 = vf_load(a + VF_N);
    UNROLL for (int j = 0; j < n; j++) {
      const vf x = vf_set1(b[j * column]);
      acc[j][0] = vf_fma(a0, x, acc[j][0]);
      acc[j][1] = vf_fma(a1, x, acc[j][1]);
    }
  }
  if (add) {
    UNROLL for (int j = 0; j < n; j++) {
      acc[j][0] = vf_add(vf_load(y[j]), acc[j][0]);
      acc[j][1] = vf_add(vf_load(y[j] + VF_N), acc[j][1]);
    }
  }
  UNROLL for (int j = 0; j < n; j++) {
    vf_store(y[j], acc[j][0]);
    vf_store(y[j] + VF_N, acc[j][1]);
  }
}

// Not inlined: in a larger function the sums would not stay in registers.
typedef void (*tile_fn)(const float *a, const float *b, int64_t k, float *const *y, int add);
#define TILE(lies, n)                                                                                                  \
  static __attribute__((noinline)) void tile_##lies##_##n(const float *a, const float *b, int64_t k, float *const *y,  \
                                                          int add) {                                                   \
    tile(n * PG_GROUP_STEP, lies, a, b, k, y, add);                                                                    \
  }
#define NAME(lies, n) tile_##lies##_##n,
#if VF_N >= 8
#define SIZES(X, lies) X(lies, 1) X(lies, 2) X(lies, 3) X(lies, 4) X(lies, 5) X(lies, 6)
#else
#define SIZES(X, lies) X(lies, 1) X(lies, 2) X(lies, 3) X(lies, 4)
#endif
SIZES(TILE, PG_BY_COLUMN)
SIZES(TILE, PG_BY_ELEMENT)
static const tile_fn tiles[2][PG_GROUP / PG_GROUP_STEP] = {{SIZES(NAME, PG_BY_COLUMN)}, {SIZES(NAME, PG_BY_ELEMENT)}};

void PG_FN(panels)(const float *a, int64_t rows, const float *b, enum pg_group lies, int64_t n, int64_t k,
                   float *const *y, int add) {
  const tile_fn run = tiles[lies][(n - 1) / PG_GROUP_STEP];
  float spare[PG_GROUP][PG_PANEL], *to[PG_GROUP];
  for (int64_t j = 0; j < PG_GROUP; j++) to[j] = j < n ? y[j] : memset(spare[j], 0, sizeof spare[j]);
  for (; rows >= PG_PANEL; rows -= PG_PANEL, a += PG_PANEL * k) {
    for (int64_t j = 0; j < n; j++)
      for (int64_t i = 0; i < PG_PANEL; i += 16) __builtin_prefetch(to[j] + i, 1);
    run(a, b, k, to, add);
    for (int64_t j = 0; j < n; j++) to[j] += PG_PANEL;
  }
  if (!rows) return;
  float *rest[PG_GROUP];
  for (int64_t j = 0; j < PG_GROUP; j++) rest[j] = spare[j];
  run(a, b, k, rest, 0);
  for (int64_t j = 0; j < n; j++)
    for (int64_t i = 0; i < rows; i++) to[j][i] = add ? to[j][i] + spare[j][i] : spare[j][i];
}
