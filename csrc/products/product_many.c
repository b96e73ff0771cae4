// A product with many columns: a block of rows is converted to f32 once, in panels (panel.h), and meets all columns.
// No sum runs across lanes: a chain that others compute in a lane of its own is computed alone here, and then the next.
#include "formats/storage.h"
#include "products/panel.h"
#include "products/product.h"
#include "simd/lanes.h"
#include "simd/rows.h"
#include "simd/units.h"

enum {
  BLOCK = PG_MANY_ROWS * PG_PANEL_K, // elements of a block of rows at most: half a MiB for the L2 cache
  SPLIT = PG_MOST_BLOCK,             // rows that are converted together when they run across
  ACROSS_K = PG_MIN(PG_PANEL_K / 2, BLOCK / SPLIT),
  MOST_ROWS = 4 * PG_MANY_ROWS,                     // of a block, however short they are
  PANELS = BLOCK + (MOST_ROWS / PG_PANEL + 1) * 16, // floats of a block's panels
  STRETCH = 48 // neighbouring columns that are copied together: whole groups, whole cache lines
};
_Static_assert(PG_MANY_ROWS % PG_PANEL == 0 && SPLIT % PG_PANEL == 0, "panels must fit");
_Static_assert(STRETCH % PG_GROUP == 0, "groups must fit");

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Chains of a sum (panel.h), and the elements of panels and groups for n of a sum: those that are added are zeros.
static int chains_of(const pg_product *p) { return p->across ? 1 : VF_N; }
static int64_t filled(const pg_product *p, int64_t n) { return ceil_div(n, chains_of(p)) * chains_of(p); }

// The shape of a block of a part's rows: the blocks are equal, and their panels fit BLOCK.
typedef struct shape {
  int64_t rows, k;
} shape;

static shape shape_of(const pg_product *p, int64_t rows) {
  const int64_t k = PG_MIN(filled(p, p->k), p->across ? ACROSS_K : PG_PANEL_K);
  const int64_t unit = p->across && pg_block_size(p->a->type) > 1 ? SPLIT : PG_PANEL;
  const int64_t most = PG_MIN(BLOCK / k / unit * unit, MOST_ROWS), n = ceil_div(rows, most);
  return (shape){ceil_div(ceil_div(rows, n), unit) * unit, k};
}

// Elements k0 .. k0 + n of rows first .. first + rows, as panels of chains. Rows that the last panel lacks are zeros.
static void put_rows(const pg_product *p, int64_t first, int64_t rows, int64_t k0, int64_t n, float *to) {
  const pg_tensor *a = p->a;
  const pg_to_f32 to_f32 = PG_FN(to_f32)(a->type);
  const char *from = p->a_rows + first * a->nb[1] + k0 / pg_block_size(a->type) * a->nb[0];
  const int64_t all = filled(p, n), chain = all / VF_N * PG_PANEL;
  for (int64_t r = 0; r < (rows + PG_PANEL - 1) / PG_PANEL * PG_PANEL; r += VF_N, from += VF_N * a->nb[1]) {
    float own[VF_N][PG_PANEL_K];
    const int in_place = a->type == PG_F32 && r + VF_N <= rows && a->nb[1] % 4 == 0 && n == all;
    for (int64_t i = 0; i < VF_N && !in_place; i++) {
      if (r + i < rows) {
        to_f32(from + i * a->nb[1], own[i], n);
        memset(own[i] + n, 0, (all - n) * sizeof(float));
      } else {
        memset(own[i], 0, all * sizeof(float));
      }
    }
    pg_turn(to + r / PG_PANEL * pg_panel_size(all) + r % PG_PANEL, chain, PG_PANEL, in_place ? from : (const char *)own,
            in_place ? a->nb[1] : (int64_t)sizeof own[0], all);
  }
}

// The same for rows that run across the stored ones.
static void put_rows_across(const pg_product *p, int64_t first, int64_t rows, int64_t k0, int64_t n, float *to) {
  const pg_tensor *a = p->a;
  const pg_to_f32 to_f32 = PG_FN(to_f32)(a->type);
  const int64_t per = pg_block_size(a->type);
  const char *from = p->a_rows + k0 * a->nb[1] + first / per * a->nb[0];
  for (int64_t i = 0; i < n; i++, from += a->nb[1], to += PG_PANEL) {
    float *panel = to;
    for (int64_t r0 = 0; r0 < rows; r0 += SPLIT) {
      const int64_t some = PG_MIN(SPLIT, rows - r0);
      const char *at = from + r0 / per * a->nb[0];
      float own[SPLIT];
      const float *x = (const float *)at;
      if (a->type != PG_F32) {
        to_f32(at, own, some);
        x = own;
      }
      int64_t r = 0;
      for (; r + PG_PANEL <= some; r += PG_PANEL, panel += pg_panel_size(n)) {
        vf_store(panel, vf_load(x + r));
        vf_store(panel + VF_N, vf_load(x + r + VF_N));
      }
      for (int64_t j = 0; r < some && j < PG_PANEL; j++) panel[j] = r + j < some ? x[r + j] : 0;
    }
  }
}

// Some columns of a part, and the places of their results.
typedef struct columns {
  int64_t n;
  enum pg_group lies;
  const char *x[STRETCH];
  float *y[STRETCH];
} columns;

// The next columns of a part, from c on: one group, or several when columns are neighbours in memory, so that each
// cache line is read once.
static void find_columns(const pg_product *p, int64_t c, int64_t last, int64_t k0, columns *s) {
  const int64_t nb = p->b->nb[0], whole = p->n_b == p->n[0] && !p->list ? (c / p->n[0] + 1) * p->n[0] : c;
  const int64_t side_by_side = PG_MIN(PG_MIN(STRETCH, whole - c), last - c);
  const int near = p->nb_b[0] == 4 && nb != 4 && p->b->type == PG_F32 && side_by_side >= PG_MIN(PG_GROUP, last - c);
  s->lies = near ? PG_BY_ELEMENT : PG_BY_COLUMN;
  s->n = near ? side_by_side : PG_MIN(PG_GROUP, last - c);
  for (int64_t j = 0; j < s->n; j++) s->x[j] = pg_column(p, c + j, &s->y[j]) + k0 * nb;
}

// The memory of n elements of columns, which should be evenly spaced.
static pg_fetch fetch_columns(const pg_product *p, const columns *s, int64_t n) {
  const int64_t nb = p->b->nb[0];
  if (s->n <= 0) return (pg_fetch){.n = 0};
  if (s->lies == PG_BY_ELEMENT) return pg_fetch_of(s->x[0], s->n * 4, nb, n);
  const int64_t next = s->n > 1 ? s->x[1] - s->x[0] : 0;
  if (nb > 64) return (pg_fetch){s->x[0], nb, n, n, next - n * nb, s->n * n};
  return pg_fetch_of(s->x[0], n * nb, next, s->n);
}

// The memory of the results of columns.
static pg_fetch fetch_results(const columns *s, int64_t first, int64_t rows) {
  if (s->n <= 0) return (pg_fetch){.n = 0};
  return pg_fetch_of((const char *)(s->y[0] + first), rows * 4, s->n > 1 ? (s->y[1] - s->y[0]) * 4 : 0, s->n);
}

// The memory that the next block of a part is converted from.
static pg_fetch fetch_rows(const pg_product *p, int64_t first, int64_t rows, int64_t k0, int64_t n) {
  const pg_tensor *a = p->a;
  const int64_t per = pg_block_size(a->type), i0 = p->across ? first : k0, i1 = p->across ? k0 : first;
  return pg_fetch_of(p->a_rows + i1 * a->nb[1] + i0 / per * a->nb[0], (p->across ? rows : n) / per * a->nb[0], a->nb[1],
                     p->across ? n : rows);
}

// Floats from a group to the next.
PG_INLINE int64_t group_size(enum pg_group lies, int64_t n) {
  return lies == PG_BY_COLUMN ? PG_GROUP * PG_COLUMN : n * PG_GROUP + 16;
}

// Copy n elements of columns, as groups.
static void put_columns(const pg_product *p, const columns *s, int64_t n, float *to) {
  const int64_t all = filled(p, n);
  if (s->lies == PG_BY_COLUMN) {
    for (int64_t j = 0; j < s->n; j++) {
      pg_get_f32(to + j * PG_COLUMN, p->b, s->x[j], 0, n);
      memset(to + j * PG_COLUMN + n, 0, (all - n) * sizeof *to);
    }
    for (int64_t j = s->n; j % PG_GROUP_STEP; j++) memset(to + j * PG_COLUMN, 0, all * sizeof *to);
    return;
  }
  const char *from = s->x[0];
  for (int64_t i = 0; i < n; i++, from += p->b->nb[0], to += PG_GROUP) {
    const float *x = (const float *)from;
    float *group = to;
    int64_t j = 0;
    for (; j + PG_GROUP <= s->n; j += PG_GROUP, group += group_size(PG_BY_ELEMENT, all))
      memcpy(group, x + j, PG_GROUP * sizeof *x);
    for (int64_t e = 0; j < s->n && e < PG_GROUP; e++) group[e] = j + e < s->n ? x[j + e] : 0;
  }
  for (int64_t j = 0; j < s->n && all > n; j += PG_GROUP, to += group_size(PG_BY_ELEMENT, all))
    memset(to, 0, (all - n) * PG_GROUP * sizeof *to);
}

int64_t PG_FN(product_many_work)(void) { return (PANELS + STRETCH * PG_COLUMN) * 4; }

void PG_FN(product_many)(const pg_product *p, pg_part part, float *work) {
  const shape most = shape_of(p, part.rows.last - part.rows.first);
  float *a = work, *b = work + PANELS;
  for (int64_t r0 = part.rows.first; r0 < part.rows.last; r0 += most.rows) {
    const int64_t rows = PG_MIN(most.rows, part.rows.last - r0);
    for (int64_t k0 = 0; k0 < p->k; k0 += most.k) {
      const int64_t n = PG_MIN(most.k, p->k - k0), all = filled(p, n);
      (p->across ? put_rows_across : put_rows)(p, r0, rows, k0, n, a);
      const int64_t next_k = k0 + n < p->k ? k0 + n : 0, next_r = next_k ? r0 : r0 + rows;
      const int64_t next_rows = PG_MIN(most.rows, part.rows.last - next_r);
      pg_fetch fetch[PG_FETCHES] = {{.n = 0}, {.n = 0}, {.n = 0}};
      if (next_rows > 0) fetch[2] = fetch_rows(p, next_r, next_rows, next_k, PG_MIN(most.k, p->k - next_k));
      columns now, next;
      find_columns(p, part.cols.first, part.cols.last, k0, &next);
      for (int64_t c = part.cols.first; c < part.cols.last; c += now.n) {
        now = next;
        put_columns(p, &now, n, b);
        find_columns(p, c + now.n, part.cols.last, k0, &next);
        fetch[0] = fetch_results(&next, r0, rows);
        fetch[1] = fetch_columns(p, &next, n);
        for (int64_t j = 0; j < now.n; j++) now.y[j] += r0;
        for (int64_t j = 0; j < now.n; j += PG_GROUP) PG_FN(panels)
        (a, rows, b + j / PG_GROUP * group_size(now.lies, all), now.lies, PG_MIN(PG_GROUP, now.n - j), all,
         chains_of(p), now.y + j, k0 > 0, fetch);
      }
    }
  }
}
