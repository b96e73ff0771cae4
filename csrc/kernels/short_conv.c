// The short convolution of each channel over time. ssm_conv takes whole windows; conv_state takes the last tokens from
// cells, and new tokens after them.
#include "kernels/state.h"
#include "simd/vmath.h"

enum { CHANNELS = 16, STRIP = 64 }; // channels and tokens at a time, so that dst is written in whole cache lines

// y[i] = sum of x[i + k] * c[k]
static void convolve(float *y, const float *x, const float *c, int64_t n, int64_t n_c) {
  for (int64_t i = 0; i < n; i += VF_N) {
    const int m = (int)PG_MIN(VF_N, n - i);
    vf acc = vf_zero();
    for (int64_t k = 0; k < n_c; k++)
      acc = vf_fma(m < VF_N ? vf_load_n(x + i + k, m) : vf_load(x + i + k), vf_set1(c[k]), acc);
    vf_store(y + i, acc); // STRIP is whole vectors
  }
}

int PG_FN(ssm_conv_f32)(const pg_task *t, int ith, int nth) {
  const pg_tensor *y = &t->dst, *x = &t->src[0], *c = &t->src[1];
  const int64_t n_channels = y->ne[0], n_tokens = y->ne[1], blocks = (n_channels + CHANNELS - 1) / CHANNELS;
  const pg_range r = pg_share(blocks * y->ne[2], ith, nth);
  for (int64_t u = r.first; u < r.last; u++) {
    const int64_t first = u % blocks * CHANNELS, n = PG_MIN(CHANNELS, n_channels - first), seq = u / blocks;
    for (int64_t t0 = 0; t0 < n_tokens; t0 += STRIP) {
      const int64_t w = PG_MIN(STRIP, n_tokens - t0);
      float b[CHANNELS][STRIP];
      for (int64_t i = 0; i < n; i++) {
        const float *px = (const float *)pg_row_at(x, first + i, seq, 0) + t0;
        convolve(b[i], px, (const float *)pg_row_at(c, first + i, 0, 0), w, c->ne[0]);
      }
      for (int64_t k = 0; k < w; k++) {
        float *py = (float *)pg_row_at(y, t0 + k, seq, 0) + first;
        for (int64_t i = 0; i < n; i++) py[i] = b[i][k];
      }
    }
  }
  return PG_OK;
}

// conv_state: its rows are channels. A cell holds the last n_c - 1 tokens of each channel, and gets the new last ones.
enum { BLOCK = 512 }; // channels that a thread takes at a time

static pg_scan scan_of(const pg_task *t) {
  const pg_tensor *x = &t->src[PG_CONV_X], *ids = &t->src[PG_READ], *from = &t->src[PG_CONV_FROM];
  return (pg_scan){.n = t->src[PG_CONV_WEIGHTS].ne[0] - 1,
                   .n_rows = 1,
                   .n_head = x->ne[0],
                   .n_tokens = x->ne[1],
                   .n_seqs = x->ne[2],
                   .n_slots = 1,
                   .from = from,
                   .n_from = from->ne[1],
                   .ids = ids};
}

int64_t PG_FN(conv_state_work)(const pg_task *t, int nth) {
  const pg_scan s = scan_of(t);
  return pg_times(pg_times(s.n_seqs, s.n_head), s.n * (int64_t)sizeof(float));
}

// Channels from `first` on of a token: taps are rows, weights [n_c][BLOCK].
PG_INLINE void token(const pg_task *t, const float *const *rows, const float (*weights)[BLOCK], int64_t n_c,
                     int64_t first, int64_t n, float *y) {
  const float *bias = t->src[PG_CONV_BIAS].data ? (const float *)t->src[PG_CONV_BIAS].data + first : NULL;
  for (int64_t i = 0; i < n; i += VF_N) {
    const int m = (int)PG_MIN(VF_N, n - i);
    vf acc = vf_zero();
    for (int64_t k = 0; k < n_c; k++)
      acc = vf_fma(m < VF_N ? vf_load_n(rows[k] + i, m) : vf_load(rows[k] + i), vf_load(weights[k] + i), acc);
    if (bias) acc = acc + (m < VF_N ? vf_load_n(bias + i, m) : vf_load(bias + i));
    if (t->param[PG_CONV_SILU] != 0) acc = vf_silu(acc);
    float part[VF_N];
    vf_store(m < VF_N ? part : y + i, acc);
    if (m < VF_N) memcpy(y + i, part, (size_t)m * sizeof *part);
  }
}

// Rows of m floats, n of them, as columns.
PG_INLINE void turn(float (*to)[BLOCK], const float *from, int64_t n, int64_t m) {
  for (int64_t k = 0; k < m; k++)
    for (int64_t i = 0; i < n; i++) to[k][i] = from[i * m + k];
}

PG_INLINE void blocks_of(const pg_task *t, int ith, int nth, const pg_scan *scan, int64_t n_c) {
  const pg_tensor *x = &t->src[PG_CONV_X];
  const pg_scan s = *scan;
  const int64_t all = (s.n_head + nth - 1) / nth, share = (all + BLOCK - 1) / BLOCK; // of a thread: blocks
  const int64_t block = PG_MIN(BLOCK, ((all + share - 1) / share + VF_N - 1) / VF_N * VF_N);
  const int64_t blocks = (s.n_head + block - 1) / block;
  const pg_range r = pg_share(blocks * s.n_seqs, ith, nth);
  for (int64_t u = r.first; u < r.last; u++) {
    const int64_t first = u % blocks * block, n = PG_MIN(block, s.n_head - first), seq = u / blocks;
    const float *from = pg_scan_from(&s, seq) + first * s.n;
    float *to = pg_scan_to(t, &s, seq) + first * s.n, *y = (float *)t->dst.data + seq * s.n_tokens * s.n_head + first;
    float before[PG_CONV_MAX_TAPS][BLOCK], weights[PG_CONV_MAX_TAPS][BLOCK] = {{0}};
    const float *rows[PG_CONV_MAX_TAPS];
    turn(weights, (const float *)t->src[PG_CONV_WEIGHTS].data + first * n_c, n, n_c);
    turn(before, from, n, n_c - 1);
    // The step after the last token stores: its rows, except the newest, are the tokens that the next run needs.
    for (int64_t k = 0; k <= s.n_tokens; k++, y += s.n_head) {
      for (int64_t i = 0; i < n_c; i++) {
        const int64_t at = k + i - s.n;
        rows[i] = at < 0 ? before[k + i] : (const float *)pg_row_at(x, PG_MIN(at, s.n_tokens - 1), seq, 0) + first;
      }
      if (k < s.n_tokens) token(t, rows, weights, n_c, first, n, y);
    }
    for (int64_t i = 0; i < n; i++)
      for (int64_t k = 0; k < n_c - 1; k++) to[i * (n_c - 1) + k] = rows[k][i];
  }
}

int PG_FN(conv_state_f32)(const pg_task *t, int ith, int nth) {
  pg_scan s = scan_of(t);
  const int status = pg_scan_begin(t, &s);
  if (status) return status;
  s.states = (float *)t->work;
  if (s.n == 3)
    blocks_of(t, ith, nth, &s, 4); // the size that most models have, unrolled
  else
    blocks_of(t, ith, nth, &s, s.n + 1);
  pg_scan_end(t, ith, nth, &s);
  return PG_OK;
}
