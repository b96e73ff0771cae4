"""Dropout: random elements are set to zero while a model learns, so that it cannot lean on single ones
(arXiv 1207.0580)."""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np

from pyggml import ops
from pyggml.dtypes import DType
from pyggml.models.blocks import Adapters
from pyggml.tensor import Tensor, allocate_tensors

from .checkpoint import role_of

_STEPS = 1 << 16  # shares are rounded to multiples of one part of so many
# Weights whose products are added to the residual stream
_ADDED = (
    "attn_output",
    "attn_o",
    "cross_attn_o",
    "ffn_down*",
    "ssm_out",
    "shortconv.outproj",
    "time_mix_output",
    "channel_mix_value",
)


class Dropout(Adapters):
    """Adapters with which graphs set about a share `p` of the elements of some tensors to zero, and divide the others
    by 1 - p. Without low-rank products these are the token embeddings and what attention and networks add to the
    residual stream; with them it is what their first matrices read, as in the PEFT library.

    Each graph has its own masks: inputs, which `fill` sets.
    """

    def __init__(self, adapters: Adapters, p: float) -> None:
        super().__init__(adapters.low_rank, adapters.control)
        self._least = round(p * _STEPS)
        self._masks: list[Tensor] = []

    def product(self, out: Tensor, weight: str, cur: Tensor, ids: Tensor | None = None) -> Tensor:
        """See `Adapters`."""
        if self.low_rank:
            cur = self._dropped(cur, weight) if weight in self.low_rank else cur
            return super().product(out, weight, cur, ids)
        return self._dropped(out, weight) if any(fnmatchcase(role_of(weight), role) for role in _ADDED) else out

    def rows(self, out: Tensor, weight: str, ids: Tensor) -> Tensor:
        """See `Adapters`."""
        if self.low_rank:
            return super().rows(out, weight, ids)
        return self._dropped(out, weight) if role_of(weight) == "token_embd" else out

    def fill(self, seed: int, step: int, part: int = 0) -> None:
        """Draw the masks of a part of a step's batch. They follow from these numbers alone."""
        rng = np.random.Generator(np.random.SFC64((seed, step, part)))
        for mask in self._masks:
            drawn = np.frombuffer(rng.bytes(2 * mask.n_elements), np.uint16).reshape(mask.shape)
            np.multiply(drawn >= self._least, np.float32(_STEPS / (_STEPS - self._least)), out=mask.numpy())

    def _dropped(self, t: Tensor, weight: str) -> Tensor:
        mask = t.ctx.new_tensor(DType.F32, t.ne, f"{weight} (dropout)").set_input()
        allocate_tensors([mask], "CPU")
        self._masks.append(mask)
        return ops.mul(t, mask)
