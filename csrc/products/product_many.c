// A product with many columns: a block of rows is converted to f32 once, in panels (panel.h), and meets all columns.
// No sum runs across lanes, so short sums cost no more per element than long ones.
#include "formats/storage.h"
#include "products/panel.h"
#include "products/product.h"
#include "simd/lanes.h"
#include "simd/rows.h"
#include "simd/units.h"

enum {
  BLOCK = PG_MANY_ROWS * PG_PANEL_K,                     // elements of a block of rows: half a MiB at most, for the L2 cache
  ACROSS_ROWS = PG_MAX(PG_MANY_ROWS, PG_MOST_BLOCK),     // across: rows of a block, whole blocks of every type ...
  ACROSS_K = BLOCK / ACROSS_ROWS,                        // ... and the elements of their sums
  GROUPS = 8,                                            // groups of neighbouring columns that are copied together
  STRETCH = GROUPS * PG_GROUP
};
_Static_assert(PG_MANY_ROWS % PG_PANEL == 0 && ACROSS_ROWS % PG_PANEL == 0, "panels must fit");

// Elements k0 .. k0 + n of rows first .. first + rows, as panels. Rows that the last panel lacks are zeros.
static void put_rows(const pg_product *p, int64_t first, int64_t rows, int64_t k0, int64_t n, float *to) {
  const pg_tensor *a = p->a;
  const pg_to_f32 to_f32 = PG_FN(to_f32)(a->type);
  const char *from = p->a_rows + first * a->nb[1] + k0 / pg_block_size(a->type) * a->nb[0];
  for (int64_t r = 0; r < (rows + PG_PANEL - 1) / PG_PANEL * PG_PANEL; r += VF_N, from += VF_N * a->nb[1]) {
    float own[VF_N][PG_PANEL_K];
    const int in_place = a->type == PG_F32 && r + VF_N <= rows && a->nb[1] % 4 == 0;
    for (int64_t i = 0; i < VF_N && !in_place; i++) {
      if (r + i < rows) {
        to_f32(from + i * a->nb[1], own[i], n);
      } else {
        memset(own[i], 0, n * sizeof(float));
      }
    }
    pg_turn(to + r / PG_PANEL * PG_PANEL * n + r % PG_PANEL, PG_PANEL, in_place ? from : (const char *)own,
            in_place ? a->nb[1] : (int64_t)sizeof own[0], n);
  }
}

// The same for rows that run across the stored ones.
static void put_rows_across(const pg_product *p, int64_t first, int64_t rows, int64_t k0, int64_t n, float *to) {
  const pg_tensor *a = p->a;
  const pg_to_f32 to_f32 = PG_FN(to_f32)(a->type);
  const char *from = p->a_rows + k0 * a->nb[1] + first / pg_block_size(a->type) * a->nb[0];
  for (int64_t i = 0; i < n; i++, from += a->nb[1], to += PG_PANEL) {
    float own[ACROSS_ROWS];
    const float *x = (const float *)from;
    if (a->type != PG_F32) {
      to_f32(from, own, rows);
      x = own;
    }
    int64_t r = 0;
    float *panel = to;
    for (; r + PG_PANEL <= rows; r += PG_PANEL, panel += PG_PANEL * n) {
      vf_store(panel, vf_load(x + r));
      vf_store(panel + VF_N, vf_load(x + r + VF_N));
    }
    for (int64_t j = 0; r < rows && j < PG_PANEL; j++) panel[j] = r + j < rows ? x[r + j] : 0;
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
// cache line is read once. Elements from k0 on of a group are prefetched into the L2 cache, because the hardware would
// begin anew in each column.
static void find_columns(const pg_product *p, int64_t c, int64_t last, int64_t k0, int64_t n, columns *s) {
  const int64_t end = PG_MIN(c + STRETCH, last), nb = p->b->nb[0];
  const int across = p->nb_b[0] == 4 && nb != 4 && p->b->type == PG_F32 && !p->list && p->n_b == p->n[0] &&
                     c / p->n[0] == (end - 1) / p->n[0];
  s->lies = across ? PG_BY_ELEMENT : PG_BY_COLUMN;
  s->n = PG_MIN(across ? STRETCH : PG_GROUP, last - c);
  for (int64_t j = 0; j < s->n; j++) {
    s->x[j] = pg_column(p, c + j, &s->y[j]) + k0 * nb;
    for (int64_t i = 0; i < n * nb && !across; i += 64) __builtin_prefetch(s->x[j] + i, 0, 2);
  }
}

// Copy n elements of columns, as groups.
static void put_columns(const pg_product *p, const columns *s, int64_t n, float *to) {
  if (s->lies == PG_BY_COLUMN) {
    for (int64_t j = 0; j < s->n; j++) pg_get_f32(to + j * PG_COLUMN, p->b, s->x[j], 0, n);
    for (int64_t j = s->n; j % PG_GROUP_STEP; j++) memset(to + j * PG_COLUMN, 0, n * sizeof *to);
    return;
  }
  const char *from = s->x[0];
  for (int64_t i = 0; i < n; i++, from += p->b->nb[0], to += PG_GROUP) {
    const float *x = (const float *)from;
    float *group = to;
    int64_t j = 0;
    for (; j + PG_GROUP <= s->n; j += PG_GROUP, group += PG_GROUP * n) memcpy(group, x + j, PG_GROUP * sizeof *x);
    for (int64_t e = 0; j < s->n && e < PG_GROUP; e++) group[e] = j + e < s->n ? x[j + e] : 0;
  }
}

int64_t PG_FN(product_many_work)(void) { return (BLOCK + STRETCH * PG_COLUMN) * 4; }

void PG_FN(product_many)(const pg_product *p, pg_part part, float *work) {
  const int64_t most_rows = p->across ? ACROSS_ROWS : PG_MANY_ROWS, most_k = p->across ? ACROSS_K : PG_PANEL_K;
  float *a = work, *b = work + BLOCK;
  for (int64_t r0 = part.rows.first; r0 < part.rows.last; r0 += most_rows) {
    const int64_t rows = PG_MIN(most_rows, part.rows.last - r0);
    for (int64_t k0 = 0; k0 < p->k; k0 += most_k) {
      const int64_t n = PG_MIN(most_k, p->k - k0);
      (p->across ? put_rows_across : put_rows)(p, r0, rows, k0, n, a);
      columns now, next;
      find_columns(p, part.cols.first, part.cols.last, k0, n, &next);
      for (int64_t c = part.cols.first; c < part.cols.last; c += now.n) {
        now = next;
        put_columns(p, &now, n, b);
        find_columns(p, c + now.n, part.cols.last, k0, n, &next);
        for (int64_t j = 0; j < now.n; j++) now.y[j] += r0;
        for (int64_t j = 0; j < now.n; j += PG_GROUP)
          PG_FN(panels)(a, rows, b + j * (now.lies == PG_BY_COLUMN ? PG_COLUMN : n), now.lies, PG_MIN(PG_GROUP, now.n - j),
                        n, now.y + j, k0 > 0);
      }
    }
  }
}
