"""What lower.py writes of a step: the kernel and its operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...buffers.alloc import Match, Operand
from ...opdef import OPS
from ...tensor import Size, Tensor
from .host import HOST_KERNEL
from .isa import Kernel, kernel_of
from .products import choose

_NODE = Operand(0)


class Half(NamedTuple):
    """The first (0) or second (1) half of a dimension."""

    dim: int
    which: int


@dataclass(repr=False)
class Record(Match):
    """How the nodes of a step, and of all steps that repeat it, are computed.

    kernel  the kernel; None: the backend has none for it
    dst     the tensor that the result is written to
    srcs    the sources of the kernel, by number (csrc/operands.h)
    params  its parameters, by number, without those that follow from a Var (`OpDef.sizes`): it does not read these
    packed  sources whose repacked copy is read, when they have one
    halves  sources of which only one half is read
    shape   the node whose ne the result has; it is written densely into `dst`. None: the ne of `dst`
    shared  whether threads share the work; None: when its cost is worth it
    """

    kernel: Kernel | None = None
    dst: Operand = _NODE
    srcs: Mapping[int, Operand] = field(default_factory=dict[int, Operand])
    params: Mapping[int, float] = field(default_factory=dict[int, float])
    packed: tuple[int, ...] = ()
    halves: Mapping[int, Half] = field(default_factory=dict[int, Half])
    shape: Operand | None = None
    shared: bool | None = None


def record_of(t: Tensor, isa: str) -> Record:
    """How a node by itself is computed."""
    if OPS[t.op].host is not None:
        return Record(kernel=HOST_KERNEL, shared=t.op_params.get("n_tasks") != 1)
    product = choose(isa, t)
    return Record(
        kernel=kernel_of(isa, t) if product is None else product[0],
        srcs={i: Operand(0, i) for i, s in enumerate(t.src) if s is not None},
        params={i: n for i, n in enumerate(t.op_params.values()) if not isinstance(n, Size)},
        packed=() if product is None else (0,),
    )
