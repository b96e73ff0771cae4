"""`WeightedGraph`: a graph in the making that asks for its weights as it grows. Decoders and towers are built on it."""

from __future__ import annotations

from pyggml import ops as gg
from pyggml.graph import Graph
from pyggml.tensor import Context, Tensor

from ..hparams import NormKind
from ..names import tensor_name
from ..weights import TensorSpec, Weights


class WeightedGraph:
    """One graph in the making, and the tensors that it reads. Asking for a tensor declares it: what a builder asks for
    is what a file must or may have.

    weights   the tensors that `weight`, `optional` and `linear` ask for; it notes which were asked for
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.ctx = Context()
        self.graph = Graph()

    def norm_eps(self, kind: NormKind) -> float:
        """The epsilon of the model's norms of that kind."""
        raise NotImplementedError

    def cb(self, t: Tensor, name: str, il: int = -1) -> Tensor:
        """Name a node as llama.cpp does: `Qcur-0` in a layer, `result_norm` outside of one."""
        t.name = name if il < 0 else f"{name}-{il}"
        return t

    def name(self, role: str, il: int, suffix: str = "weight") -> str:
        """The name of the tensor of that role (of layer `il`) in a file."""
        return tensor_name(role, il, suffix)

    def weight(self, role: str, ne: tuple[int, ...], il: int = -1, suffix: str = "weight") -> Tensor:
        """The weight of that role (of layer `il`), which a model must have.

        Raises ModelError when it is missing or has another shape.
        """
        spec = TensorSpec(self.name(role, il, suffix), ne)
        t = self.weights.ask(spec)
        assert t is not None, spec  # or `ask` had raised
        return t

    def optional(self, role: str, ne: tuple[int, ...], il: int = -1, suffix: str = "weight") -> Tensor | None:
        """The weight (or bias) of that role, or None when the model has none. Raises ModelError for another shape."""
        return self.weights.ask(TensorSpec(self.name(role, il, suffix), ne, True))

    def n_out(self, role: str, choices: tuple[int, ...], il: int = -1) -> int:
        """How many rows the weight of that role has: one of `choices`. The first of them when the model has no such
        weight, or one with another number of rows: asking for the weight then raises."""
        ne = self.weights.ne(self.name(role, il))
        return ne[1] if ne is not None and ne[1] in choices else choices[0]

    def mul_mat(self, w: Tensor, cur: Tensor) -> Tensor:
        """w @ cur."""
        return gg.mul_mat(w, cur)

    def linear(self, role: str, cur: Tensor, n_out: int, name: str, il: int = -1, *, bias: bool = True) -> Tensor:
        """weight @ cur, with a weight of ne [cur.ne[0], n_out], plus the bias when the model has one: ne
        [n_out, n_tokens]. Both nodes are called `name`. With `bias` false, a bias that the model has is not added."""
        cur = self.cb(self.mul_mat(self.weight(role, (cur.ne[0], n_out), il), cur), name, il)
        b = self.optional(role, (n_out,), il, "bias")
        return cur if b is None or not bias else self.cb(gg.add(cur, b), name, il)
