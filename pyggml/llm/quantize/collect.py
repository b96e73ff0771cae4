"""Measure an importance matrix. For each column of a weight it holds the sum of the squares of the inputs that the
column is multiplied with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.inspect.watch import Watches
from pyggml.tensor import Tensor

from .imatrix import ImatrixSums

if TYPE_CHECKING:
    from typing_extensions import Self

_MIN_ROWS = 16  # products with fewer rows are not counted: they do not evaluate a text
_PRODUCTS = ("mul_mat", "mul_mat_id")


class Collector:
    """Within a `with` block, adds up in `sums` the squares of the rows that a model's graphs multiply its weights with.
    `output`: output.weight counts too.

    Each matrix of an expert counts by itself, with the tokens that are routed to it. Raises ModelError for values that
    are not finite.
    """

    patterns = ("(inputs of weights)",)

    def __init__(self, watches: Watches, sums: ImatrixSums, output: bool = False) -> None:
        self._watches, self.sums, self._output = watches, sums, output

    def asks(self, name: str, last: bool = True) -> bool:
        """See `Watcher.asks`."""
        return False

    def chosen(self, nodes: Sequence[Tensor]) -> Collection[Tensor]:
        """See `Watcher.chosen`. Chooses products and their inputs, because `deliver` reads the inputs."""
        products = [t for t in nodes if self._measures(t)]
        inputs = {s.root for t in products for s in t.src[1:] if s is not None}
        return {*products, *(t for t in nodes if t in inputs)}

    def deliver(self, t: Tensor) -> None:
        """See `Watcher.deliver`."""
        weight, x = t.src[0], t.src[1]
        if not self._measures(t) or weight is None or x is None:
            return
        values = x.elements()
        with np.errstate(over="ignore", invalid="ignore"):
            if t.op == "mul_mat_id":
                assert t.src[2] is not None
                squares, counts = _by_expert(values[0], t.src[2].elements()[0, 0], weight.ne[2])
            else:
                squares, counts = _by_matrix(values, weight.ne[2], weight.ne[3])
        if not np.isfinite(squares).all():
            raise ModelError(f"imatrix: what goes into {weight.name} is not finite")
        self.sums.add(weight.name, squares, counts)

    def _measures(self, t: Tensor) -> bool:
        if t.op not in _PRODUCTS or t.src[0] is None or t.src[1] is None:
            return False
        weight, x = t.src[0], t.src[1]
        if x.dtype is not DType.F32 or weight.op != "none" or not weight.name.endswith(".weight"):
            return False
        if t.op == "mul_mat_id":
            return True
        is_wanted = weight.name.startswith("blk.") or (self._output and weight.name == "output.weight")
        return x.ne[1] >= _MIN_ROWS and is_wanted

    def __enter__(self) -> Self:
        self._watches.add(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self._watches.remove(self)


def _by_matrix(x: np.ndarray[Any, Any], ne2: int, ne3: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Sums of the squares of x [n3, n2, rows, columns] for each matrix, [matrices * columns], and the number of rows
    that each matrix got, [1]."""
    n3, n2, rows, columns = x.shape
    matrices = np.zeros((ne3, ne2, columns))
    for i3 in range(n3):
        for i2 in range(n2):  # which matrix a product uses, when there are fewer matrices than stacks of rows
            matrices[i3 * ne3 // n3, i2 * ne2 // n2] += _squares(x[i3, i2])
    return matrices.reshape(1, -1), np.array([n3 * n2 * rows / (ne2 * ne3)])


def _by_expert(
    x: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], n_expert: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Sums of the squares of x [tokens, used or 1, columns] for each expert, [experts, columns], and how many rows each
    expert got. ids [tokens, used]: the experts of each token."""
    columns = x.shape[2]
    rows = np.broadcast_to(x, (x.shape[0], ids.shape[1], columns)).reshape(-1, columns)
    flat = ids.reshape(-1)
    sums = np.zeros((n_expert, columns))
    for expert in np.unique(flat):
        sums[expert] = _squares(rows[flat == expert])
    return sums, np.bincount(flat, minlength=n_expert).astype(np.float64)


def _squares(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
