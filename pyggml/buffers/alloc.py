"""The memory planner: where each tensor of a graph lies in a compute buffer. Pure: reads a graph, returns a plan."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar, NamedTuple

from pyggml.opdef import OPS
from pyggml.tensor import FLAG_INPUT, FLAG_OUTPUT, FLAG_PLANNED, Tensor
from pyggml.var import largest

from .buffer import ALIGNMENT


class Operand(NamedTuple):
    """A tensor that a step reads or writes: its node of that number, or what that node reads as source `src`. It is
    the same of every step that repeats this one."""

    node: int
    src: int | None = None


def operand(nodes: Sequence[Tensor], t: Tensor) -> Operand:
    """`t` as an operand of a step of these nodes: one of them, or otherwise a source of the first that reads it."""
    for i, node in enumerate(nodes):
        if node is t:
            return Operand(i)
    for i, node in enumerate(nodes):
        for j, s in enumerate(node.src):
            if s is t:
                return Operand(i, j)
    raise LookupError(f"{t.describe()} is neither one of {len(nodes)} nodes nor a source of one")


@dataclass(repr=False)
class Match:
    """Nodes that a backend has found and computes together. A subclass of the backend's says how it computes them.

    fusion  what it is called
    heir    a source whose memory the last node may take over
    """

    fusion: str = ""
    heir: Operand | None = None


class Step(NamedTuple):
    """What a backend computes at a time: a node, or several that it has fused.

    nodes   in the order of the graph; the last one names the step
    inner   the nodes whose values nothing outside the step reads: they get no memory
    match   what fused them (None for one node)
    like    an earlier step that this one repeats: the same nodes, which read other values and lie elsewhere
    """

    nodes: tuple[Tensor, ...]
    inner: frozenset[Tensor] = frozenset()
    match: Match | None = None
    like: Step | None = None

    @property
    def fusion(self) -> str:
        """What its match is called, "" for one node."""
        return "" if self.match is None else self.match.fusion

    def sources(self) -> list[Tensor]:
        """What its nodes read from outside the step: a tensor once for each use."""
        nodes, inner = self.nodes, self.inner
        if len(nodes) == 1:
            return [s for s in nodes[0].src if s is not None]
        return [s for t in nodes for s in t.src if s is not None and s not in inner]

    @property
    def heirs(self) -> list[Tensor | None]:
        """The sources whose memory the last node may take over."""
        if self.match is not None:
            return [] if self.match.heir is None else [self.tensor(self.match.heir)]
        t = self.nodes[-1]
        return [t.src[i] for i in OPS[t.op].inplace if i < len(t.src)]

    def tensor(self, o: Operand) -> Tensor:
        """The tensor that the operand is in this step."""
        t = self.nodes[o.node] if o.src is None else self.nodes[o.node].src[o.src]
        assert t is not None
        return t

    def of(self, nodes: tuple[Tensor, ...], like: Step | None) -> Step:
        """The same step over other nodes, which correspond to its own one by one."""
        inner = self.inner
        if inner:
            inner = frozenset([t for t, own in zip(nodes, self.nodes, strict=True) if own in inner])
        return Step(nodes, inner, self.match, like)


def joined(steps: Iterable[Step]) -> Step:
    """One step with all the nodes of these steps."""
    return Step(tuple([t for step in steps for t in step.nodes]))


def steps_of(nodes: Iterable[Tensor]) -> list[Step]:
    """A step for each node by itself."""
    return [Step((t,)) for t in nodes]


@dataclass(eq=False, repr=False)
class Plan:
    """Offsets of the planned tensors in their pool's buffer, and the bytes each pool needs.

    `lower_bound` is the largest sum of bytes that live at one time: no plan without in-place reuse can need less.
    `lives`: of each planned tensor the steps, first and last (both included), in which its bytes are its own. Notebooks
    show them as a map of memory over time.
    """

    html: ClassVar[Callable[[Plan], str] | None] = None  # pyggml installs it

    offsets: dict[Tensor, tuple[str, int]] = field(default_factory=dict[Tensor, tuple[str, int]])
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    lower_bound: int = 0
    recycled: set[Tensor] = field(default_factory=set[Tensor])  # not readable after the run
    lives: dict[Tensor, tuple[int, int]] = field(default_factory=dict[Tensor, tuple[int, int]])
    n_steps: int = 0

    def __repr__(self) -> str:
        sizes = ", ".join(f"{pool} {n} bytes" for pool, n in self.sizes.items()) or "no memory"
        return f"<Plan {sizes}; {self.n_steps} steps, {len(self.offsets)} tensors, {len(self.recycled)} recycled>"

    def _repr_html_(self) -> str | None:
        return Plan.html(self) if Plan.html is not None else None


class _Pool:
    """Free intervals of one growing buffer; the best-fitting hole is taken."""

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []  # (start, end), by start
        self.size = 0

    def take(self, n: int) -> int:
        fits = [(end - start, start, end) for start, end in self.free if end - start >= n]
        if fits:
            _, start, end = min(fits)
            self.free.remove((start, end))
            if end - start > n:
                insort(self.free, (start + n, end))
            return start
        start = self.size
        if self.free and self.free[-1][1] == self.size:  # the last hole touches the end: grow from there
            start = self.free.pop()[0]
        self.size = start + n
        return start

    def give(self, start: int, n: int) -> None:
        end = start + n
        i = bisect_left(self.free, (start, end))
        if i < len(self.free) and self.free[i][0] == end:
            end = self.free.pop(i)[1]
        if i > 0 and self.free[i - 1][1] == start:
            start = self.free.pop(i - 1)[0]
        insort(self.free, (start, end))


def plan(
    steps: Sequence[Step],
    *,
    alignment: int = ALIGNMENT,
    pool_of: Callable[[Tensor], str] = lambda t: "",
) -> Plan:
    """Lay out every result that has no memory yet. Leafs have memory of their own: their values outlive a run.

    Inputs and outputs are never recycled and never overwritten in place. A node may take over the memory
    of a source it is the last user of, when its op allows it (OpDef.inplace) and type, shape and pool agree. A view
    lives where its root lives. All that a step reads lives until its end.
    """
    result = Plan(n_steps=len(steps))
    nodes = [t for step in steps for t in step.nodes]
    sources = [step.sources() for step in steps]
    used = [  # the roots that each step uses, one once for each use
        [s if s.view_src is None else s.view_src for s in read]
        + [t.view_src for t in step.nodes if t.view_src is not None]
        for step, read in zip(steps, sources, strict=True)
    ]
    read, inner = set(chain.from_iterable(sources)), set(chain.from_iterable(step.inner for step in steps))
    kept = FLAG_INPUT | FLAG_OUTPUT
    pinned = {t.root for t in nodes if t.flags & kept}
    results = [t for t in nodes if t.view_src is not None and t not in read and t not in inner]
    pinned.update(t.root for t in results)  # a tensor that a result is a view of counts as a result
    placed = {t for t in nodes if t.view_src is None and (t.buffer is None or t.flags & FLAG_PLANNED)} - inner
    last: dict[Tensor, int] = {}  # the step that uses a root last
    for at, roots in enumerate(used):
        last.update(dict.fromkeys(roots, at))
    ends: dict[int, list[Tensor]] = {}  # step -> the tensors whose memory is free after it
    for root in placed.difference(pinned).intersection(last):
        ends.setdefault(last[root], []).append(root)
    pools: dict[str, _Pool] = {}
    held: dict[Tensor, int] = {}  # root -> bytes it occupies
    live, behind = 0, len(steps) - 1

    def heir(t: Tensor, at: int) -> Tensor | None:
        """The source whose memory `t` may take over, or None."""
        if t in pinned:
            return None
        for s in steps[at].heirs:
            if s is None or s.view_src is not None or s in pinned or s not in held:
                continue
            if (
                last[s] == at
                and s.dtype is t.dtype
                and s.nb == t.nb
                and s.ne == t.ne
                and result.offsets[s][0] == pool_of(t)
                and len([u for u in used[at] if u is s]) == 1  # this one
            ):
                return s
        return None

    for at, step in enumerate(steps):
        for t in step.nodes:
            if t not in placed:
                continue
            source = heir(t, at)
            if source is None:
                pool = pool_of(t)
                held[t] = n = -(-largest(t.nbytes) // alignment) * alignment
                if pool not in pools:
                    pools[pool] = _Pool()
                result.offsets[t] = pool, pools[pool].take(n)
                live += n
                result.lower_bound = max(result.lower_bound, live)
            else:
                result.offsets[t] = result.offsets[source]
                held[t] = held.pop(source)
                result.lives[source] = result.lives[source][0], at - 1
            result.lives[t] = at, behind
        for root in ends.get(at, ()):
            if root in held:  # it was not taken over
                pool, offset = result.offsets[root]
                n = held.pop(root)
                pools[pool].give(offset, n)
                live -= n
                result.lives[root] = result.lives[root][0], at
    result.recycled.update(inner, *ends.values())
    result.sizes = {name: pool.size for name, pool in pools.items()}
    return result
