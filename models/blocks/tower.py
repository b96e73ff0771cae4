"""`TowerBuild`: the graph of a tower in the making, the first argument of every block of towers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pyggml.dtypes import DType
from pyggml.tensor import Tensor

from ..hparams import NormKind
from ..weights import Weights
from .weighted import WeightedGraph

if TYPE_CHECKING:
    from ..towers.hparams import TowerHParams

T_co = TypeVar("T_co", bound="TowerHParams", covariant=True)


class TowerSize(NamedTuple):
    """What distinguishes one graph of a tower from another: `n` pictures (or tiles of one) of `h` rows of `w` patches.
    Of sounds: h is 1, w the number of frames."""

    n: int
    h: int
    w: int


def _no_one(name: str) -> bool:
    return False


class TowerBuild(WeightedGraph, Generic[T_co]):
    """One graph of a tower in the making.

    side       what the roles of its weights begin with: `v` of a tower that sees, `a` of one that hears
    size       the pictures of the graph
    given      inputs that whoever runs the graph sets, by name
    constants  inputs whose values follow from the size alone (positions, order), and these values
    results    nodes whose values whoever runs the graph wants, by name
    asked      tells whether anyone will look at the node with this name
    in_pieces  tokens of a large picture may go through a layer in pieces; false when anyone looks at nodes of layers
    """

    def __init__(self, hparams: T_co, weights: Weights, side: str, size: TowerSize) -> None:
        super().__init__(weights)
        self.hparams, self.side, self.size = hparams, side, size
        self.given: dict[str, Tensor] = {}
        self.constants: dict[str, tuple[Tensor, npt.NDArray[Any]]] = {}
        self.results: dict[str, Tensor] = {}
        self.asked: Callable[[str], bool] = _no_one
        self.in_pieces = True

    @property
    def n_patches(self) -> int:
        """Patches of one picture."""
        return self.size.h * self.size.w

    def norm_eps(self, kind: NormKind) -> float:
        """See `WeightedGraph`."""
        return self.hparams.eps

    def own(self, role: str) -> str:
        """A role with the tower's side before it: `attn_q` -> `v.attn_q`."""
        return f"{self.side}.{role}"

    def input(self, name: str, ne: tuple[int, ...], dtype: DType = DType.F32) -> Tensor:
        """An input that whoever runs the graph sets; made when it is first asked for."""
        if name not in self.given:
            self.given[name] = self.ctx.new_tensor(dtype, ne, name).set_input()
        return self.given[name]

    def constant(self, name: str, values: Callable[[], npt.NDArray[Any]]) -> Tensor:
        """A leaf with values that follow from the size of the graph. `values` gives them in NumPy order, float32 or
        int32, when the leaf is first asked for."""
        if name not in self.constants:
            array = np.ascontiguousarray(values())
            dtype = DType.I32 if array.dtype.kind == "i" else DType.F32
            leaf = self.ctx.new_tensor(dtype, array.shape[::-1], name).set_input()
            self.constants[name] = leaf, array.astype(np.int32 if dtype is DType.I32 else np.float32)
        return self.constants[name][0]

    def result(self, name: str, t: Tensor) -> Tensor:
        """A node that whoever runs the graph wants, such as `features`; it is in the graph from now on."""
        self.graph.build_forward_expand(t.set_output())
        self.results[name] = self.cb(t, f"result_{name}")
        return t
