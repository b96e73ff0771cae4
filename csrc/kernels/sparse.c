// lightning_indexer: scores of keys; lanes are keys. top_k_mask: a mask of the largest elements, which are found digit
// by digit.
#include "formats/storage.h"
#include "kernels/order.h"
#include "simd/rows.h"

enum { KEYS = 2 * VF_N, HEADS = 4 }; // keys of a tile, heads at a time

int64_t PG_FN(lightning_indexer_work)(const pg_task *t, int nth) {
  return pg_times(t->src[0].ne[0], (KEYS + 1) * (int64_t)sizeof(float) * nth);
}

// sum += w[h] * relu(q[h] . k) for n <= HEADS heads at q, `step` bytes apart. tile: KEYS keys, an element of each at a
// time; w NULL: all 1.
PG_INLINE void add_heads(vf sum[2], const float *tile, const char *q, int64_t step, const float *w, int64_t d, int n) {
  const float *row[HEADS];
  vf dot[HEADS][2];
  for (int h = 0; h < n; h++) {
    row[h] = (const float *)(q + h * step);
    dot[h][0] = dot[h][1] = vf_zero();
  }
  for (int64_t i = 0; i < d; i++) {
    const vf a = vf_load(tile + i * KEYS), b = vf_load(tile + i * KEYS + VF_N);
    for (int h = 0; h < n; h++) {
      const vf x = vf_set1(row[h][i]);
      dot[h][0] = vf_fma(x, a, dot[h][0]);
      dot[h][1] = vf_fma(x, b, dot[h][1]);
    }
  }
  for (int h = 0; h < n; h++) {
    const vf weight = vf_set1(w ? w[h] : 1.0f), zero = vf_zero();
    for (int i = 0; i < 2; i++) { // NaN stays one
      sum[i] = vf_fma(weight, vf_if_lt(dot[h][i], zero, zero, dot[h][i]), sum[i]);
    }
  }
}

int PG_FN(lightning_indexer_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *q = &t->src[0], *k = &t->src[1], *w = &t->src[2], *y = &t->dst;
  const int64_t d = q->ne[0], n_kv = k->ne[1], n_head = q->ne[1];
  const pg_to_f32 decode = PG_FN(to_f32)(k->type);
  if (!decode) return PG_E_TYPE;
  float *tile = (float *)t->work + ith * d * (KEYS + 1), *row = tile + d * KEYS;
  const pg_range r = pg_share((n_kv + KEYS - 1) / KEYS, ith, nth);
  for (int64_t first = r.first * KEYS; first < PG_MIN(r.last * KEYS, n_kv); first += KEYS) {
    const int64_t n = PG_MIN(KEYS, n_kv - first);
    for (int64_t c = 0; c < KEYS; c++) { // with fewer keys, the last one is repeated
      decode(pg_row_at(k, first + PG_MIN(c, n - 1), 0, 0), row, d);
      for (int64_t i = 0; i < d; i++) tile[i * KEYS + c] = row[i];
    }
    for (int64_t token = 0; token < q->ne[2]; token++) {
      const float *weights = w->data ? (const float *)pg_row_at(w, token, 0, 0) : NULL;
      vf sum[2] = {vf_zero(), vf_zero()};
      for (int64_t h = 0; h < n_head; h += HEADS) {
        const char *heads = pg_row_at(q, h, token, 0);
        const float *some = weights ? weights + h : NULL;
        if (n_head - h >= HEADS)
          add_heads(sum, tile, heads, q->nb[1], some, d, HEADS);
        else
          for (int64_t i = 0; i < n_head - h; i++)
            add_heads(sum, tile, heads + i * q->nb[1], q->nb[1], some ? some + i : NULL, d, 1);
      }
      float scores[KEYS];
      vf_store(scores, sum[0]);
      vf_store(scores + VF_N, sum[1]);
      memcpy(pg_row_at(y, token, 0, 0) + first * 4, scores, n * 4);
    }
  }
  return PG_OK;
}

int64_t PG_FN(top_k_mask_work)(const pg_task *t, int nth) { return pg_times(t->src[0].ne[0], 2 * 4 * nth); }

// The least of the k largest of n numbers; zeros do not count. *ties: how many of the k largest are equal to it. When k
// is 0, UINT32_MAX with *ties = 0; when there are at most k numbers, 1 with *ties = n.
static uint32_t kth_largest(const uint32_t *x, int64_t n, int64_t k, int64_t *ties) {
  uint32_t found = 0, known = 0;
  int64_t more = 0, left = k;
  for (int64_t i = 0; i < n; i++) more += x[i] != 0;
  if (!k || more <= k) {
    *ties = k ? n : 0;
    return k ? 1 : UINT32_MAX;
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    int32_t count[256] = {0};
    for (int64_t i = 0; i < n; i++)
      if ((x[i] & known) == found) count[x[i] >> shift & 255]++;
    uint32_t digit = 255;
    for (; count[digit] < left; digit--) left -= count[digit];
    found |= digit << shift;
    known |= 255u << shift;
  }
  *ties = left;
  return found;
}

// An element as a number of the same order; 0 for -inf, for NaN, and for elements that the mask hides.
PG_INLINE uint32_t shown(float x, float mask) { return mask > -INFINITY && x > -INFINITY ? order_of(x) : 0; }

PG_INLINE float mask_at(const pg_tensor *t, const char *row, int64_t i) {
  return t->type == PG_F32 ? ((const float *)row)[i] : pg_f16_to_f32(((const uint16_t *)row)[i]);
}

int PG_FN(top_k_mask_any)(const pg_task *t, int ith, int nth) {
  const pg_tensor *a = &t->src[0], *mask = &t->src[1], *blocks = &t->src[2], *own = &t->src[3], *y = &t->dst;
  const int64_t n = a->ne[0], k = (int64_t)t->param[0], size = mask->type == PG_F32 ? 4 : 2;
  const uint32_t hidden = mask->type == PG_F32 ? 0xff800000 : 0xfc00;
  const char *const of = blocks->data;
  uint32_t *best = (uint32_t *)t->work + 2 * n * ith, *chosen = best + n;
  for (int64_t i = 0; of && i < n; i++) {
    const int32_t b = *(const int32_t *)(of + i * blocks->nb[0]);
    if (b < 0 || b >= n) return pg_fail(t, PG_E_INDEX, b);
  }
  const pg_range r = pg_share(pg_n_rows(a), ith, nth);
  for (int64_t ir = r.first; ir < r.last; ir++) {
    const pg_idx at = pg_unravel(a, ir);
    const float *x = (const float *)pg_row_at(a, at.i1, at.i2, at.i3);
    const char *m = pg_row_at(mask, at.i1, at.i2 % mask->ne[2], at.i3 % mask->ne[3]);
    char *out = pg_row_at(y, at.i1, at.i2, at.i3);
    if (!of) {
      for (int64_t i = 0; i < n; i++) best[i] = shown(x[i], mask_at(mask, m, i));
    } else {
      memset(best, 0, n * 4);
      for (int64_t i = 0; i < n; i++) {
        const int32_t b = *(const int32_t *)(of + i * blocks->nb[0]);
        const uint32_t o = shown(x[i], mask_at(mask, m, i));
        best[b] = PG_MAX(best[b], o);
      }
    }
    memset(chosen, 0, n * 4);
    for (int64_t i = 0; own->data && i < own->ne[0]; i++) {
      const int32_t b = ((const int32_t *)pg_row_at(own, at.i1, 0, 0))[i];
      if (b >= n) return pg_fail(t, PG_E_INDEX, b);
      if (b >= 0) chosen[b] = 1, best[b] = 0;
    }
    int64_t ties;
    const uint32_t least = kth_largest(best, n, k, &ties);
    for (int64_t i = 0; i < n; i++) chosen[i] |= best[i] > least || (best[i] == least && ties-- > 0);
    for (int64_t i = 0; i < n; i++) {
      const int in = chosen[of ? *(const int32_t *)(of + i * blocks->nb[0]) : i];
      if (size == 4)
        ((uint32_t *)out)[i] = in ? ((const uint32_t *)m)[i] : hidden;
      else
        ((uint16_t *)out)[i] = in ? ((const uint16_t *)m)[i] : (uint16_t)hidden;
    }
  }
  return PG_OK;
}
