"""What adapters add to a graph: a product of low rank to the product with a weight, and vectors to the residual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pyggml import ops as gg
from pyggml.tensor import Tensor


class LowRank(NamedTuple):
    """What a LoRA adapter adds to the product of a weight of ne [k, m]: b @ (scale * (a @ cur)).

    a has ne [k, rank], b ne [rank, m]; for the weights of experts both have the third dimension of the weight. For
    token embeddings a has ne [rank, n_vocab] and its rows are looked up; b has ne [rank, n_embd]. scale: F32, ne [1],
    read when graphs run. gain: F32, ne [m] (of experts [m, n_expert]): the rows of the product of the changed weight
    are multiplied with it (DoRA, see `pyggml.llm.adapters.dora`).
    """

    a: Tensor
    b: Tensor
    scale: Tensor
    gain: Tensor | None = None


class Adapters:
    """The adapters that a graph is built with. Graphs that are built with the same object can replace each other.

    low_rank  by the name of the weight (`output.weight` also when the model uses its embeddings instead)
    control   by layer: the vector that is added to the layer's output, F32 ne [n_embd]
    """

    def __init__(self, low_rank: Mapping[str, Sequence[LowRank]], control: Mapping[int, Tensor]) -> None:
        self.low_rank, self.control = low_rank, control

    def product(self, out: Tensor, weight: str, cur: Tensor, ids: Tensor | None = None) -> Tensor:
        """`out`, the product of that weight and `cur` (of the experts `ids`, I32 ne [n_used, n_tokens]), plus what
        adapters add."""

        def times(w: Tensor, x: Tensor) -> Tensor:
            return gg.mul_mat(w, x) if ids is None else gg.mul_mat_id(w, x, ids)

        base = out
        for lora in self.low_rank.get(weight, ()):
            down = gg.mul(times(lora.a, cur).set_name(f"{weight} (down)"), lora.scale).set_name(f"{weight} (scaled)")
            up = times(lora.b, down).set_name(f"{weight} (up)")
            if lora.gain is None:
                out = gg.add(out, up).set_name(out.name)
                continue
            gain = lora.gain
            if ids is not None:  # the rows of the experts that are used
                gain = gg.get_rows(gain, ids.reshape(-1)).reshape((*ids.shape, gain.ne[0]))
            changed = gg.mul(gg.add(base, up), gain)
            out = (changed if out is base else gg.add(out, gg.sub(changed, base))).set_name(out.name)
        return out

    def rows(self, out: Tensor, weight: str, ids: Tensor) -> Tensor:
        """`out`, the rows `ids` of that weight, plus what adapters add: ne [n_embd, n_tokens]."""
        for lora in self.low_rank.get(weight, ()):
            down = gg.mul(gg.get_rows(lora.a, ids), lora.scale).set_name(f"{weight} (down)")
            out = gg.add(out, gg.mul_mat(lora.b, down).set_name(f"{weight} (up)"))
        return out


NO_ADAPTERS = Adapters({}, {})
