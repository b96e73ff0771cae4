// get_rows, get_rows_back, set_rows, add_id: rows of a tensor by index. An index outside the tensor makes the op fail,
// without any access to memory for it.
#include "formats/storage.h"
#include "simd/rows.h"
#include "simd/units.h"

enum { STRIP = 256 }; // elements at a time: whole blocks of every block type

static int64_t index_at(const pg_tensor *ids, int64_t i0, int64_t i1, int64_t i2) {
  const char *p = ids->data + i0 * ids->nb[0] + i1 * ids->nb[1] + i2 * ids->nb[2];
  return ids->type == PG_I64 ? *(const int64_t *)p : *(const int32_t *)p;
}

// dst[.., i1, i2, i3] = the row ids[i1, i2, i3] of a's plane (i2, i3)
int PG_FN(get_rows_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0], *ids = &t->src[1];
  const int64_t n = y->ne[0];
  const pg_to_f32 decode = pg_block_size(a->type) > 1 ? PG_FN(to_f32)(a->type) : NULL;
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    const int64_t id = index_at(ids, i.i1, i.i2, i.i3);
    if (id < 0 || id >= a->ne[1]) return pg_fail(t, PG_E_INDEX, id);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    const char *pa = pg_row_at(a, id, i.i2, i.i3);
    if (decode) {
      decode(pa, (float *)py, n);
    } else if (a->type == y->type && a->type != PG_F32) {
      pg_move_units(py, pg_unit_size(y), pa, a->nb[0], n, pg_unit_size(y));
    } else {
      pg_get_f32((float *)py, a, pa, 0, n);
    }
  }
  return PG_OK;
}

// The row ids[i1, i2, i3] of dst's plane (i2, i3), zeros at first, += a's row (i1, i2, i3). Each thread owns every nth
// row of dst, so that sums have one order on any number of threads.
int PG_FN(get_rows_back_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0], *ids = &t->src[1];
  const int64_t n = y->ne[0], rows = pg_n_rows(a);
  const int dense = pg_is_f32_row(a);
  for (int64_t ir = ith, all = pg_n_rows(y); ir < all; ir += nth) memset(y->data + ir * y->nb[1], 0, (size_t)n * 4);
  for (int64_t ir = 0; ir < rows; ir++) {
    const pg_idx i = pg_unravel(a, ir);
    const int64_t id = index_at(ids, i.i1, i.i2, i.i3);
    if (id < 0 || id >= y->ne[1]) return pg_fail(t, PG_E_INDEX, id);
    if ((id + (i.i2 + i.i3 * y->ne[2]) * y->ne[1]) % nth != ith) continue;
    float *py = (float *)pg_row_at(y, id, i.i2, i.i3);
    const char *pa = pg_row_at(a, i.i1, i.i2, i.i3);
    for (int64_t k = 0; k < n; k += STRIP) {
      float s[STRIP];
      const int64_t m = PG_MIN(STRIP, n - k);
      const float *x = dense ? (const float *)pa + k : s;
      if (!dense) pg_get_f32(s, a, pa, k, m);
      for (int64_t j = 0; j < m; j++) py[k + j] += x[j];
    }
  }
  return PG_OK;
}

// The row c[i1, i2, i3] of dst's plane (i2, i3) = b[.., i1, i2, i3]; dst is a's memory, c is repeated along i2 and i3.
// Each thread owns every nth row of dst, so the last one of equal indices wins, on any number of threads.
int PG_FN(set_rows_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *b = &t->src[1], *c = &t->src[2];
  const int64_t n = y->ne[0], block = pg_block_size(y->type), strip_bytes = STRIP / block * pg_unit_size(y);
  const pg_from_f32 encode = block > 1 ? PG_FN(from_f32)(y->type) : NULL;
  const int64_t n_rows = pg_n_rows(b);
  for (int64_t ir = 0; ir < n_rows; ir++) {
    const pg_idx i = pg_unravel(b, ir);
    const int64_t id = index_at(c, i.i1, i.i2 % c->ne[1], i.i3 % c->ne[2]);
    if (id < 0 || id >= y->ne[1]) return pg_fail(t, PG_E_INDEX, id);
    if (id % nth != ith) continue;
    char *py = pg_row_at(y, id, i.i2, i.i3);
    const char *pb = pg_row_at(b, i.i1, i.i2, i.i3);
    if (b->nb[0] == 4) {
      if (encode)
        pg_encode(encode, y, (const float *)pb, py, n);
      else
        pg_put_f32(y, py, 0, (const float *)pb, n);
      continue;
    }
    for (int64_t k = 0; k < n; k += STRIP) {
      float x[STRIP];
      const int64_t m = PG_MIN(STRIP, n - k);
      pg_get_f32(x, b, pb, k, m);
      if (encode)
        pg_encode(encode, y, x, py + k / STRIP * strip_bytes, m);
      else
        pg_put_f32(y, py, k, x, m);
    }
  }
  return PG_OK;
}

// dst[.., i1, i2, i3] = a's row + b's row ids[i1, i2]; dst may be a.
int PG_FN(add_id_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *a = &t->src[0], *b = &t->src[1], *ids = &t->src[2];
  const int64_t n = y->ne[0];
  const pg_range r = pg_share(pg_n_rows(y), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx i = pg_unravel(y, ir);
    const int64_t id = index_at(ids, i.i1, i.i2, 0);
    if (id < 0 || id >= b->ne[1]) return pg_fail(t, PG_E_INDEX, id);
    char *py = pg_row_at(y, i.i1, i.i2, i.i3);
    const char *pa = pg_row_at(a, i.i1, i.i2, i.i3), *pb = pg_row_at(b, id, 0, 0);
    for (int64_t k = 0; k < n; k += STRIP) {
      float x[STRIP], z[STRIP];
      const int64_t m = PG_MIN(STRIP, n - k);
      pg_get_f32(x, a, pa, k, m);
      pg_get_f32(z, b, pb, k, m);
      for (int64_t j = 0; j < m; j++) x[j] += z[j];
      pg_put_f32(y, py, k, x, m);
    }
  }
  return PG_OK;
}
