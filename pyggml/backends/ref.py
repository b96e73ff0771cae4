"""The reference backend: interprets a graph with the NumPy references. Slow; it defines the semantics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..alloc import Step
from ..backend import HostBackend, Resolve, node_error
from ..codec import Array
from ..errors import GGMLError
from ..opdef import opdef_of
from ..tensor import Tensor, Var


def source_array(t: Tensor) -> Array:
    """A source as references take it: 4-d in NumPy order, floats as float64, integers as they are."""
    a = t.elements()
    return a if a.dtype.kind == "i" else a.astype(np.float64)


def compute_node(t: Tensor, resolve: Resolve = lambda s: s) -> None:
    """Compute one node into its memory. Raises BackendError with the node where its reference refuses the data."""
    op = opdef_of(t)
    if op.kernel is None:
        return
    sources = [None if s is None else source_array(resolve(s)) for s in t.src]
    try:
        with np.errstate(all="ignore"):
            values = op.ref(*sources, **t.op_params)
            t.store(np.asarray(values).reshape(t.ne[::-1]))
    except (IndexError, ValueError) as e:
        raise node_error(t, str(e)) from None


class RefProgram:
    """Nodes that the references compute, one after the other."""

    def __init__(self, steps: Sequence[Step], resolve: Resolve) -> None:
        self.nodes, self.resolve = [t for s in steps for t in s.nodes], resolve

    def run(self, interruptible: bool = True) -> None:
        for t in self.nodes:
            try:
                compute_node(t, self.resolve)
            except GGMLError:
                raise
            except Exception as e:
                raise node_error(t, f"the reference failed: {type(e).__name__}: {e}") from e

    def vary(self, var: Var, others: Sequence[tuple[int, Sequence[Step]]]) -> bool:
        """See `Program.vary`: it cannot, as shapes are fixed."""
        return False


class RefBackend(HostBackend):
    """Every op, every type, in float64."""

    name = "ref"
    buft = "REF"

    def supports_op(self, t: Tensor) -> bool:
        return True

    def supports_buft(self, buft: str) -> bool:
        return buft == self.buft

    def compile(self, steps: Sequence[Step], resolve: Resolve) -> RefProgram:
        return RefProgram(steps, resolve)
