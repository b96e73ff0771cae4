"""Graphs of any ops. Each step is a case of an op, drawn by its strategy, with sources that are joined to what earlier
steps gave; so layouts, memory that is used again, fusions and threads of all ops meet each other.

Joined are the source's own values, each made up to a tenth smaller by an earlier result: the errors that a strategy
allows hold for its values. Each node is compared with the reference on the same sources; the graph as a whole,
planned, fused and on several threads, must then give the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from math import prod
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu.fuse import FUSIONS
from pyggml.backends.ref import compute_node
from pyggml.buffers.alloc import steps_of
from pyggml.opdef import opdef_of
from pyggml.tensor import FLAG_OUTPUT, Tensor
from pyggml.testing import STRATEGIES, Case, Src, compare, tolerance
from pyggml.testing.harness import GuardedBackend, explained, make_source, outcome

FLOATS = (gg.F32, gg.F16, gg.BF16)
SHARE = 0.1  # how much an earlier result may change a value
ROUNDINGS = 64.0  # of the nodes that join, and of those inside a case, which have no tolerance of their own
MOST = 1 << 16  # elements of a value that is joined
# Not bit for bit those of the nodes one by one (pyggml/backends/cpu/fusions): attention, and norms at avx512
EXACT = tuple(f for f in FUSIONS if f not in ("attention", "norm"))


class Step(NamedTuple):
    """A case, and which earlier result each of its sources is joined to (None: to none)."""

    op: str
    case: Case
    joined: tuple[int | None, ...]


@st.composite
def steps(draw: st.DrawFn, ops: Collection[str] = (), most: int = 6) -> list[Step]:
    """One to `most` cases of `ops` (all when there are none)."""
    names = sorted(ops or STRATEGIES)
    first, stride = draw(st.integers(0, len(names) - 1)), draw(st.integers(1, len(names)))
    out: list[Step] = []
    for i in range(draw(st.integers(1, most))):
        op = names[(first + i * stride) % len(names)]
        case = draw(STRATEGIES[op])
        before = st.none() if i == 0 else st.sampled_from([None, *range(i)])
        joins = [draw(before) if s is not None and can_join(s) else None for s in case.srcs]
        out.append(Step(op, case, tuple(joins)))
    return out


def can_join(spec: Src) -> bool:
    """Whether a source can be made from an earlier result."""
    return spec.dtype in FLOATS and prod(spec.ne) <= MOST


class Net:
    """A graph of steps. Leafs have their values, nodes have no memory."""

    def __init__(self, drawn: list[Step]) -> None:
        self.ctx, self.results = gg.Context(), list[Tensor]()
        self.limits: dict[Tensor, float] = {}
        self.seen = Counter[str](["graphs"])
        with self.ctx:
            for step in drawn:
                try:
                    self._add(step)
                except gg.GGMLError as e:
                    self.seen[f"refused {str(e).splitlines()[0]}"] += 1
        self.graph = gg.Graph()
        for t in self.results:
            t.set_output()
            self.graph.build_forward_expand(t)

    def _add(self, step: Step) -> None:
        rng = np.random.default_rng(step.case.seed)
        srcs: list[Tensor | None] = []
        for spec, join in zip(step.case.srcs, step.joined, strict=True):
            t = make_source(self.ctx, spec, rng)
            earlier = None if join is None or join >= len(self.results) else self.results[join]
            if t is not None and spec is not None and earlier is not None and earlier.dtype in FLOATS:
                t = laid_out(spec, joined(earlier, t))
                self.seen["joined"] += 1
            srcs.append(t)
        made = step.case.build(*srcs)
        self.results.append(made)
        self.limits[made] = step.case.nmse

    def owners(self) -> list[Tensor]:
        """The results that have memory of their own, in the order of their steps; then the leafs, over which some ops
        write."""
        return [t for t in self.graph.nodes if t.flags & FLAG_OUTPUT and t.view_src is None] + list(self.graph.leafs)

    def outputs(self) -> list[bytes]:
        """What is there now."""
        return [t.tobytes() for t in self.owners()]


def joined(earlier: Tensor, t: Tensor) -> Tensor:
    """A new dense F32 node with the ne of `t`: its values, each times a number from 0.9 to 1 that follows from
    `earlier` (NaN there counts as 0)."""
    n, dense = t.n_elements, gg.cast(gg.cont(earlier), gg.F32)
    flat = gg.reshape_1d(dense, dense.n_elements)
    if flat.n_elements < n:
        times = -(-n // flat.n_elements)
        flat = gg.cont(gg.repeat_4d(flat, flat.n_elements * times, 1, 1, 1))
    flat = gg.reshape(gg.view_1d(flat, n, 0), t)
    some = gg.sigmoid(gg.where(gg.equal(flat, flat), flat, gg.fill(flat, 0.0)))
    return gg.mul(gg.cast(gg.cont(t), gg.F32), gg.add(gg.scale(some, -SHARE), gg.fill(some, 1.0)))


def laid_out(spec: Src, t: Tensor) -> Tensor:
    """Values as a source of a case lies: cast, permuted, with longer rows."""
    t = t if spec.dtype is gg.F32 else gg.cast(t, spec.dtype)
    if spec.permute is not None:
        back = [spec.permute.index(i) for i in range(4)]
        return gg.permute(gg.cont(gg.permute(t, *back)), *spec.permute)
    if spec.pad:
        wide = gg.pad(t, spec.pad, 0, 0, 0) if t.dtype is gg.F32 else gg.concat(t, t, 0)
        return gg.view_4d(wide, *t.ne, *wide.nb[1:], 0)
    return t


def one_by_one(net: Net, isa: str, seen: Counter[str]) -> list[bytes]:
    """Compute node by node on the CPU, and compare each node with the reference. Raises Mismatch."""
    backend = GuardedBackend(1, isa, ())
    for t in net.graph.nodes:
        if t.view_src is None:
            t.allocate()
    for t in net.graph.nodes:
        op = opdef_of(t)
        if op.kernel is None:
            continue
        seen[t.op] += 1
        roots = {s.root for s in (t, *t.src) if s is not None}
        before = [(root, np.array(root.raw())) for root in roots]
        compute_node(t)
        changed = [s for i in op.changes if (s := t.src[i]) is not None]
        want, wanted = outcome(t), [outcome(s) for s in changed]
        for root, values in before:
            root.raw()[...] = values
        backend.compile(steps_of([t]), lambda s: s).run()
        with explained(t, isa):
            compare(outcome(t), want, net.limits.get(t, tolerance(t.dtype, ROUNDINGS)))
            for s, old in zip(changed, wanted, strict=True):
                compare(outcome(s), old, tolerance(s.dtype))
    return net.outputs()


def whole(drawn: list[Step], isa: str, fusions: Collection[str], n_threads: int) -> list[bytes]:
    """What the planned graph gives on so many threads, of which there may be more than processors."""
    net = Net(drawn)
    backend = GuardedBackend(1, isa, fusions)
    backend.n_threads = n_threads
    gg.Scheduler([backend]).compute(net.graph)
    return net.outputs()


def check_graph(drawn: list[Step], isa: str, threads: Collection[int], seen: Counter[str]) -> None:
    """Check a graph at one instruction set: each node against the reference; then as a whole, with and without fusions,
    on each number of threads. `seen` counts ops, graphs, joined sources and steps that were refused."""
    net = Net(drawn)
    with np.errstate(all="ignore"):
        want = one_by_one(net, isa, seen)
    seen.update(net.seen)
    for n in threads:
        for fusions in ((), EXACT):
            got = whole(drawn, isa, fusions, n)
            wrong = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
            assert not wrong, f"{isa}, {n} threads, fusions {fusions}: other bits in {wrong} of {net.owners()}"
