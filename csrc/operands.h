// The operands of kernels that compute several nodes together: the numbers of their sources (in pg_task.src) and of
// their parameters (in pg_task.param). Python reads these names from this file, and fills the operands in
// (pyggml/backends/cpu/fusions). When the kernel also computes a single op, the op's own operands come first, in their
// order.
#pragma once

// norm and rms_norm. May be absent: the weight (a row), and the operand that is added to the result (a row, or as many
// rows as the norm has).
enum { PG_NORM_X, PG_NORM_WEIGHT, PG_NORM_ADDED };
enum { PG_NORM_EPS }; // parameters

// Gated units, such as swiglu. When the value is absent, the halves of each row of the gate are gate and value.
enum { PG_GLU_GATE, PG_GLU_UP };

// rope. May be absent: factors, and the weight of a norm before the rope. The norm's eps follows the op's own
// parameters.
enum { PG_ROPE_X, PG_ROPE_POSITIONS, PG_ROPE_FACTORS, PG_ROPE_WEIGHT };
enum { PG_ROPE_EPS = 13 };

// attn_vt: mul_mat(v, soft_max(mul_mat(k, q))). May be absent: mask, sinks.
enum { PG_ATTN_K, PG_ATTN_Q, PG_ATTN_V, PG_ATTN_MASK, PG_ATTN_SINKS };
enum {
  PG_ATTN_SCALE,
  PG_ATTN_MAX_BIAS,
  PG_ATTN_MERGED, // not 0: dst is permute(.., 0, 2, 1, 3) of that, dense
  PG_ATTN_CAP,    // not 0: soft_max of tanh(cap * k q)
  PG_ATTN_IN_ROWS // not 0: v is not transposed
};

// experts_sum. May be absent: a weight for each row, and the operand that is added to the sum.
enum { PG_EXPERTS_ROWS, PG_EXPERTS_WEIGHTS, PG_EXPERTS_ADDED };

// Recurrences that read and store their states in cells. After the op's own sources come: the cells that sequences
// begin with (when the op has no such source); all cells, a row each; and the cells that the new states go to.
enum { PG_READ = 9, PG_CELLS, PG_WRITE };

// conv_state: a convolution of x and of the tokens before it, which such cells (from FROM on) hold. May be absent:
// bias.
enum { PG_CONV_X, PG_CONV_WEIGHTS, PG_CONV_BIAS, PG_CONV_FROM };
enum { PG_CONV_SILU };         // not 0: silu of the result
enum { PG_CONV_MAX_TAPS = 8 }; // ne[0] of the weights, at most

// mul_mat and mul_mat_id of repacked weights, or of stored ones. May be absent: ids (mul_mat has none); the weight of a
// norm of the columns; up to two more matrices that are multiplied with the same columns, each with its result; a bias
// for each matrix (BIAS: of the first one); and the operand that is added to the product. When the result is a gated
// unit, the second matrix has no result of its own. Products by expert have the weights of all experts, their biases,
// and at most a second matrix for a gated unit.
enum {
  PG_MM_WEIGHTS,
  PG_MM_COLUMNS,
  PG_MM_IDS,
  PG_MM_NORM,
  PG_MM_WEIGHTS_1,
  PG_MM_RESULT_1,
  PG_MM_WEIGHTS_2,
  PG_MM_RESULT_2,
  PG_MM_BIAS,
  PG_MM_ADDED = 11
};
enum { PG_MM_MAX = 3 };                                    // matrices, at most
enum { PG_MM_STORE, PG_MM_EPS, PG_MM_ALPHA, PG_MM_LIMIT }; // parameters. STORE: enum r16_store

// How a product v is stored, after its bias is added: y = v, y = other + v, or y = a gated unit of other and v.
enum r16_store { R16_STORE, R16_ADD, R16_SWIGLU, R16_GEGLU, R16_REGLU, R16_SWIGLU_OAI };
