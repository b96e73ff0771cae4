// Elementary functions of vf registers: vf_exp within 1 ulp, the others within 4 (gelu and phi lose digits in their
// lower tails, below 1e-4). Infinities and NaN as in libm, subnormal results where the exact one is. The polynomials
// are weighted least-squares fits (minimax within a few percent) made for this file.
#pragma once
#include "simd.h"

// q(r) with exp(r) = 1 + r + r^2 q(r) for |r| <= ln(2) / 2, to 2^-28.
PG_INLINE vf vf_exp_q(vf r) {
  vf q = vf_fma(r, vf_set1(0.0013950809370726347f), vf_set1(0.008369073271751404f));
  q = vf_fma(q, r, vf_set1(0.04166620224714279f));
  q = vf_fma(q, r, vf_set1(0.16666516661643982f));
  return vf_fma(q, r, vf_set1(0.5f));
}

// e^x = p 2^n with p about 1.
PG_INLINE vf vf_exp_parts(vf x, vf *n) {
  const vf magic = vf_set1(0x1.8p23f); // adding it rounds to an integer
  *n = vf_fma(x, vf_set1(1.44269504088896341f), magic) - magic;
  vf r = vf_fma(*n, vf_set1(-0.693359375f), x); // ln 2 in two parts, the first of so few bits that the product is exact
  r = vf_fma(*n, vf_set1(2.12194440e-4f), r);
  return vf_set1(1.0f) + vf_fma(r * r, vf_exp_q(r), r);
}

// e^x: 0 below -104 (subnormals before that), inf above 88.73.
PG_INLINE vf vf_exp(vf x) {
  vf n;
  const vf p = vf_exp_parts(vf_min(vf_set1(89.0f), vf_max(vf_set1(-104.0f), x)), &n); // in this order NaN stays
  return vf_scale2(p, n);
}

// e^x - 1, without cancellation near 0.
PG_INLINE vf vf_expm1(vf x) {
  const vf small = vf_fma(x * x, vf_exp_q(x), x);
  return vf_if_lt(vf_abs(x), vf_set1(0.3465735f), small, vf_exp(x) - vf_set1(1.0f));
}

// 1 / (1 + e^-x), from e^-|x|, which cannot overflow.
PG_INLINE vf vf_sigmoid(vf x) {
  const vf one = vf_set1(1.0f), e = vf_exp(-vf_abs(x));
  return vf_if_lt(x, vf_zero(), e, one) / (one + e);
}

PG_INLINE vf vf_silu(vf x) { return x * vf_sigmoid(x); }

PG_INLINE vf vf_tanh(vf x) {
  const vf z = x * x, a = vf_abs(x), one = vf_set1(1.0f);
  vf p = vf_fma(z, vf_set1(-0.005717045161873102f), vf_set1(0.02065058797597885f));
  p = vf_fma(p, z, vf_set1(-0.05374349653720856f));
  p = vf_fma(p, z, vf_set1(0.13331490755081177f));
  p = vf_fma(p, z, vf_set1(-0.3333328366279602f));
  const vf small = vf_fma(x * z, p, x);
  const vf large = one - vf_set1(2.0f) / (vf_exp(a + a) + one);
  return vf_if_lt(a, vf_set1(0.625f), small, vf_if_lt(x, vf_zero(), -large, large));
}

// gelu, the tanh form: x / 2 (1 + tanh(y)) is x sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x^3).
PG_INLINE vf vf_gelu(vf x) {
  return x * vf_sigmoid(x * vf_fma(x * x, vf_set1(0.0713548162726f), vf_set1(1.59576912161f)));
}

// The normal distribution's integral from -inf to x; the lower tail keeps its digits (1 + erf(x) would lose them).
// erfc(t) = u P(u) exp(-t^2), u = 1 / (1 + t / 2).
PG_INLINE vf vf_phi(vf x) {
  const vf one = vf_set1(1.0f);
  const vf t = vf_min(vf_set1(15.0f), vf_abs(x) * vf_set1(0.70710678118654752f));
  const vf u = one / vf_fma(t, vf_set1(0.5f), one);
  vf p = vf_fma(u, vf_set1(0.04117657616734505f), vf_set1(-0.22263610363006592f));
  p = vf_fma(p, u, vf_set1(0.4621725380420685f));
  p = vf_fma(p, u, vf_set1(-0.40813326835632324f));
  p = vf_fma(p, u, vf_set1(0.08843275159597397f));
  p = vf_fma(p, u, vf_set1(-0.03253428637981415f));
  p = vf_fma(p, u, vf_set1(0.08277342468500137f));
  p = vf_fma(p, u, vf_set1(0.17807409167289734f));
  p = vf_fma(p, u, vf_set1(0.24644948542118073f));
  p = vf_fma(p, u, vf_set1(0.2821313440799713f));
  p = vf_fma(p, u, vf_set1(0.28209346532821655f));
  const vf half_erfc = vf_set1(0.5f) * u * p * vf_exp(-(t * t));
  return vf_if_lt(x, vf_zero(), half_erfc, one - half_erfc);
}
