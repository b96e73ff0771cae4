"""Clipping: gradients that are large together are made smaller before a step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import numpy as np

from pyggml import ops
from pyggml.tensor import Context, Tensor

_TINY = 1e-6  # added to the norm


def norm_of(gradients: Mapping[Tensor, Tensor]) -> Tensor:
    """The norm of all elements of all gradients, one number."""
    return ops.sqrt(reduce(ops.add, (ops.sum(ops.sqr(g)) for g in gradients.values()))).set_name(
        "norm of the gradients"
    )


def clipped(ctx: Context, gradients: Mapping[Tensor, Tensor], norm: Tensor, clip: float) -> dict[Tensor, Tensor]:
    """The gradients times min(1, clip / (norm + 1e-6)), so that their norm is at most `clip`."""
    most = ctx.from_numpy(np.array([clip], np.float32), name="clip")
    factor = ops.clamp(ops.div(most, ops.scale_bias(norm, 1.0, _TINY)), 0.0, 1.0)
    return {w: ops.mul(g, factor) for w, g in gradients.items()}
