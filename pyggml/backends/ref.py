"""The reference backend: interprets a graph with the NumPy references. Slow; it defines the semantics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..buffers.alloc import Step
from ..codec import Array
from ..errors import GGMLError
from ..opdef import opdef_of
from ..tensor import Size, Tensor
from .protocol import HostBackend, Resolve, node_error


def source_array(t: Tensor) -> Array:
    """A source as references take it: 4-d in NumPy order, floats as float64, integers as they are."""
    a = t.elements()
    return a if a.dtype.kind == "i" else a.astype(np.float64)


def _stored_rows(t: Tensor) -> Array:
    """The blocks of a tensor as bytes [ne3, ne2, ne1, bytes per row]: ops that only move blocks do not decode them."""
    return t.rows_of_blocks(t.raw())


def _store_changed(t: Tensor, values: Array) -> None:
    """Store `values`. Blocks whose elements stay the same keep their bytes: an encoder might choose other bytes."""
    before, rows = t.elements(), _stored_rows(t)
    old = np.array(rows)
    t.store(values)
    same = (values == before).reshape(*values.shape[:3], -1, t.dtype.block_size).all(axis=-1)
    kept = np.repeat(same, t.dtype.type_size, axis=-1)
    rows[kept] = old[kept]


def compute_node(t: Tensor, resolve: Resolve = lambda s: s) -> None:
    """Compute one node into its memory. Raises BackendError with the node when its reference refuses the data."""
    op = opdef_of(t)
    if op.kernel is None:
        return
    if op.host is not None:
        try:
            op.host(t, [None if s is None else resolve(s) for s in t.src], 0, 1)
        except Exception as e:
            raise node_error(t, f"{type(e).__name__}: {e}") from e
        return
    blocks = t.dtype.is_quantized and all(s is None or s.dtype is t.dtype for s in t.src)
    load = _stored_rows if blocks else source_array
    shape = t.layout[0][::-1]
    params = {name: int(x) if isinstance(x, Size) else x for name, x in t.op_params.items()}
    sources = [None if s is None else load(resolve(s)) for s in t.src]
    try:
        with np.errstate(all="ignore"):
            values = op.ref(*sources, **params)
            if op.changes:
                values, *changed = values
                for i, a in zip(op.changes, changed, strict=True):
                    s = t.src[i]
                    assert s is not None
                    s.store(a)
            values = np.asarray(values)
            if blocks:
                _stored_rows(t)[...] = values
            elif t.dtype.is_quantized and op.writes is not None:
                _store_changed(t, values.reshape(shape))
            else:
                t.store(values.reshape(shape))
    except (IndexError, ValueError) as e:
        raise node_error(t, str(e)) from e


class RefProgram:
    """Nodes that the references compute, one after the other."""

    def __init__(self, steps: Sequence[Step], resolve: Resolve) -> None:
        self.nodes, self.resolve = [t for s in steps for t in s.nodes], resolve

    def run(self, interruptible: bool = True, n_threads: int | None = None) -> None:
        for t in self.nodes:
            try:
                compute_node(t, self.resolve)
            except GGMLError:
                raise
            except Exception as e:
                raise node_error(t, f"the reference failed: {type(e).__name__}: {e}") from e


class RefBackend(HostBackend):
    """Every op, every type, in float64."""

    name = "ref"
    varies = True
    buft = "REF"

    def supports_op(self, t: Tensor) -> bool:
        return True

    def supports_buft(self, buft: str) -> bool:
        return buft == self.buft

    def compile(self, steps: Sequence[Step], resolve: Resolve) -> RefProgram:
        return RefProgram(steps, resolve)
