"""DoRA adapters (arXiv 2402.09353): the rows of W + scale * B A are given lengths of their own, the magnitudes.

A row becomes magnitude * (W + scale * B A) / norm, where norm is the length of the row of W + scale * B A. The norms
follow from small products: with row w of W, b of B and s the scale, norm^2 = w w' + 2 s b (A w') + s^2 b (A A') b'.
"""

from __future__ import annotations

import numpy as np

from pyggml import ops
from pyggml.backends.quantize import dequantize
from pyggml.tensor import Tensor
from pyggml.types import Floats

_ELEMENTS = 1 << 22  # that are in memory as F32 at a time


def row_squares(weight: Tensor) -> Floats:
    """The sum of squares of each row of a weight of any type: float32 [n_out], of experts [n_expert, n_out]."""
    n_in = weight.ne[0]
    stored = np.frombuffer(weight.tobytes(), np.uint8).reshape(-1, weight.dtype.row_size(n_in))
    step = max(1, _ELEMENTS // n_in)
    parts = [dequantize(stored[i : i + step], weight.dtype) for i in range(0, len(stored), step)]
    return (
        np.concatenate([np.einsum("ij,ij->i", x, x, dtype=np.float64) for x in parts])
        .astype(np.float32)
        .reshape(weight.shape[:-1])
    )


def norms(weight: Tensor, squares: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Record the norms of the rows of weight + scale * b a.

    weight   ne [n_in, n_out], of experts [n_in, n_out, n_expert]
    squares  its `row_squares`, F32 ne [n_out] or [n_out, n_expert]
    a, b     ne [n_in, r] and [r, n_out], of experts with a third dimension
    scale    F32 ne [1]

    Result: F32, of the ne of squares.
    """
    cross = ops.mul(ops.cont(ops.transpose(ops.mul_mat(weight, a))), b)
    own = ops.mul(ops.mul_mat(ops.mul_mat(a, a), b), b)
    linear, square = (ops.sum_rows(t).reshape(squares.shape) for t in (cross, own))
    more = ops.mul(ops.add(ops.scale(linear, 2.0), ops.mul(square, scale)), scale)
    return ops.sqrt(ops.add(squares, more))
