#include "products/panel.h"

#define UNROLL _Pragma("GCC unroll 16")

enum { LEVELS = VF_N == 16 ? 4 : VF_N == 8 ? 3 : 2 }; // of the tree in which chains are added

// One panel.
PG_INLINE void tile(int n, int lies, const float *a, const float *b, int64_t k, int chains, float *const *y, int add,
                    pg_fetch *fetch) {
  const int column = lies == PG_BY_COLUMN ? PG_COLUMN : 1, element = lies == PG_BY_COLUMN ? 1 : PG_GROUP;
  const int64_t length = k / chains, step = chains * element;
  const pg_fetch f = *fetch;
  const char *next = f.at;
  int64_t left = f.left;
  vf sums[LEVELS][PG_GROUP][2], acc[PG_GROUP][2]; // sums[l]: of 2^l chains
#define STEP()                                                                                                         \
  do {                                                                                                                 \
    const vf a0 = vf_load(w), a1 = vf_load(w + VF_N);                                                                  \
    UNROLL for (int j = 0; j < n; j++) {                                                                               \
      const vf v = vf_set1(x[j * column]);                                                                             \
      acc[j][0] = vf_fma(a0, v, acc[j][0]);                                                                            \
      acc[j][1] = vf_fma(a1, v, acc[j][1]);                                                                            \
    }                                                                                                                  \
    w += PG_PANEL, x += step;                                                                                          \
  } while (0)
  for (int c = 0;;) {
    const int64_t chain = chains == 1 ? 0 : vf_lane(c);
    const float *w = a + chain * length * PG_PANEL, *x = b + chain * element;
    UNROLL for (int j = 0; j < n; j++) acc[j][0] = acc[j][1] = vf_zero();
    int64_t i = 0;
    for (; i + 4 <= length; i += 4) { // few branches, without surprises: a chain is short
      __builtin_prefetch(next, 0, 2);
      __builtin_prefetch(next + f.step, 0, 2);
      left -= 2;
      next += 2 * f.step + (left > 0 ? 0 : f.jump);
      left += left > 0 ? 0 : f.run;
      STEP();
      STEP();
      STEP();
      STEP();
    }
    for (; i < length; i++) STEP();
    int l = 0;
    for (; c >> l & 1; l++) UNROLL for (int j = 0; j < n; j++) UNROLL for (int i = 0; i < 2; i++) {
        acc[j][i] = vf_add(sums[l][j][i], acc[j][i]);
      }
    if (++c == chains) break;
    UNROLL for (int j = 0; j < n; j++) UNROLL for (int i = 0; i < 2; i++) sums[l][j][i] = acc[j][i];
  }
#undef STEP
  fetch->at = next;
  fetch->left = left;
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
typedef void (*tile_fn)(const float *a, const float *b, int64_t k, int chains, float *const *y, int add,
                        pg_fetch *fetch);
#define TILE(lies, n)                                                                                                  \
  static __attribute__((noinline)) void tile_##lies##_##n(const float *a, const float *b, int64_t k, int chains,       \
                                                          float *const *y, int add, pg_fetch *fetch) {                 \
    tile((n)*PG_GROUP_STEP, lies, a, b, k, chains, y, add, fetch);                                                     \
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

void PG_FN(panels)(const float *a, int64_t rows, const float *b, enum pg_group lies, int64_t n, int64_t k, int chains,
                   float *const *y, int add, pg_fetch fetch[PG_FETCHES]) {
  const tile_fn run = tiles[lies][(n - 1) / PG_GROUP_STEP];
  float spare[PG_GROUP][PG_PANEL], *to[PG_GROUP];
  for (int64_t j = 0; j < PG_GROUP; j++) to[j] = j < n ? y[j] : memset(spare[j], 0, sizeof spare[j]);
  for (; rows >= PG_PANEL; rows -= PG_PANEL, a += pg_panel_size(k)) {
    pg_fetch none = {.at = (const char *)a, .left = k}, *f = &none;
    for (int i = PG_FETCHES - 1; i >= 0; i--)
      if (fetch[i].n > 0) f = &fetch[i];
    run(a, b, k, chains, to, add, f);
    f->n -= k / chains / 4 * 2 * chains;
    for (int64_t j = 0; j < n; j++) to[j] += PG_PANEL;
  }
  if (!rows) return;
  float *rest[PG_GROUP];
  for (int64_t j = 0; j < PG_GROUP; j++) rest[j] = spare[j];
  pg_fetch none = {.at = (const char *)a, .left = k};
  run(a, b, k, chains, rest, 0, &none);
  for (int64_t j = 0; j < n; j++)
    for (int64_t i = 0; i < rows; i++) to[j][i] = add ? to[j][i] + spare[j][i] : spare[j][i];
}
