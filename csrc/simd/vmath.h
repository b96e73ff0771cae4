// Elementary functions of vf registers: vf_exp within 1 ulp, the others within 4 (gelu and phi lose digits in their
// lower tails, below 1e-4). Infinities and NaN as in libm, subnormal results where the exact one is. The polynomials
// are weighted least-squares fits (minimax within a few percent) made for this file.
#pragma once
#include <math.h>

#include "simd/simd.h"

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
  return vf_with_sign(vf_if_lt(vf_abs(x), vf_set1(0.3465735f), small, vf_exp(x) - vf_set1(1.0f)), x); // -0 too
}

// e^x - 1 - x, without cancellation near 0.
PG_INLINE vf vf_expm1_rest(vf x) {
  return vf_if_lt(vf_abs(x), vf_set1(0.3465735f), x * x * vf_exp_q(x), vf_exp(x) - vf_set1(1.0f) - x);
}

// log(1 + f) - f for 1 + f within sqrt(1/2) .. sqrt(2): with s = f / (2 + f) it is -s (f - r), r = log(1 + f) / s - 2.
PG_INLINE vf vf_log1p_rest(vf f) {
  const vf s = f / (f + vf_set1(2.0f)), z = s * s;
  vf r = vf_fma(z, vf_set1(0.2987079620361328f), vf_set1(0.39977583289146423f));
  r = vf_fma(r, z, vf_set1(0.6666677594184875f));
  return s * vf_fma(r, z, -f);
}

// The natural logarithm: NaN below 0, -inf at 0.
PG_INLINE vf vf_log(vf x) {
  const vf a = vf_abs(x), least = vf_set1(0x1p-126f);
  const vf m = vf_if_lt(a, least, a * vf_set1(0x1p23f), a), e0 = vf_if_lt(a, least, vf_set1(-23.0f), vf_zero());
  const vbits up = ((vbits)m - 0x3f3504f3) >> 23; // m = 2^up (1 + f), 1 + f from sqrt(1/2) on
  const vf f = (vf)((vbits)m - (up << 23)) - vf_set1(1.0f), e = __builtin_convertvector(up, vf) + e0;
  const vf low = vf_fma(e, vf_set1(-2.12194440e-4f), vf_log1p_rest(f)); // ln 2 in two parts, as in vf_exp_parts
  const vf log = vf_fma(e, vf_set1(0.693359375f), f + low);
  const vf none = vf_if_lt(a, vf_set1(0x1p-149f), vf_set1(-INFINITY), vf_set1(NAN));
  return vf_if_lt(vf_zero(), x, vf_if_lt(x, vf_set1(INFINITY), log, x), none);
}

// log(1 + e^x)
PG_INLINE vf vf_softplus(vf x) {
  const vf t = vf_exp(-vf_abs(x)), one = vf_set1(1.0f), bound = vf_set1(0.41421356f);
  const vf f = vf_if_lt(t, bound, t, (t - one) * vf_set1(0.5f)); // 1 + t is 1 + f, or twice that
  const vf log = f + vf_log1p_rest(f) + vf_if_lt(t, bound, vf_zero(), vf_set1(0.69314718056f));
  return vf_max(vf_zero(), x) + log;
}

// What vf_sin_turned leaves to libm: lanes whose angle has more quarter turns than it can take off.
static __attribute__((noinline)) void vf_sin_far(float *y, const float *x, int cosine) {
  for (int i = 0; i < VF_N; i++)
    if (fabsf(x[i]) > 1e5f) y[i] = cosine ? cosf(x[i]) : sinf(x[i]);
}

// sin(x), or cos(x) = sin(x + a quarter turn).
PG_INLINE vf vf_sin_turned(vf x, int cosine) {
  const vf a = vf_abs(x), magic = vf_set1(0x1.8p23f), far = vf_set1(1e5f);
  const vf t = vf_fma(a, vf_set1(0.63661977236758134f), magic), n = t - magic;
  vf r = vf_fma1(n, vf_set1(-0x1.921fb6p+0f), a); // pi / 2 in three parts; the first difference is exact
  r = vf_fma1(n, vf_set1(0x1.777a5cp-25f), r);
  r = vf_fma1(n, vf_set1(0x1.ee59dap-50f), r);
  const vf z = r * r;
  vf s = vf_fma(z, vf_set1(-0.00019518620683811605f), vf_set1(0.008332191035151482f));
  s = vf_fma(s, z, vf_set1(-0.16666655242443085f));
  s = vf_fma(s, r * z, r);
  vf c = vf_fma(z, vf_set1(2.443066841806285e-05f), vf_set1(-0.00138873013202101f));
  c = vf_fma(c, z, vf_set1(0.04166664555668831f));
  c = vf_fma(c, z * z, vf_fma(z, vf_set1(-0.5f), vf_set1(1.0f)));
  const vbits turns = (vbits)t + cosine;
  const vbits flip = (turns << 30) ^ (cosine ? (vbits)vf_zero() : (vbits)x);
  vf y = (vf)((vbits)vf_pick(-(turns & 1), c, s) ^ (flip & (vbits)vf_set1(-0.0f)));
  if (vf_any_lt(far, a)) {
    float lanes[VF_N], angles[VF_N];
    vf_store(lanes, y);
    vf_store(angles, x);
    vf_sin_far(lanes, angles, cosine);
    y = vf_load(lanes);
  }
  return y;
}

PG_INLINE vf vf_sin(vf x) { return vf_sin_turned(x, 0); }
PG_INLINE vf vf_cos(vf x) { return vf_sin_turned(x, 1); }

// To the nearest integer, halves away from zero: of the numbers below one half, the largest is added.
PG_INLINE vf vf_round_away(vf x) { return vf_trunc(x + vf_with_sign(vf_set1(0x1.fffffep-2f), x)); }

// 1 / (1 + e^-x), from e^-|x|, which cannot overflow.
PG_INLINE vf vf_sigmoid(vf x) {
  const vf one = vf_set1(1.0f), e = vf_exp(-vf_abs(x));
  return vf_if_lt(x, vf_zero(), e, one) / (one + e);
}

PG_INLINE vf vf_silu(vf x) { return x * vf_sigmoid(x); }

// Bounds are the first operands, so that NaN stays.
PG_INLINE vf vf_below(vf x, float limit) { return vf_min(vf_set1(limit), x); }
PG_INLINE vf vf_within(vf x, float limit) { return vf_max(vf_set1(-limit), vf_below(x, limit)); }

PG_INLINE vf vf_swiglu_oai(vf g, vf u, float alpha, float limit) {
  const vf x = vf_below(g, limit);
  return x * vf_sigmoid(x * vf_set1(alpha)) * (vf_within(u, limit) + vf_set1(1.0f));
}

PG_INLINE vf vf_tanh(vf x) {
  const vf z = x * x, a = vf_abs(x), one = vf_set1(1.0f);
  vf p = vf_fma(z, vf_set1(-0.005717045161873102f), vf_set1(0.02065058797597885f));
  p = vf_fma(p, z, vf_set1(-0.05374349653720856f));
  p = vf_fma(p, z, vf_set1(0.13331490755081177f));
  p = vf_fma(p, z, vf_set1(-0.3333328366279602f));
  const vf small = vf_fma(x * z, p, x);
  const vf large = one - vf_set1(2.0f) / (vf_exp(a + a) + one);
  return vf_with_sign(vf_if_lt(a, vf_set1(0.625f), small, large), x);
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
