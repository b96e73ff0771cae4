// The tile of int8.c on 64-bit Arm, which multiplies signed bytes: 16 of them by an instruction, or 32 (i8mm).
#pragma once

// The sums of a tile, for AT_ONCE rows at a time, because only so many fit the registers. A vector has those of VF_N
// rows and one column; with i8mm, which multiplies 2 x 8 by 8 x 2 bytes, those of two rows and two columns: r0 c0, r0
// c1, r1 c0, r1 c1.
enum {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  ABREAST = 2, // columns of a vector
#else
  ABREAST = 1,
#endif
  VECTORS = 2 * ABREAST, // of rows
  AT_ONCE = 2 * VF_N
};
typedef vi sums_of_tile[NT / ABREAST][VECTORS];
typedef vf floats_of_tile[NT / ABREAST][VECTORS];

#define EACH_COLUMN UNROLL for (int j = 0; j < (nt + ABREAST - 1) / ABREAST; j++)
#define EACH_ROW UNROLL for (int i = 0; i < VECTORS; i++)
#define EACH_SUM EACH_COLUMN EACH_ROW

// The numbers of the rows of vector i, or of the columns of vector j, each in the lanes that have its sums. p: those of
// all rows, or columns.
#if defined(__ARM_FEATURE_MATMUL_INT8)
PG_INLINE vi two_of(const void *p, int i) { return (vi)vld1q_dup_s64((const int64_t *)p + i); }
PG_INLINE vf of_rows(const float *p, int i) {
  const vf two = (vf)vcombine_s64(vld1_s64((const int64_t *)p + i), vcreate_s64(0));
  return vzip1q_f32(two, two);
}
PG_INLINE vi ints_of_rows(const int32_t *p, int i) { return (vi)of_rows((const float *)p, i); }
PG_INLINE vf of_columns(const float *p, int j) { return (vf)two_of(p, j); }
PG_INLINE vi ints_of_columns(const int32_t *p, int j) { return two_of(p, j); }
#else
PG_INLINE vf of_rows(const float *p, int i) { return vf_load(p + i * VF_N); }
PG_INLINE vi ints_of_rows(const int32_t *p, int i) { return vi_load(p + i * VF_N); }
PG_INLINE vf of_columns(const float *p, int j) { return vf_set1(p[j]); }
PG_INLINE vi ints_of_columns(const int32_t *p, int j) { return vi_set1(p[j]); }
#endif

// The sums of column j and of the i-th VF_N rows.
PG_INLINE vf column_of(floats_of_tile v, int j, int i) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  const vf a = v[j / 2][2 * i], b = v[j / 2][2 * i + 1];
  return j % 2 ? vuzp2q_f32(a, b) : vuzp1q_f32(a, b);
#else
  return v[j][i];
#endif
}

// dots = the sums of n * R16_TOGETHER codes times integers of nt columns.
PG_INLINE void dot(int nt, int planes, int n, const int8_t *code, const uint8_t (*x)[R16_WIDTH][R16_TOGETHER],
                   sums_of_tile dots) {
  sums_of_tile hi;
  EACH_SUM {
    dots[j][i] = vi_zero();
    if (planes == 2) hi[j][i] = vi_zero();
  }
  UNROLL for (int k = 0; k < n; k++, code += TILE_ROWS * R16_TOGETHER) {
    int8x16_t v[VECTORS];
    EACH_ROW v[i] = vld1q_s8(code + i * 16);
    UNROLL for (int p = 0; p < planes; p++, x++) {
      vi(*to)[VECTORS] = p < planes - 1 ? hi : dots;
#if defined(__ARM_FEATURE_MATMUL_INT8)
      EACH_COLUMN {
        const int8x16_t b = vld1q_s8((const int8_t *)x[0][2 * j]);
        EACH_ROW to[j][i] = (vi)vmmlaq_s32((int32x4_t)to[j][i], v[i], b);
      }
#else
      const int8x16_t b = vld1q_s8((const int8_t *)x[0]);
#define ADD(j)                                                                                                         \
  if (j < nt) EACH_ROW to[j][i] = (vi)vdotq_laneq_s32((int32x4_t)to[j][i], v[i], b, j);
      ADD(0) ADD(1) ADD(2) ADD(3)
#undef ADD
#endif
    }
  }
  if (planes == 1) return;
  vi of_hi = vi_set1(256);
#if defined(__aarch64__)
  __asm__("" : "+w"(of_hi)); // one instruction multiplies and adds; a shift and an addition would be two
#endif
  EACH_SUM dots[j][i] = vi_add(dots[j][i], vi_mul(hi[j][i], of_hi));
}

// AT_ONCE rows of a panel, from `row` on, times nt columns, over a run.
PG_INLINE void rows_of_tile(int nt, kind k, const r16_panel *w, int row, const r16_byte_columns *x, const target *t,
                            const r16_fetch *fetch, fetching *at) {
  const int exact = k.planes == 2;
  const int elements = k.halves == 1 && (k.units || exact) ? R16_UNIT : R16_PART; // of a dot
  const int n = elements / R16_TOGETHER;
  const int step = k.units ? R16_UNIT / elements : exact ? 1 : R16_UNIT / elements / k.halves; // dots of a unit, or sum
  const int64_t n_steps = k.units ? w->sum_units : 1;
  const r16_numbers *of = x->numbers;
  const int8_t *code = w->codes[0][row];
  const uint8_t(*byte)[R16_WIDTH][R16_TOGETHER] = (const uint8_t(*)[R16_WIDTH][R16_TOGETHER])x->bytes;
  const int32_t(*whole)[TILE_ROWS] = w->whole, (*factors)[R16_WIDTH] = of->factors;
  const float(*scale)[TILE_ROWS] = w->scales, (*shift)[TILE_ROWS] = w->shifts;
  const float(*x_sums)[R16_WIDTH] = of->sums[k.halves == 1];
  floats_of_tile acc;
  EACH_SUM acc[j][i] = vf_zero();
  for (int64_t e = 0; e < w->n_sums; e++, scale++) {
    for (int64_t s = 0; s < w->n_shifts; s++, shift++, x_sums++) {
      EACH_ROW {
        const vf by = of_rows(*shift + row, i);
        EACH_COLUMN acc[j][i] = vf_fma(by, of_columns(*x_sums, j), acc[j][i]);
      }
    }
    sums_of_tile sum;
    EACH_SUM sum[j][i] = vi_zero();
    for (int64_t d = 0; d < n_steps; d++) {
      sums_of_tile unit;
      EACH_SUM unit[j][i] = k.units && exact ? sum[j][i] : vi_zero();
      UNROLL for (int h = 0; h < step; h++, code += n * TILE_ROWS * R16_TOGETHER, byte += n * k.planes) {
        sums_of_tile dots;
        if (fetch->run) fetch_two(fetch, at);
        dot(nt, k.planes, n, code, byte, dots);
        EACH_ROW {
          const vi by = k.units ? ints_of_rows(*whole + row, i) : vi_zero();
          EACH_COLUMN {
            vi v = dots[j][i];
            if (k.units) v = vi_mul(v, by);
            if (!k.units && !exact) v = vi_mul(v, ints_of_columns(*factors, j));
            unit[j][i] = vi_add(unit[j][i], v);
          }
        }
        if (k.units)
          whole++;
        else
          factors++;
      }
      EACH_SUM sum[j][i] =
          k.units && !exact ? vi_add(sum[j][i], vi_mul(unit[j][i], ints_of_columns(*factors, j))) : unit[j][i];
      if (k.units) factors++;
    }
    EACH_ROW {
      const vf by = of_rows(*scale + row, i);
      EACH_COLUMN acc[j][i] = vf_fma(vf_of_vi(sum[j][i]), by, acc[j][i]);
    }
  }
  UNROLL for (int j = 0; j < nt; j++) UNROLL for (int i = 0; i < 2; i++) {
    const int first = row + i * VF_N;
    vf_store(t->to + j * t->ld + first,
             vf_fma(column_of(acc, j, i), vf_set1(of->steps[j]), vf_load(t->before[j] + first)));
  }
}

// A panel times nt columns, over a run.
PG_INLINE void tile(int nt, kind k, const r16_panel *w, const r16_byte_columns *x, const target *t) {
  const r16_fetch fetch = w->next;
  fetching at = fetching_of(&fetch);
  for (int row = 0; row < TILE_ROWS; row += AT_ONCE) rows_of_tile(nt, k, w, row, x, t, &fetch, &at);
}
