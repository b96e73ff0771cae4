"""How the weights of a model follow from what its checkpoint has: parameters are what the checkpoint has.

A GGUF file holds its weights as graphs read them. When a Hugging Face folder is loaded, some weights are computed: from
logarithms, with factors of the config folded in. Training those instead would follow another curve than the checkpoint.
Where elements lie makes no difference to training, so parameters lie as in a GGUF.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pyggml import ops
from pyggml.hf.folder import HFFolder
from pyggml.hf.moves import Value
from pyggml.models.names import tensor_name
from pyggml.tensor import Context, Tensor
from pyggml.types import Floats

NUMBERS = ("xielu.alpha_n", "xielu.alpha_p")  # keys of the metadata with a number for each layer that is trained
MADE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # follow from hyperparameters


def role_of(name: str) -> str:
    """The role of a weight: `attn_q` of `blk.3.attn_q.weight`, and of `enc.blk.3.attn_q.weight`."""
    role = name.removesuffix(".weight")
    if role.startswith(("enc.blk.", "dec.blk.")):
        role = role[4:]
    return role.split(".", 2)[2] if role.startswith("blk.") else role


class Origin(NamedTuple):
    """How a weight follows from a parameter.

    key     weights of one key are one parameter (embeddings that are the output's, too)
    values  changes of the elements, one after the other
    scale   F32 [rows or 1, columns or 1]: what is multiplied at last; None: nothing
    """

    key: Hashable
    values: Sequence[Value] = ()
    scale: Floats | None = None

    def parameter(self, weight: Floats) -> Floats:
        """The values of the parameter, of those of the weight."""
        if self.scale is not None:
            weight = weight / self.scale
        for value in reversed(self.values):
            weight = value.back(weight)
        return weight

    def weight(self, ctx: Context, parameter: Tensor) -> Tensor:
        """Record the weight that follows from a parameter."""
        t = parameter
        for value in self.values:
            t = value.record(t)
        return self.scaled(ctx, t)

    def scaled(self, ctx: Context, t: Tensor) -> Tensor:
        """Record the rows of `t` (of the weight's rows, of any length) multiplied with `scale`."""
        return t if self.scale is None else ops.mul(t, ctx.from_numpy(np.asarray(self.scale, np.float32)))


def numbers_of(kv: Mapping[str, Any]) -> dict[str, Floats]:
    """The numbers of the metadata that are trained, float32 [1], by the names of the tensors that graphs then have."""
    found = {key: np.asarray(kv[key], np.float32).reshape(-1, 1) for key in NUMBERS if key in kv}
    return {tensor_name(key, il, ""): row for key, rows in found.items() for il, row in enumerate(rows)}


def origin_of(folder: HFFolder | None, name: str) -> Origin | None:
    """The origin of the weight of that name in a folder, or in a file (None). None: it is no parameter; it follows from
    hyperparameters, or is never trained."""
    if folder is None:
        return None if name in MADE else Origin(name)
    t = folder.tensors[name]
    if t.array is not None or role_of(name) in folder.family.untrained:
        return None
    key = tuple((p.source.file.path, p.source.offset, p.pick) for p in t.parts)
    values = [step for step in t.parts[0].steps if isinstance(step, Value)]
    return Origin(key, values, t.scale)
