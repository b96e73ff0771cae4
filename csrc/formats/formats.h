// The block formats: X(GGUF's name, the name in C, elements of a block, bytes of a block, offsets of d and m in it). d
// and m are scales in F16. A d < 0 means that iq1_m_d assembles it; 0, 0 stand for a format without either.
#pragma once

// clang-format off
#define BLOCK_FORMATS(X)              \
  X(Q4_0, q4_0, 32, 18, 0, 0)         \
  X(Q4_1, q4_1, 32, 20, 0, 2)         \
  X(Q5_0, q5_0, 32, 22, 0, 0)         \
  X(Q5_1, q5_1, 32, 24, 0, 2)         \
  X(Q8_0, q8_0, 32, 34, 0, 0)         \
  X(Q2_K, q2_k, 256, 84, 80, 82)      \
  X(Q3_K, q3_k, 256, 110, 108, 0)     \
  X(Q4_K, q4_k, 256, 144, 0, 2)       \
  X(Q5_K, q5_k, 256, 176, 0, 2)       \
  X(Q6_K, q6_k, 256, 210, 208, 0)     \
  X(IQ1_S, iq1_s, 256, 50, 0, 0)      \
  X(IQ1_M, iq1_m, 256, 56, -1, 0)     \
  X(IQ2_XXS, iq2_xxs, 256, 66, 0, 0)  \
  X(IQ2_XS, iq2_xs, 256, 74, 0, 0)    \
  X(IQ2_S, iq2_s, 256, 82, 0, 0)      \
  X(IQ3_XXS, iq3_xxs, 256, 98, 0, 0)  \
  X(IQ3_S, iq3_s, 256, 110, 0, 0)     \
  X(IQ4_NL, iq4_nl, 32, 18, 0, 0)     \
  X(IQ4_XS, iq4_xs, 256, 136, 0, 0)   \
  X(MXFP4, mxfp4, 32, 17, 0, 0)       \
  X(NVFP4, nvfp4, 64, 36, 0, 0)       \
  X(TQ1_0, tq1_0, 256, 54, 52, 0)     \
  X(TQ2_0, tq2_0, 256, 66, 64, 0)
// clang-format on
