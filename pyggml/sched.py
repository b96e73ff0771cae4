"""The scheduler: which backend runs which node, where the graph is split, what is copied at the borders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from . import alloc
from .backend import Program
from .backends.cpu import CpuBackend
from .backends.ref import RefBackend
from .buffer import Buffer
from .errors import BackendError, GraphError
from .graph import Graph
from .opdef import OPS
from .tensor import FLAG_PLANNED, FLAG_RECYCLED, Tensor, Var

BACKENDS = ("cpu", "ref")


def new_backend(name: str, n_threads: int | None = None) -> CpuBackend | RefBackend:
    """A backend by name. Raises BackendError for an unknown one."""
    if name == "cpu":
        return CpuBackend(n_threads)
    if name == "ref":
        return RefBackend()
    raise BackendError(f"no backend is called {name!r}; there are {', '.join(BACKENDS)}")


@dataclass
class Split:
    """Consecutive nodes of one backend, and the sources that are copied to it before they run."""

    backend: str
    nodes: list[Tensor] = field(default_factory=list[Tensor])
    inputs: dict[Tensor, Tensor] = field(default_factory=dict[Tensor, Tensor])  # source -> its copy
    steps: list[alloc.Step] = field(default_factory=list[alloc.Step])  # the nodes as the backend computes them

    def __str__(self) -> str:
        copies = ", ".join(t.name for t in self.inputs) or "none"
        return (
            f"{self.backend}: {len(self.nodes)} nodes ({self.nodes[0].name} .. {self.nodes[-1].name}), copies {copies}"
        )


@dataclass
class Schedule:
    """A graph made ready: its splits, memory plan and compiled programs."""

    splits: list[Split]
    plan: alloc.Plan
    buffers: dict[str, Buffer]
    programs: list[Program] = field(default_factory=list[Program])

    def place(self) -> None:
        """Point the graph's tensors at their memory in this schedule (another graph may have moved shared ones)."""
        for t, (pool, offset) in self.plan.offsets.items():
            t.buffer, t.offset = self.buffers[pool], offset
            t.flags = t.flags & ~FLAG_RECYCLED | FLAG_PLANNED
        for t in self.plan.recycled:
            t.flags |= FLAG_RECYCLED

    def run(self, interruptible: bool = True) -> None:
        """Compute the graph. Where it is not `interruptible`, no long run ends early on Ctrl-C."""
        for split, program in zip(self.splits, self.programs, strict=True):
            for source, copy in split.inputs.items():
                copy.raw()[...] = source.raw()
            program.run(interruptible)


class Scheduler:
    """Runs graphs on several backends, the first that supports a node first.

    All graphs share one compute buffer per backend, as large as the largest of them needs: outputs of one are to be
    read before the next one runs. `backends` are names or Backend objects.
    """

    def __init__(
        self, backends: Sequence[str | CpuBackend | RefBackend] = ("cpu", "ref"), n_threads: int | None = None
    ) -> None:
        made = [new_backend(b, n_threads) if isinstance(b, str) else b for b in backends]
        if not made:
            raise BackendError("a scheduler needs at least one backend")
        self.backends: dict[str, CpuBackend | RefBackend] = {b.name: b for b in made}
        self.splits: list[Split] = []
        self._pins: WeakKeyDictionary[Tensor, str] = WeakKeyDictionary()
        self._buffers: dict[str, Buffer] = {}
        self._ready: WeakKeyDictionary[Graph, Schedule] = WeakKeyDictionary()

    # -- what users call ------------------------------------------------------------------------------------------

    def set_tensor_backend(self, t: Tensor, backend: str) -> None:
        """Pin a node to a backend for the graphs planned from now on.

        Raises BackendError where the backend is none of this scheduler's, or has no code for the node.
        """
        b = self._backend(backend)
        if t.op == "none":
            raise GraphError(f"only nodes run on a backend; {t.describe()} is a leaf")
        if OPS[t.op].kernel is not None and not b.supports_op(t):
            raise BackendError(f"{backend} has no code for {t.op} of these types ({t.describe()})")
        self._pins[t] = backend
        self._ready.clear()

    def reserve(self, graph: Graph) -> None:
        """Make the compute buffers large enough for `graph`, without touching its tensors."""
        _, plan = self._plan(graph)
        self._grow(plan)

    def alloc(self, graph: Graph) -> Schedule:
        """Plan `graph` (once): its tensors get memory, its nodes are compiled. Inputs can then be set."""
        ready = self._ready.get(graph)
        if ready is None or any(b is not self._buffers.get(n) for n, b in ready.buffers.items()):
            ready = self._make(graph)
            self._ready[graph] = ready
        else:
            ready.place()
        self.splits = ready.splits
        return ready

    def alloc_varying(self, build: Callable[[int], Graph], var: Var, least: int) -> Schedule | None:
        """One schedule for all graphs `build(least)` .. `build(var.hi)`, which differ in sizes that depend on the value
        alone; `run` takes the value from `var`. Memory and threads are those of the largest; its tensors are what can
        be read. None where that does not hold, or several backends take part.
        """
        top = build(var.hi)
        schedule = self.alloc(top)
        if len(schedule.programs) != 1:
            return None
        others: list[tuple[int, list[alloc.Step]]] = []
        for value in (least, (least + var.hi) // 2):
            graph = build(value)
            if (graph.n_leafs, graph.n_nodes) != (top.n_leafs, top.n_nodes):
                return None
            twin = dict(zip((*top.leafs, *top.nodes), (*graph.leafs, *graph.nodes), strict=True))
            for like, t in twin.items():
                if like in schedule.plan.offsets:
                    t.buffer, t.offset = like.buffer, like.offset
            others.append((value, [step.mapped(twin) for step in schedule.splits[0].steps]))
        return schedule if schedule.programs[0].vary(var, others) else None

    def compute(self, graph: Graph) -> None:
        """Run `graph`. Raises BackendError naming the node that failed."""
        self.alloc(graph).run()

    def buffer_size(self, backend: str) -> int:
        """Bytes of the compute buffer of a backend."""
        b = self._buffers.get(self._backend(backend).buft)
        return 0 if b is None else b.size

    def assignment(self, graph: Graph) -> str:
        """The splits and the backend of every node, one line each; fused ones stand together."""
        lines: list[str] = []
        for i, split in enumerate(self.alloc(graph).splits):
            lines.append(f"split {i} on {split}")
            for step in split.steps:
                lines += [f"  {step.fusion}:"] * bool(step.fusion)
                lines += [f"  {'  ' * bool(step.fusion)}{t.op:<14} {t.describe()}" for t in step.nodes]
        return "\n".join(lines)

    # -- the passes -----------------------------------------------------------------------------------------------

    def _backend(self, name: str) -> CpuBackend | RefBackend:
        try:
            return self.backends[name]
        except KeyError:
            raise BackendError(f"no backend {name!r} here; there are {', '.join(self.backends)}") from None

    def _assign(self, graph: Graph) -> list[str]:
        """Pass 1: a backend for each node: its pin, else the first in priority order that supports it."""
        return [self._pins.get(t) or self._first_supporting(t) for t in graph.nodes]

    def _first_supporting(self, t: Tensor) -> str:
        for name, b in self.backends.items():
            if OPS[t.op].kernel is None or b.supports_op(t):
                return name
        raise BackendError(f"none of {', '.join(self.backends)} has code for {t.op} of these types ({t.describe()})")

    def _split(self, graph: Graph, names: list[str], buft_of: Callable[[Tensor], str]) -> list[Split]:
        """Pass 2: cut where the backend changes, and note what each split needs copied before it runs.

        Views compute nothing and stay with the split they are in. A source whose memory was written in the same split
        (a cache that was just stored to) cannot be copied before it: the graph is cut there too.
        """
        splits: list[Split] = []
        written: set[Tensor] = set()
        for t, name in zip(graph.nodes, names, strict=True):
            if OPS[t.op].kernel is None and splits:
                splits[-1].nodes.append(t)
                continue
            needs = [s for s in t.src if s is not None and self._needs_copy(s, t, name, buft_of)]
            if not splits or splits[-1].backend != name or any(s.root in written for s in needs):
                splits.append(Split(name))
                written.clear()
            splits[-1].nodes.append(t)
            for s in needs:
                if s not in splits[-1].inputs:
                    splits[-1].inputs[s] = _copy_of(s, name)
            if t.view_src is not None:
                written.add(t.view_src)
        return splits

    def _needs_copy(self, s: Tensor, t: Tensor, backend: str, buft_of: Callable[[Tensor], str]) -> bool:
        """Whether `backend` cannot read source `s` of `t` where it is. What `t` writes through is never copied."""
        if OPS[t.op].kernel is None or s.root is t.view_src:
            return False
        return not self.backends[backend].supports_buft(buft_of(s.root))

    def _plan(self, graph: Graph) -> tuple[list[Split], alloc.Plan]:
        names = self._assign(graph)
        own = {t: self.backends[name].buft for t, name in zip(graph.nodes, names, strict=True)}
        default = next(iter(self.backends.values())).buft

        def buft(root: Tensor) -> str:
            if root.buffer is not None and not root.flags & FLAG_PLANNED:
                return root.buffer.buft
            return own.get(root, default)

        splits = self._split(graph, names, buft)
        uses = Counter(s for t in graph.nodes for s in t.src if s is not None)
        for split in splits:
            split.steps = self.backends[split.backend].fuse(split.nodes, uses)
        steps = [step for split in splits for step in split.steps]
        plan = alloc.plan(steps, graph.leafs, pool_of=lambda t: own.get(t, default))
        for split in splits:  # copies live beside the plan for the whole run
            pool = self.backends[split.backend].buft
            for copy in split.inputs.values():
                at = plan.sizes.get(pool, 0)
                plan.offsets[copy] = (pool, at)
                plan.sizes[pool] = at + -(-copy.nbytes // 64) * 64
        return splits, plan

    def _grow(self, plan: alloc.Plan) -> None:
        for pool, size in plan.sizes.items():
            have = self._buffers.get(pool)
            if have is None or have.size < size:
                self._buffers[pool] = Buffer.allocate(size, pool)

    def _make(self, graph: Graph) -> Schedule:
        splits, plan = self._plan(graph)
        self._grow(plan)
        schedule = Schedule(splits, plan, {pool: self._buffers[pool] for pool in plan.sizes})
        schedule.place()
        for split in splits:
            copies = split.inputs
            program = self.backends[split.backend].compile(split.steps, lambda s, copies=copies: copies.get(s, s))
            schedule.programs.append(program)
        return schedule


def _copy_of(s: Tensor, backend: str) -> Tensor:
    """An unplaced tensor of the same layout, for a copy of `s` on `backend`."""
    copy = Tensor(s.ctx, s.dtype, s.ne, s.nb, s.rank, s.site)
    copy.name = f"{s.name} (copy on {backend})"
    return copy
