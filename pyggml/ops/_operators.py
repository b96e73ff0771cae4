"""`+ - * / @` on tensors."""

from __future__ import annotations

from ..tensor import Tensor
from .binary import add, div, mul, sub
from .copy import cont
from .matmul import mul_mat
from .scalar import scale, scale_bias
from .view import transpose

_TENSOR_OPS = {"+": add, "-": sub, "*": mul, "/": div}


class _Operators:
    def binary(self, symbol: str, a: Tensor, b: Tensor | float, swapped: bool) -> Tensor:
        if isinstance(b, Tensor):
            return mul_mat(cont(transpose(b)), a) if symbol == "@" else _TENSOR_OPS[symbol](a, b)
        if symbol == "*":
            return scale(a, b)
        if symbol == "/":
            return scale(a, 1.0 / b)
        if symbol == "-":
            return scale_bias(a, -1.0, b) if swapped else scale_bias(a, 1.0, -b)
        return scale_bias(a, 1.0, b)


Tensor.operators = _Operators()
