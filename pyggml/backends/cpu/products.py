"""How a matrix product is computed: which kernel, and what it reads of its weights. docs/products.md has all ways."""

from __future__ import annotations

import sys

from ...buffers.buffer import Buffer
from ...dtypes import DType
from ...form import IN_PASSING, ROUNDED
from ...ops.matmul import weights_of
from ...tensor import Tensor
from ...var import bounds, divides
from .isa import Kernel, kernel_of

# Columns beyond which a gradient of floats that may be rounded (ROUNDED) converts them, by level; the others never do.
ROUND_BEYOND = {"avx2": 255, "avx512vnni": 96, "amx": 96}
# Columns beyond which a product of floats in the fast form converts them: to 16-bit fixed point
# (csrc/products/gemm/halves.c), or to bf16 where there are tiles (bf16.h).
FAST_BEYOND = {"avx2": 0, "avx512vnni": 0, "amx": 32}
LEAST_FAST = 128  # elements of a row that are worth it
# Types whose columns stay exact in the fast form, because rounding them makes no product faster: AVX2 adds products of
# bytes in 16 bits, and two products of these codes do not fit (r16_summed_quartets in csrc/products/gemm/int8.h).
NOT_FASTER = {"avx2": (DType.Q8_0, DType.IQ4_NL, DType.IQ4_XS)}


def choose(isa: str, node: Tensor) -> tuple[Kernel, Buffer | None] | None:
    """How `node` is computed at this level, when it is a product in a way of the CPU's own: its kernel, and the copy of
    the weights that it reads (None: as they are stored). The form of the weights and the columns decide.

    None for all other nodes: the kernel of their op computes them (`kernel_of`). So it does when the columns follow
    from a Var, and some of its values would have another way.
    """
    a = weights_of(node)
    if a is None:
        return None
    form = a.form
    if form.copy is not None:
        way = "_r16"
    elif form.name == IN_PASSING.name:
        way = "_stored"
    elif _is_fast(isa, node, a) or _is_rounded(isa, node, a):
        way = "_half"
    else:
        return None
    kernel = None
    if form.fast and way in ("_r16", "_stored") and a.dtype not in NOT_FASTER.get(isa, ()):
        kernel = kernel_of(isa, node, f"{way}_fast")
    if kernel is None:
        kernel = kernel_of(isa, node, way)
    return None if kernel is None else (kernel, form.copy)


def fusible(isa: str, node: Tensor) -> Kernel | None:
    """The kernel of `node`, when it is a product in a way that also computes with what is around it: those of
    csrc/products/r16/mul_mat_r16.c."""
    found = choose(isa, node)
    return None if found is None else found[0]


def _is_fast(isa: str, node: Tensor, a: Tensor) -> bool:
    """Whether `node` rounds the matrix `a` of F16 or BF16, and its columns, because its form was made fast."""
    if not a.form.fast or node.op != "mul_mat" or isa not in FAST_BEYOND or a.dtype not in (DType.F16, DType.BF16):
        return False
    fits = a.is_contiguous and a.ne[2] == a.ne[3] == 1 and bounds(a.ne[0])[0] >= LEAST_FAST
    if isa == "amx" and not divides(32, a.ne[0]):  # bf16.h takes whole units
        return False
    return fits and bounds(node.n_rows)[0] > FAST_BEYOND[isa]


def _is_rounded(isa: str, node: Tensor, a: Tensor) -> bool:
    """Whether `node` is a gradient that rounds the matrix `a` of F16 or BF16."""
    fits = node.op == "out_prod" and a.form.name == ROUNDED.name and is_float_matrix(a)
    return fits and bounds(node.n_rows)[0] > ROUND_BEYOND.get(isa, sys.maxsize)


def is_float_matrix(t: Tensor) -> bool:
    """Whether `t` is a matrix of F16 or BF16 whose rows are whole units of csrc/products/gemm."""
    return t.dtype in (DType.F16, DType.BF16) and divides(32, t.ne[0]) and t.ne[2] == t.ne[3] == 1
