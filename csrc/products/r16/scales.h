// The scales of codes: w = scale * (code - offset) + shift. Lanes are VF_N rows.
#pragma once
#include "products/r16/vec.h"

// Scale and shift for the rows of a part: for one half of a unit (in formats with scales per 16), or for all of it.
typedef struct r16_line {
  vf scale, shift;
} r16_line;

PG_INLINE r16_line r16_line_of(r16_format f, const uint8_t *head, const uint8_t *scales, int part, int half) {
  const vf d = r16_head_bytes(f) ? vf_mul(vf_load_f16(head + part * VF_N * 2), vf_set1(f.factor)) : vf_zero();
  const vf m = r16_head_bytes(f) == 64 ? vf_load_f16(head + 32 + part * VF_N * 2) : vf_zero();
  const uint8_t *u = scales + part * VF_N, *h = u + half * R16_ROWS;
  r16_line l;
  l.shift = vf_zero();
  switch (f.scales) {
  case R16_D:
    l.scale = d;
    break;
  case R16_D_M:
    l.scale = d;
    l.shift = m;
    break;
  case R16_E8M0:
    l.scale = vf_scale2(vf_set1(1.0f), vf_load_i8((const int8_t *)u));
    break;
  case R16_D_S32:
    l.scale = vf_mul(d, vf_load_i8((const int8_t *)u));
    break;
  case R16_E4M3:
    l.scale = vf_mul(vf_load_e4m3(h), vf_set1(f.factor));
    break;
  case R16_D_S16:
    l.scale = vf_mul(d, vf_load_i8((const int8_t *)h));
    break;
  case R16_DM_SM32:
    l.scale = vf_mul(d, vf_load_i8((const int8_t *)u));
    l.shift = vf_sub(vf_zero(), vf_mul(m, vf_load_i8((const int8_t *)u + R16_ROWS)));
    break;
  default:
    l.scale = vf_mul(d, vf_load_u4(h, 0));
    l.shift = vf_sub(vf_zero(), vf_mul(m, vf_load_u4(h, 1)));
  }
  return l;
}
