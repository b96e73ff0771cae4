// Shared by softmax and attention: ALiBi (arXiv 2108.12409: each head's factor for its mask), and the exponential.
#pragma once
#include <float.h>
#include <math.h>

#include "simd/vmath.h"

// Slope of head h: m0^(h + 1) for the first 2^k heads, m1^(2 (h - 2^k) + 1) for the rest; 1 without ALiBi.
static inline double pg_alibi_slope(double max_bias, int64_t h, int64_t n_head) {
  if (max_bias <= 0) return 1;
  int64_t n_log2 = 1;
  while (2 * n_log2 <= n_head) n_log2 *= 2;
  if (h < n_log2) return exp2(-max_bias / (double)n_log2 * (double)(h + 1));
  return exp2(-max_bias / 2 / (double)n_log2 * (double)(2 * (h - n_log2) + 1));
}

// Apply a mask: a bias of -inf hides a key, whatever its score is. A bias of NaN hides nothing.
PG_INLINE vf vf_masked(vf score, vf bias) { return vf_if_lt(bias, vf_set1(-FLT_MAX), vf_set1(-INFINITY), score); }

// e^x for x <= 0; exactly 0 below -87, where results would be subnormal and slow (masked scores are all there).
PG_INLINE vf vf_exp_below(vf x) {
  const vf low = vf_set1(-87.0f);
  vf n;
  const vf p = vf_exp_parts(vf_max(low, x), &n); // in this order of operands NaN stays
  return vf_if_lt(x, low, vf_zero(), vf_scale2_normal(p, n));
}
