"""A case of an op (`pyggml.testing`) whose sizes follow from a Var, and the same case at fixed sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import pyggml as gg
from pyggml.graph import Graph
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor
from pyggml.testing import Case, Src, gaussian
from pyggml.testing.harness import fill

Ne = tuple[int, ...]


def shown(t: Tensor) -> tuple[tuple[int, ...], bytes]:
    """The shape and the stored bytes, now."""
    return t.elements().shape, t.tobytes()


class Recorded:
    """The op of a case on leafs that get their values before each run. `d` of `n` elements: sizes that are `d` in the
    case are `n` here."""

    def __init__(self, case: Case, d: int = 0, n: int = 0) -> None:
        self.case, self.leafs = case, list[tuple[Tensor, Src]]()
        with gg.Context() as ctx:
            tensors = [None if s is None else self._source(ctx, s, d, n) for s in case.srcs]
            self.node = case.build(*tensors)
        self.graph = Graph().build_forward_expand(self.node.set_output())

    def _source(self, ctx: gg.Context, s: Src, d: int, n: int) -> Tensor:
        ne: list[int] = [n if m == d else m for m in (*s.ne, 1, 1, 1)[:4]]
        n0, n1, n2, n3 = ne
        stored = [n0 + s.pad, n1, n2, n3] if s.permute is None else [ne[i] for i in s.permute]
        t = ctx.new_tensor(s.dtype, stored)
        t.allocate()
        self.leafs.append((t, s))
        if s.permute is not None:
            return gg.permute(t, *s.permute)
        return gg.view_4d(t, n0, n1, n2, n3, t.nb[1], t.nb[2], t.nb[3], 0) if s.pad else t

    def ready(self, backend: str, n_threads: int) -> None:
        """Plan and compile it."""
        self.schedule = Scheduler((backend,), n_threads).alloc(self.graph)

    def run(self) -> tuple[tuple[int, ...], bytes]:
        """What it computes of the values for the sizes that it has now."""
        rng = np.random.default_rng(self.case.seed)
        for t, s in self.leafs:
            fill(t, np.asarray((s.values or gaussian)(rng, t.layout[0][::-1])))
        with np.errstate(all="ignore"):
            self.schedule.run()
        return shown(self.node)


def at(case: Case, d: int, m: int) -> Case:
    """The case with `m` elements where it has `d`."""
    srcs = [s and replace(s, ne=tuple(m if k == d else k for k in s.ne)) for s in case.srcs]
    return replace(case, srcs=tuple(srcs))
