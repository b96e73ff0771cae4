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

# Columns beyond which a product of floats that may be rounded converts them, by level; the other levels never do.
# So bits of mul_mat depend on their number where there are tiles, and nowhere else (docs/company.md).
ROUND_BEYOND = {
    "mul_mat": {"amx": 32},
    "out_prod": {"avx2": 255, "avx512vnni": 96, "amx": 32},
}
# The same for floats in the fast form: both operands become 16-bit fixed point (csrc/products/gemm/fixed.h).
FAST_BEYOND = {"avx2": 32, "avx512vnni": 32}
LEAST_FAST = 128  # elements of a row that are worth it
# Columns beyond which a product of floats that may not be rounded multiplies three parts of each, if there are tiles.
_SPLIT_BEYOND = {DType.F16: 31, DType.BF16: 11}


def choose(isa: str, node: Tensor) -> tuple[Kernel, Buffer | None] | None:
    """How `node` is computed at this level, when it is a product in a way of the CPU's own: its kernel, and the copy of
    the weights that it reads (None: as they are stored). The form of the weights and the columns decide.

    None for all other nodes: the kernel of their op computes them (`kernel_of`). So it does when the columns follow
    from a Var, and some of its values would have another way.
    """
    a = weights_of(node)
    if a is None:
        return None
    form, columns = a.form, node.n_rows
    if form.copy is not None:
        way = "_r16"
    elif form.name == IN_PASSING.name:
        way = "_stored"
    elif _is_fast(isa, node, a):
        way = "_half"
    elif node.op == "mul_mat_id" or not is_float_matrix(a):
        return None
    elif form.name == ROUNDED.name and bounds(columns)[0] > ROUND_BEYOND[node.op].get(isa, sys.maxsize):
        way = "_half"
    elif bounds(columns)[0] > _SPLIT_BEYOND[a.dtype]:
        way = "_exact"
    else:
        return None
    kernel = None
    if form.fast and isa != "amx" and way in ("_r16", "_stored"):  # nothing is faster than tiles
        kernel = kernel_of(isa, node, f"{way}_fast")
    if kernel is None:
        kernel = kernel_of(isa, node, way)
    return None if kernel is None else (kernel, form.copy)


def _is_fast(isa: str, node: Tensor, a: Tensor) -> bool:
    """Whether `node` rounds the matrix `a` of F16 or BF16 because its form is fast."""
    if not a.form.fast or a.dtype not in (DType.F16, DType.BF16) or node.op != "mul_mat" or isa not in FAST_BEYOND:
        return False
    fits = a.is_contiguous and a.ne[2] == a.ne[3] == 1 and bounds(a.ne[0])[0] >= LEAST_FAST
    return fits and bounds(node.n_rows)[0] > FAST_BEYOND[isa]


def is_float_matrix(t: Tensor) -> bool:
    """Whether `t` is a matrix of F16 or BF16 whose rows are whole units of csrc/products/gemm."""
    return t.dtype in (DType.F16, DType.BF16) and divides(32, t.ne[0]) and t.ne[2] == t.ne[3] == 1
