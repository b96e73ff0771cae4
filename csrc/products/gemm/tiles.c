// The product of a panel of weights in blocks with a group of columns in tile registers, in the order of sums.h: the
// bits of gemv.c and of fixed_blocks.c.
#include "products/gemm/tiles_columns.h"
#include "products/r16/sums.h"

#define UNROLL _Pragma("GCC unroll 16")
// Tile instructions are slow to decode, and of large loops the CPU keeps nothing decoded.
#define ROLLED _Pragma("GCC unroll 1")

enum {
  LINE = 64, // bytes from one line to the next
  PARTS = 4, // sums of products of bytes, in tile registers 4 to 7
  QUADS = R16_SIDE / R16_QUAD
};

// Of a step: [column][row].
typedef int32_t part_sums[PARTS][R16_SIDE][R16_SIDE];

// The sums of column j; of two units that are summed apart, those of unit u.
PG_INLINE vi whole_sum(r16_kind k, const part_sums s, int j, int u) {
  const vi a = vi_load(s[2 * u][j]), b = vi_load(s[2 * u + 1][j]);
  if (k.planes == 1) return vi_add(_mm512_slli_epi32(a, 8), b);
  const vi c = vi_load(s[2][j]), d = vi_load(s[3][j]);
  return vi_add(vi_add(_mm512_slli_epi32(a, 16), _mm512_slli_epi32(vi_add(b, c), 8)), d);
}

static const r16_totals nothing;

// A product: a panel times a group of n columns, and where results go. The whole column j goes to to[j * ld ..], with
// `before` added.
typedef struct group {
  const r16_panel *w;
  const r16_tile_columns *x;
  int64_t n, n_steps; // steps of a side of the group and rows of a tile register
  float *to;
  int64_t ld;
  const float (*before)[TILE_ROWS];
  float (*acc)[R16_SIDE]; // sums.h, between steps: [column][row]
} group;

// A step: a sum of R16_SIDE rows and columns, or two when sums are those of a unit.
typedef struct place {
  const r16_tile_columns *x; // side of the group
  int side, h;               // its number; and that of the rows
  int64_t step;
} place;

// The place after another; the last one has none, and stays.
PG_INLINE place place_after(const group *g, place p) {
  if (p.step + 1 < g->n_steps) {
    p.step++;
  } else if (p.h + 1 < TILE_GROUPS) {
    p.h++, p.step = 0;
  } else if ((p.side + 1) * R16_SIDE < g->n) {
    p = (place){p.x + 1, p.side + 1, 0, 0};
  }
  return p;
}

// Add a step's sums to those of R16_QUAD columns, `from` and on, and after the last step store their results.
PG_INLINE void add(r16_kind k, const group *g, place at, const part_sums sums, int from) {
  const int row = at.h * R16_ROWS, n = k.units == 1 ? 2 : 1; // sums
  vf acc[R16_QUAD];
  UNROLL for (int j = 0; j < R16_QUAD; j++) acc[j] = k.units < 8 && at.step ? vf_load(g->acc[from + j]) : vf_zero();
  const float *x_sums =
      (k.shifts > k.units ? at.x->halves[0] : at.x->units[0]) + at.step * n * k.shifts * R16_SIDE + from;
  const float *shifts = g->w->shifts[at.step * n * k.shifts] + row, *scales = g->w->scales[at.step * n] + row;
  UNROLL for (int u = 0; u < n; u++) {
    ROLLED for (int s = 0; s < k.shifts; s++, shifts += TILE_ROWS, x_sums += R16_SIDE) {
      const vf shift = vf_load(shifts);
      UNROLL for (int j = 0; j < R16_QUAD; j++) acc[j] = vf_fma(shift, vf_set1(x_sums[j]), acc[j]);
    }
    const vf scale = vf_load(scales + u * TILE_ROWS);
    UNROLL for (int j = 0; j < R16_QUAD; j++) acc[j] = vf_fma(vf_of_vi(whole_sum(k, sums, from + j, u)), scale, acc[j]);
  }
  if (k.units < 8 && at.step + 1 < g->n_steps) {
    UNROLL for (int j = 0; j < R16_QUAD; j++) vf_store(g->acc[from + j], acc[j]);
    return;
  }
  const int64_t first = at.side * R16_SIDE + from;
  float *to = g->to + first * g->ld + row;
  const float *before = g->before[first] + row;
  UNROLL for (int j = 0; j < R16_QUAD; j++, to += g->ld, before += TILE_ROWS) if (first + j < g->n)
      vf_store(to, vf_fma(acc[j], vf_set1(at.x->steps[from + j]), vf_load(before)));
}

// The same for n quads of columns.
PG_INLINE void add_quads(r16_kind k, const group *g, place at, const part_sums sums, int quad, int n) {
  ROLLED for (int i = 0; i < n; i++) add(k, g, at, sums, (quad + i) * R16_QUAD);
}

// Compute the sums of the step `next` in tile registers, and put their parts to `to`. Meanwhile add those of the step
// `last`, whose parts are `from`: a few columns at a time, because the CPU does not look far ahead. `first`: there is
// no last one.
PG_INLINE void step(r16_kind k, int first, const group *g, place next, place last, part_sums to, const part_sums from) {
  TILE_ZERO(4);
  TILE_ZERO(5);
  TILE_ZERO(6);
  TILE_ZERO(7);
  const int n = PG_MAX(1, k.units * R16_UNIT / R16_LONG); // lines of columns
  const uint8_t *x = next.x->bytes[next.step * n][0][0], *w = g->w->bytes[next.h][next.step * n][0];
  if (k.units == 1) { // the shape of registers 0 to 2 is that of r16_begin
    TILE_LOAD(2, w, LINE);
    TILE_LOAD(0, x, LINE);
    TILE_DOT_SS(4, 0, 2);
    TILE_LOAD(1, x + R16_BYTES_TILE, LINE);
    TILE_DOT_US(5, 1, 2);
    if (!first) add_quads(k, g, last, from, 0, 2);
    TILE_LOAD(2, w + R16_BYTES_TILE / 2, LINE);
    TILE_LOAD(0, x + R16_UNIT, LINE);
    TILE_DOT_SS(6, 0, 2);
    TILE_LOAD(1, x + R16_UNIT + R16_BYTES_TILE, LINE);
    TILE_DOT_US(7, 1, 2);
    if (!first) add_quads(k, g, last, from, 2, 2);
  } else {
    ROLLED for (int i = 0; i < n; i++, x += R16_PLANES * R16_BYTES_TILE, w += R16_PLANES * R16_BYTES_TILE) {
      TILE_LOAD(0, x, LINE);
      TILE_LOAD(2, w, LINE);
      TILE_DOT_SS(4, 0, 2);
      TILE_LOAD(1, x + R16_BYTES_TILE, LINE);
      TILE_DOT_US(5, 1, 2);
      if (k.planes == 2) { // 4 of the high bytes, 5 and 6 of a high and a low one, 7 of the low ones
        TILE_LOAD(3, w + R16_BYTES_TILE, LINE);
        TILE_DOT_SU(6, 0, 3);
        TILE_DOT_UU(7, 1, 3);
      }
      if (!first) add_quads(k, g, last, from, i * (QUADS / n), QUADS / n);
    }
  }
  TILE_STORE(4, to[0], LINE);
  TILE_STORE(5, to[1], LINE);
  if (k.units > 1 && k.planes == 1) return;
  TILE_STORE(6, to[2], LINE);
  TILE_STORE(7, to[3], LINE);
}

PG_INLINE void multiply(r16_kind k, const group *of) {
  group own = *of, *g = &own; // nobody else knows it, so it stays in registers
  const r16_fetch fetch = g->w->next;
  fetching ahead = fetching_of(&fetch);
  _Alignas(64) part_sums sums[2];
  _Alignas(64) float acc[R16_SIDE][R16_SIDE];
  g->acc = acc;
  g->n_steps = k.units == 1 ? (g->w->n_sums + 1) / 2 : R16_RUN / R16_UNIT / k.units;
  const int64_t n = (g->n + R16_SIDE - 1) / R16_SIDE * TILE_GROUPS * g->n_steps;
  place last = {g->x, 0, 0, 0};
  step(k, 1, g, last, last, sums[0], NULL);
  for (int64_t i = 1; i < n; i++) {
    const place next = place_after(g, last);
    ROLLED for (int u = 0; u < PG_MAX(2, k.units); u++) fetch_two(&fetch, &ahead);
    step(k, 0, g, next, last, sums[i % 2], sums[1 - i % 2]);
    last = next;
  }
  add_quads(k, g, last, sums[1 - n % 2], 0, QUADS);
}

// The kinds of sums: planes, units and shifts of a sum (r16_kind).
#define KINDS(X) X(0, 1, 1, 0) X(1, 1, 1, 1) X(2, 1, 8, 0) X(3, 1, 8, 16) X(4, 2, 4, 0) X(5, 2, 8, 0) X(6, 2, 8, 8)
#define KIND(i, planes, units, shifts)                                                                                 \
  static __attribute__((noinline)) void kind_##i(const group *g) { multiply((r16_kind){planes, units, shifts}, g); }
KINDS(KIND)

// Registers for sums of a unit: 0 and 1 are a unit of columns, 2 the same of rows.
static const struct pg_tile_config units = {
    .palette = 1, .line_bytes = {32, 32, 64, 64, 64, 64, 64, 64}, .lines = {16, 16, 8, 16, 16, 16, 16, 16}};

void PG_FN(r16_begin)(const r16_product *p) {
  if (r16_kind_of(p->f).units == 1) {
    TILES_BEGIN_AS(units);
  } else {
    TILES_BEGIN();
  }
}

void PG_FN(r16_multiply)(float *to, int64_t ld, const r16_totals before, r16_panel *w, const r16_columns *c,
                         const r16_product *p, int64_t number, int64_t strip) {
  const r16_kind k = r16_kind_of(p->f);
  group g = {.w = w,
             .x = r16_tiles_of(c, number, strip),
             .n = r16_group_columns(c, number),
             .to = to,
             .ld = ld,
             .before = before ? before : nothing};
#define CALL(i, p, u, s)                                                                                               \
  if (k.planes == (p) && k.units == (u) && k.shifts == (s)) kind_##i(&g);
  KINDS(CALL)
  r16_stop_fetch(&w->next, w);
}
