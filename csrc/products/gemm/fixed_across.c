// out_prod of weights that the CPU has its own way for (pyggml/backends/cpu/products.py): a product whose rows run
// across the stored ones, so that each has an element of every stored row. Stored rows become f32, a strip of them at a
// time, and the lanes of a vector are elements of a row: so all that fixed point needs runs along the lanes.
#include "formats/storage.h"
#include "products/gemm/gemm.h"
#include "products/r16/scales.h"
#include "products/r16/stored.h"
#include "simd/lanes.h"

// The levels above avx512 and neon have no converters of their own.
#if VF_N == 16
#define TO_F32 PG_CAT(to_f32, __, avx512)
pg_to_f32 TO_F32(int64_t type);
#elif VF_N == 4
#define TO_F32 PG_CAT(to_f32, __, neon)
pg_to_f32 TO_F32(int64_t type);
#else
#define TO_F32 PG_FN(to_f32)
#endif

#if VF_N == 16
PG_INLINE vf byte_of(vi q, int i) {
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(q, 8u * (unsigned)i), _mm512_set1_epi32(255)));
}
PG_INLINE vi pair_of(vf a, vf b) { // both rounded to 16 bits
  return _mm512_or_si512(_mm512_slli_epi32(_mm512_cvtps_epi32(b), 16),
                         _mm512_and_si512(_mm512_cvtps_epi32(a), _mm512_set1_epi32(0xffff)));
}
#elif VF_N == 8
PG_INLINE vf byte_of(vi q, int i) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(q, 8 * i), _mm256_set1_epi32(255)));
}
PG_INLINE vi pair_of(vf a, vf b) {
  return _mm256_or_si256(_mm256_slli_epi32(_mm256_cvtps_epi32(b), 16),
                         _mm256_and_si256(_mm256_cvtps_epi32(a), _mm256_set1_epi32(0xffff)));
}
#else
PG_INLINE vf byte_of(vi q, int i) { return vcvtq_f32_u32((uint32x4_t)q >> 8 * i & 255); }
PG_INLINE vi pair_of(vf a, vf b) { return (vi)((vcvtnq_s32_f32(b) << 16) | (vcvtnq_s32_f32(a) & 0xffff)); }
#endif

// n units of a group of 16 repacked rows, as f32; rows lie R16_ROW apart.
PG_INLINE void unpack(r16_format f, const uint8_t *group, int64_t n, float *to) {
  const int halves = r16_halves(f), block_bytes = r16_block_bytes(f);
  for (int64_t u = 0; u < n; u++, to += R16_UNIT) {
    const uint8_t *head = group + u / f.units * block_bytes;
    const uint8_t *unit = head + r16_head_bytes(f) + u % f.units * r16_unit_bytes(f);
    float w[R16_UNIT][R16_ROWS];
    for (int part = 0; part < R16_ROWS / VF_N; part++) {
      r16_line l[2];
      for (int h = 0; h < halves; h++) {
        l[h] = r16_line_of(f, head, unit + r16_lines(f) * R16_LINE, part, h);
        l[h].shift = vf_fma(l[h].scale, vf_set1((float)-f.offset), l[h].shift);
      }
      _Pragma("GCC unroll 8") for (int p = 0; p < R16_QUARTETS; p++) {
        const int h = halves == 2 ? p / 4 : 0;
        const vi q = r16_quartet(f, unit, part, p);
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
            vf_store(w[4 * p + i] + part * VF_N, vf_fma(byte_of(q, i), l[h].scale, l[h].shift));
      }
    }
    for (int i = 0; i < R16_UNIT; i += VF_N)
      pg_turn(to + i, R16_ROW, VF_N * R16_ROW, (const char *)w[i], sizeof w[i], R16_ROWS);
  }
}

#define X(name, ...)                                                                                                   \
  static void unpack_##name(const uint8_t *group, int64_t n, float *to) { unpack(r16_##name, group, n, to); }
R16_FORMATS(X)
#undef X

typedef void (*unpack_fn)(const uint8_t *group, int64_t n, float *to);

#define X(name, ...) [PG_##name] = unpack_##name,
static const unpack_fn unpack_of[] = {R16_FORMATS(X)};
#undef X

// Elements k0 .. k0 + n of `rows` stored rows from `first` on, which is a multiple of 16. Repacked rows come in groups
// of 16, the rest of the last one zeros.
static void get_rows(const r16_product *p, int64_t first, int64_t rows, int64_t k0, int64_t n, float *to) {
  if (p->row_bytes) {
    const pg_to_f32 to_f32 = TO_F32(p->f.type);
    const int64_t bytes = r16_of_floats(p) ? 2 : stored_of(p->f.type).bytes;
    const char *from = (const char *)p->w + first * p->row_bytes + k0 / pg_block_size(p->f.type) * bytes;
    for (int64_t i = 0; i < rows; i++) to_f32(from + i * p->row_bytes, to + i * R16_ROW, n);
    return;
  }
  const int64_t group_bytes = r16_group_bytes(p->f, p->m);
  const uint8_t *from = p->w + first / R16_ROWS * group_bytes + k0 / (R16_UNIT * p->f.units) * r16_block_bytes(p->f);
  for (int64_t i = 0; i < rows; i += R16_ROWS, from += group_bytes)
    unpack_of[p->f.type](from, n / R16_UNIT, to + i * R16_ROW);
}

// What the values of some lanes, over all rows, are multiplied with to become integers.
typedef struct lanes {
  vf inv, step;
} lanes;

// As put_column of fixed_columns.c, for each lane: when a lane has NaN or an infinity, its step is NaN; when all values
// are below 1e-30, they count as 0.
PG_INLINE lanes lanes_of(const float *x, int64_t n) {
  enum { SUMS = 4 };
  const vf small = vf_set1(1e-15f), large = vf_set1(1e15f), one = vf_set1(1), tiny = vf_set1(1e-30f);
  vf max[SUMS], sum[SUMS], unit = one;
  for (int again = 0; again < 2; again++) {
    for (int j = 0; j < SUMS; j++) max[j] = sum[j] = vf_zero();
    for (int64_t i = 0; i < n; i += SUMS) _Pragma("GCC unroll 4") for (int j = 0; j < SUMS; j++) {
        const vf v = vf_mul(vf_load(x + (i + j) * R16_ROW), unit);
        max[j] = vf_max(vf_abs(v), max[j]);
        sum[j] = vf_fma(v, v, sum[j]);
      }
    max[0] = vf_max(vf_max(max[0], max[1]), vf_max(max[2], max[3]));
    sum[0] = vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3]));
    if (again || !(vf_any_lt(max[0], small) || vf_any_lt(large, max[0]))) break;
    // Squares may overflow or vanish.
    const vf to_one = vf_if_lt(tiny, max[0], vf_div(one, max[0]), vf_zero());
    unit = vf_if_lt(max[0], small, to_one, vf_if_lt(large, max[0], to_one, one));
  }
  const vf norm = vf_sqrt(sum[0]);
  lanes l;
  l.inv = vf_mul(vf_min(vf_div(vf_set1(R16_NORM), norm), vf_div(vf_set1(R16_MAX), max[0])), unit);
  l.inv = vf_if_lt(vf_zero(), norm, l.inv, vf_zero());
  l.step = vf_fma(norm, vf_zero(), vf_if_lt(vf_zero(), norm, vf_div(one, l.inv), vf_zero()));
  return l;
}

void PG_FN(r16_put_across)(r16_panel *panels, const r16_product *p, pg_range tiles, int64_t strip, float *own) {
  const int64_t first = strip * r16_strip(p), n = PG_MIN(r16_strip(p), p->k - first);
  const int64_t rows = PG_MIN(n, p->b->ne[0] - first), k0 = tiles.first * TILE_ROWS;
  const int64_t width = PG_MIN(tiles.last * TILE_ROWS, p->m) - k0;
  get_rows(p, first, rows, k0, width, own);
  for (int64_t i = rows; i < n; i++) memset(own + i * R16_ROW, 0, width * sizeof *own);
  for (int64_t t = tiles.first; t < tiles.last; t++, panels++, own += TILE_ROWS) {
    panels->next = r16_no_fetch(panels);
    for (int at = 0; at < TILE_ROWS; at += VF_N) {
      const float *x = own + at;
      const lanes l = lanes_of(x, n);
      vf_store(panels->steps + at, l.step);
      for (int64_t i = 0; i < n; i += 4) { // a quartet: elements 0 and 2, 1 and 3
        vf v[4];
        _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) v[j] = vf_mul(vf_load(x + (i + j) * R16_ROW), l.inv);
        vi_store(panels->ints[i / 2][at], pair_of(v[0], v[2]));
        vi_store(panels->ints[i / 2 + 1][at], pair_of(v[1], v[3]));
      }
    }
  }
}

enum { REPACKED, STORED, HALF };

// The product; b is the second source as its columns lie.
static r16_product product_of(const pg_task *t, int form, pg_tensor *b) {
  const pg_tensor *a = &t->src[0], *y = &t->dst;
  *b = t->src[1];
  b->ne[0] = t->src[1].ne[1], b->ne[1] = t->src[1].ne[0];
  b->nb[0] = t->src[1].nb[1], b->nb[1] = t->src[1].nb[0];
  return (r16_product){.f = form < HALF ? *r16_find(a->type) : (r16_format){.type = (int)a->type},
                       .w = (const uint8_t *)a->data,
                       .row_bytes = form ? a->nb[1] : 0,
                       .k = (a->ne[1] + R16_UNIT - 1) / R16_UNIT * R16_UNIT,
                       .m = a->ne[0],
                       .across = 1,
                       .b = b,
                       .y = y,
                       .n_cols = pg_n_rows(y)};
}

static int multiply(const pg_task *t, int ith, int nth, int form) {
  pg_tensor b;
  const r16_product p = product_of(t, form, &b);
  r16_queue q = r16_queue_of(t, ith, nth);
  PG_FN(r16_gemm_columns)(&p, &q, t->work);
  PG_FN(r16_gemm)(&p, 1, &q, t->work, ith);
  return PG_OK;
}

int PG_FN(out_prod_r16_any)(const pg_task *t, int ith, int nth) { return multiply(t, ith, nth, REPACKED); }
int PG_FN(out_prod_stored_any)(const pg_task *t, int ith, int nth) { return multiply(t, ith, nth, STORED); }
int PG_FN(out_prod_half_any)(const pg_task *t, int ith, int nth) { return multiply(t, ith, nth, HALF); }

int64_t PG_FN(out_prod_r16_work)(const pg_task *t, int nth) {
  pg_tensor b;
  const r16_product p = product_of(t, pg_block_size(t->src[0].type) > 1 ? STORED : HALF, &b);
  return PG_FN(r16_gemm_work)(&p, nth);
}
