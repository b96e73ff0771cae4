"""`Nodes`, which patterns of fusions look through, and `fused`, which makes a step of the nodes that they find."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ....buffers.alloc import Step, operand
from ....dtypes import DType
from ....opdef import OPS
from ....tensor import FLAG_INPUT, FLAG_OUTPUT, Tensor
from ..isa import Kernel, find_kernel
from ..record import Half, Record

FLOATS = (DType.F32, DType.F16, DType.BF16)
_F32 = DType.F32.gguf_id


class Nodes:
    """Nodes of a graph that are to be fused.

    at       the place of each node in the graph
    uses     how often the whole graph reads a tensor
    readers  which of the nodes read it, once for each use
    kernels  the CPU's own kernels of products (of one matrix, or by expert)
    enabled  the fusions that may be used
    taken    nodes that are part of a fused step. The node in whose place the step stands -> the step; the other nodes
             of the step -> None
    """

    def __init__(
        self,
        nodes: Sequence[Tensor],
        uses: Mapping[Tensor, int],
        kernels: Mapping[Tensor, Kernel],
        isa: str,
        enabled: Collection[str],
    ) -> None:
        self.nodes, self.uses, self.isa, self.enabled = nodes, uses, isa, enabled
        self.at = {t: i for i, t in enumerate(nodes)}
        self.readers: dict[Tensor, list[Tensor]] = {}
        writers = [
            (i, t.view_src) for i, t in enumerate(nodes) if t.view_src is not None and OPS[t.op].kernel is not None
        ]
        self._writes_at, self._written = [i for i, _ in writers], [root for _, root in writers]
        for t in nodes:
            for s in t.src:
                if s is None:
                    continue
                if s in self.readers:
                    self.readers[s].append(t)
                else:
                    self.readers[s] = [t]
        self.kernels = {
            t: kernels[t] for t in nodes if t in kernels and (t.op == "mul_mat_id" or t.ne[2] == t.ne[3] == 1)
        }
        self.taken: dict[Tensor, Step | None] = {}

    def passes(self, t: Tensor, n: int = 1) -> bool:
        """Whether `t` is one of these nodes, is read n times by these nodes, and is needed for nothing else."""
        return (
            t in self.at
            and t not in self.taken
            and (t.view_src is None or OPS[t.op].kernel is None)
            and not t.flags & (FLAG_INPUT | FLAG_OUTPUT)
            and self.uses[t] == n == len(self.readers.get(t, ()))
        )

    def reader(self, t: Tensor) -> Tensor | None:
        """The one node that reads `t`; None when `t` has another use, or a step has taken one of the two."""
        out = self.readers[t][0] if self.passes(t) else None
        return None if out is None or out in self.taken else out

    def in_order(self, nodes: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """The nodes in the order of the graph."""
        return tuple(sorted(nodes, key=self.at.__getitem__))

    def unwritten(self, sources: Iterable[Tensor | None], first: Tensor, last: Tensor) -> bool:
        """Whether no node after `first`, up to `last`, writes to the memory of `sources`. (`last` may write where it
        reads.)"""
        begin, end = (bisect_right(self._writes_at, self.at[t]) for t in (first, last))
        written = self._written[begin:end]
        return not written or {s.root for s in sources if s is not None}.isdisjoint(written)

    def kernel(self, stem: str, src0: DType = DType.F32) -> Kernel | None:
        """The kernel for a first source of the type of `src0` and a second one of F32."""
        return find_kernel(self.isa, stem, _F32, src0.gguf_id, _F32)


class Fusion(NamedTuple):
    """One way to compute nodes together.

    name  what its steps are called
    ops   the ops of nodes that `find` begins with
    find  returns the step that such a node is part of, or None. It is not called for nodes of other steps
    early true: the step stands where its first result stood, because that may be read before the last node; false: it
          stands where its last node stood
    """

    name: str
    ops: Collection[str]
    find: Callable[[Nodes, Tensor], Step | None]
    early: bool = False


def fused(
    fusion: str,
    nodes: Sequence[Tensor],
    results: Sequence[Tensor],
    kernel: Kernel | None,
    srcs: Mapping[int, Tensor | None],
    params: Mapping[int, float],
    *,
    heir: Tensor | None = None,
    packed: tuple[int, ...] = (),
    halves: Mapping[int, Half] | None = None,
    shape: Tensor | None = None,
) -> Step:
    """The step of `nodes`, in order. All but the `results` are inner; the first of these is what the kernel writes. See
    `Record` for the rest."""
    record = Record(
        fusion,
        None if heir is None else operand(nodes, heir),
        kernel,
        operand(nodes, results[0]),
        {i: operand(nodes, t) for i, t in srcs.items() if t is not None},
        params,
        packed,
        halves or {},
        None if shape is None else operand(nodes, shape),
    )
    return Step(tuple(nodes), frozenset(nodes).difference(results), record)


def is_f32_rows(t: Tensor | None) -> bool:
    """Whether the rows of `t` are dense f32."""
    return t is not None and t.dtype is DType.F32 and t.nb[0] == 4


def other_source(t: Tensor, s: Tensor) -> Tensor | None:
    """The source of `t`, a node with two sources, that is not `s`."""
    return t.src[1] if t.src[0] is s else t.src[0]
