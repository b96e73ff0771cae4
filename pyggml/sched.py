"""The scheduler: which backend runs which node, where the graph is split, what is copied at the borders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, SupportsIndex
from weakref import WeakKeyDictionary, ref

from .backends.protocol import Backend, Program, new_backend, node_error
from .buffers import alloc
from .buffers.buffer import Buffer, Streamed
from .errors import BackendError, GraphError, not_sent
from .graph import Graph
from .hazards import check_graph as check_hazards
from .inspect.watch import Patterns, Watches
from .lock import Lock, changing, locked
from .opdef import OPS, written_by
from .tensor import FLAG_INPUT, FLAG_OUTPUT, FLAG_PLANNED, FLAG_RECYCLED, FLAG_STORE, FLAG_UNSET, Tensor
from .var import Size, Var, largest, vars_of


def check_graph(what: str, graph: Graph) -> None:
    """Raise GraphError when `graph` is not a graph."""
    if not isinstance(graph, Graph):  # pyright: ignore[reportUnnecessaryIsInstance]
        of_tensor = ": Graph().build_forward_expand(t) makes one, pyggml.eval(t) gives the values of t"
        how = of_tensor if isinstance(graph, Tensor) else ""
        raise GraphError(f"{what} takes a Graph, not {type(graph).__name__}{how}")


def require_values(graph: Graph, given: Container[Tensor] = ()) -> None:
    """Raise GraphError for a leaf of `graph`, not among those `given`, that has no value, or one for other values of
    its Vars than they have now."""
    for t in graph.leafs:
        if t.held is not None and t not in given and (other := t.outdated()) is not None:
            raise GraphError(
                f"{t.describe()} was set for {other}, and is another size now: {t.bound()}. set() it again"
            )
        if (t.buffer is None or t.flags & FLAG_UNSET) and t not in given:
            kind = "input" if t.flags & FLAG_INPUT else "leaf"
            raise GraphError(
                f"no value for the {kind} {t.describe()}: set() it, or pass it in compute's inputs={{...}}"
            )


Key = tuple[list[int], list[tuple[Buffer | None, int]], Patterns]


def _key(graph: Graph, watches: Watches) -> Key:
    """What the schedule of a graph depends on: its nodes, which of them are inputs or outputs, where its leafs lie, and
    what is watched."""
    kept = FLAG_INPUT | FLAG_OUTPUT
    return [t.flags & kept for t in graph.nodes], [(t.buffer, t.offset) for t in graph.leafs], watches.patterns


class Cut(NamedTuple):
    """Steps that run in one go, which nodes of them are watched (True: the last of its name), and the streamed weights
    that must be in memory while they run."""

    steps: Sequence[alloc.Step]
    watched: tuple[tuple[Tensor, bool], ...]
    streamed: tuple[Streamed, ...]

    @property
    def nodes(self) -> list[Tensor]:
        """The nodes of the steps."""
        return [t for step in self.steps for t in step.nodes]


class Part(NamedTuple):
    """A cut that its backend has compiled."""

    program: Program
    cut: Cut

    def run(self, interruptible: bool, n_threads: int | None) -> None:
        """Compute its nodes, with the weights that they read in memory."""
        held: list[Streamed] = []
        try:
            for weights in self.cut.streamed:
                weights.acquire(self.cut.nodes)
                held.append(weights)
            self.program.run(interruptible, n_threads)
        finally:
            for weights in held:
                weights.release()


@dataclass(eq=False, repr=False)
class Split:
    """Consecutive nodes of one backend, and the sources that are copied to it before they run."""

    backend: str
    nodes: list[Tensor] = field(default_factory=list[Tensor])
    inputs: dict[Tensor, Tensor] = field(default_factory=dict[Tensor, Tensor])  # source -> its copy
    steps: list[alloc.Step] = field(default_factory=list[alloc.Step])  # the nodes as the backend computes them
    parts: list[Part] = field(default_factory=list[Part])  # one, unless nodes are watched or weights come and go

    def __str__(self) -> str:
        copies = ", ".join(t.name for t in self.inputs) or "none"
        return (
            f"{self.backend}: {len(self.nodes)} nodes ({self.nodes[0].name} .. {self.nodes[-1].name}), copies {copies}"
        )


@dataclass(eq=False, repr=False)
class Schedule:
    """A graph made ready: its splits, memory plan and compiled programs. `watches` and `lock` are the scheduler's.

    varying  the nodes that have memory in the plan and as many elements as Vars say
    ran      for which values of these Vars it ran last
    """

    splits: list[Split]
    plan: alloc.Plan
    buffers: dict[str, Buffer]
    key: Key
    watches: Watches = field(default_factory=Watches)
    lock: Lock = field(default_factory=Lock)
    varying: list[Tensor] = field(init=False)
    ran: dict[Var, int] = field(init=False)

    def __post_init__(self) -> None:
        self.varying = [t for t in self.plan.offsets if Size in map(type, t.ne)]
        self.ran = {var: var.value for t in self.varying for var in vars_of(*t.ne)}

    @property
    def programs(self) -> list[Program]:
        """What it runs, in order."""
        return [part.program for split in self.splits for part in split.parts]

    def place(self) -> None:
        """Point the graph's tensors at their memory in this schedule (another graph may have moved shared ones)."""
        for t, (pool, offset) in self.plan.offsets.items():
            t.buffer, t.offset = self.buffers[pool], offset
            t.flags = t.flags & ~FLAG_RECYCLED | FLAG_PLANNED
        for t in self.plan.recycled:
            t.flags |= FLAG_RECYCLED
        for t in self.varying:
            t.held = self.ran

    @locked
    def run(self, interruptible: bool = True, n_threads: int | None = None) -> None:
        """Compute the graph, on no more than `n_threads` and its backends' threads. A long run ends early on Ctrl-C
        only when it is `interruptible`."""
        for var in self.ran:
            self.ran[var] = var.value
        for split in self.splits:
            for source, copy in split.inputs.items():
                assert copy.buffer is not None
                copy.buffer.write(copy.offset, source.raw())
            for part in split.parts:
                part.run(interruptible, n_threads)
                if part.cut.watched:
                    self._tell(part.cut.watched)

    def _tell(self, watched: Sequence[tuple[Tensor, bool]]) -> None:
        try:
            for t, last in watched:
                self.lock.telling = t.name or t.op
                self.watches.tell(t, last)
        finally:
            self.lock.telling = ""


class Scheduler:
    """Runs graphs on several backends, the first that supports a node first.

    All graphs share one compute buffer per backend, as large as the largest of them needs: outputs of one are to be
    read before the next one runs. `backends` are names or Backend objects.

    Each call holds `lock`. Threads that share a scheduler hold it themselves (`with scheduler.lock:`) from `alloc`, or
    from setting the inputs, until they have read the outputs. `watches`: the taps and edits that see values while
    graphs run.
    """

    def __init__(self, backends: Sequence[str | Backend] = ("cpu", "ref"), n_threads: int | None = None) -> None:
        if isinstance(backends, str) or not isinstance(backends, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BackendError(f"backends must be a list of names or Backend objects, not {backends!r}")
        made = [b if isinstance(b, Backend) else new_backend(b, n_threads) for b in backends]
        if not made:
            raise BackendError("a scheduler needs at least one backend")
        self.backends: dict[str, Backend] = {b.name: b for b in made}
        self.lock = Lock()
        self.watches = Watches()
        self._last: ref[Schedule] | None = None
        self._pins: dict[int, tuple[ref[Tensor], str]] = {}  # by id: tensors are not compared with ==
        self._buffers: dict[str, Buffer] = {}
        self._ready: WeakKeyDictionary[Graph, Schedule] = WeakKeyDictionary()

    def __repr__(self) -> str:
        sizes = [f"{name} ({self.buffer_size(name)} bytes)" for name in self.backends]
        return f"<Scheduler {', '.join(sizes)}; {len(self._pins)} pinned nodes, {len(self._ready)} graphs>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise not_sent(
            self, "it holds memory and threads of this process. Make one there, with backends of the same names"
        )

    # -- what users call ------------------------------------------------------------------------------------------

    @changing
    def set_tensor_backend(self, t: Tensor, backend: str | None) -> None:
        """Pin a node to a backend for the graphs planned from now on; None takes the pin off again.

        A pin does not keep its node alive. Raises BackendError when the backend is none of this scheduler's, or has no
        code for the node, or cannot reach the memory that the node writes into.
        """
        if not isinstance(t, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            how = ": the node comes before the backend" if isinstance(backend, Tensor) else ""
            raise GraphError(f"only nodes run on a backend, not {type(t).__name__}{how}")
        b = None if backend is None else self._backend(backend)
        if t.op == "none":
            raise GraphError(f"only nodes run on a backend; {t.describe()} is a leaf")
        if b is None or backend is None:
            self._pins.pop(id(t), None)
        elif OPS[t.op].kernel is not None and not b.supports_op(t):
            raise BackendError(f"{backend} has no code for {t.op} of these types ({t.describe()})")
        else:
            pins, key = self._pins, id(t)
            pins[key] = ref(t, lambda _: pins.pop(key, None)), backend
        self._ready.clear()

    @property
    def varies(self) -> bool:
        """Whether all its backends run graphs with sizes that are bound when they run."""
        return all(getattr(b, "varies", False) for b in self.backends.values())

    @property
    def last(self) -> Schedule | None:
        """The schedule of the graph that was planned or run last, as long as it lives."""
        return self._last and self._last()

    @property
    def splits(self) -> list[Split]:
        """The splits of `last`."""
        last = self.last
        return last.splits if last else []

    @locked
    def reserve(self, graph: Graph) -> None:
        """Make the compute buffers large enough for `graph`, without touching its tensors."""
        _, plan = self.plan(graph)
        self._grow(plan)

    @changing
    def alloc(self, graph: Graph) -> Schedule:
        """Plan `graph`, unless that was done and the graph is unchanged: its tensors get memory, its nodes are
        compiled. Inputs can then be set. Raises BackendError when a node writes into read-only memory (the weights of a
        model), GraphError for nodes that use the same memory in another order than the program (`pyggml.hazards`)."""
        check_graph("alloc", graph)
        ready = self._ready.get(graph)
        moved = ready is not None and any(b is not self._buffers.get(n) for n, b in ready.buffers.items())
        if ready is None or moved or ready.key != _key(graph, self.watches):
            ready = self._make(graph)
            self._ready[graph] = ready
        else:
            ready.place()
        self._last = ref(ready)
        return ready

    @locked
    def compute(self, graph: Graph) -> None:
        """Run `graph`, whose inputs have been set. Raises GraphError for one that has no value, BackendError naming the
        node that failed."""
        schedule = self.alloc(graph)
        require_values(graph)
        schedule.run()

    def buffer_size(self, backend: str) -> int:
        """Bytes of the compute buffer of a backend."""
        return 0 if (b := self._buffers.get(self._backend(backend).buft)) is None else b.size

    @locked
    def assignment(self, graph: Graph) -> str:
        """The splits and the backend of every node, one line each; fused nodes stand together."""
        lines: list[str] = []
        for i, split in enumerate(self.alloc(graph).splits):
            lines.append(f"split {i} on {split}")
            for step in split.steps:
                lines += [f"  {step.fusion}:"] * bool(step.fusion)
                lines += [f"  {'  ' * bool(step.fusion)}{t.op:<14} {t.describe()}" for t in step.nodes]
        return "\n".join(lines)

    # -- the passes -----------------------------------------------------------------------------------------------

    def _backend(self, name: str) -> Backend:
        try:
            return self.backends[name]
        except KeyError:
            raise BackendError(f"no backend {name!r} here; there are {', '.join(self.backends)}") from None

    def assign(self, graph: Graph) -> dict[Tensor, str]:
        """Pass 1: a backend for each node: its pin, else the first in priority order that supports it. Raises
        BackendError for a node that none can compute."""
        own: dict[Tensor, str] = {}
        first = next(iter(self.backends))
        pins = {t: name for weak, name in self._pins.values() if (t := weak()) is not None}
        done = {} if pins or len(self.backends) > 1 else own  # of nodes that stand for those that repeat them
        for t in graph.nodes:
            if (pin := pins.get(t)) is None and (OPS[t.op].kernel is None or (t.like in done and t.view_src is None)):
                own[t] = first
                continue
            own[t] = pin or self._first_supporting(t, own)
            if pin is not None and not self._can_write(pin, t, own):
                raise node_error(t, f"{own[t]} cannot write into the memory of {t.root.describe()}")
        return own

    def _can_write(self, backend: str, t: Tensor, own: Mapping[Tensor, str]) -> bool:
        """Whether `backend` reaches the memory that `t` writes through a view. Host memory is reached by every backend
        that computes on the host."""
        roots = written_by(t)
        if not roots:
            return True
        b, devices = self.backends[backend], {*Buffer.device_types}
        bufts = [self._buft_of(root, own) for root in roots]
        return all(b.supports_buft(buft) or not {b.buft, buft} & devices for buft in bufts)

    def _buft_of(self, root: Tensor, own: Mapping[Tensor, str]) -> str:
        """The buffer type that `root` is or will be in; `own`: the backends of nodes."""
        if root.buffer is not None and not root.flags & FLAG_PLANNED:
            return root.buffer.buft
        return self.backends[own.get(root) or next(iter(self.backends))].buft

    def _first_supporting(self, t: Tensor, own: Mapping[Tensor, str]) -> str:
        for name, b in self.backends.items():
            if b.supports_op(t) and self._can_write(name, t, own):
                return name
        text = f"none of {', '.join(self.backends)} has code for {t.op} of these types"
        where = "" if t.view_src is None else f" and can write into {t.root.describe()}"
        to_add = "register_kernel gives it a kernel; " if OPS[t.op].known is None else ""
        how = "" if "ref" in self.backends else f"; {to_add}the backend ref computes every op by its definition"
        raise BackendError(f"{text}{where} ({t.describe()}){how}")

    def _split(self, graph: Graph, names: Mapping[Tensor, str], buft_of: Callable[[Tensor], str]) -> list[Split]:
        """Pass 2: cut where the backend changes, and note what each split needs copied before it runs.

        Views compute nothing and stay with the split they are in. A source whose memory was written in the same split
        (a cache that was just stored to) cannot be copied before it: the graph is cut there too.
        """
        roots = {t if t.view_src is None else t.view_src for t in (*graph.leafs, *graph.nodes)}
        used, bufts = {*names.values()}, {*map(buft_of, roots)}
        if len(used) == 1 and all(map(self.backends[min(used)].supports_buft, bufts)):
            return [Split(min(used), [*names])]
        splits: list[Split] = []
        written: set[Tensor] = set()
        reached: dict[str, set[Tensor]] = {name: set() for name in self.backends}  # what each reads where it is
        for t, name in names.items():
            if OPS[t.op].kernel is None and splits:
                splits[-1].nodes.append(t)
                continue
            known = reached[name]
            unknown = [s for s in t.src if s is not None and s.root not in known]
            needs = {s: None for s in unknown if self._needs_copy(s, t, name, buft_of)}
            known.update(s.root for s in unknown if s not in needs and s.root is not t.view_src)
            copied = splits[-1].inputs if splits else {}
            stale = any(s.root in written for s in t.src if s is not None and (s in needs or s in copied))
            if not splits or splits[-1].backend != name or stale:
                splits.append(Split(name))
                written.clear()
            splits[-1].nodes.append(t)
            for s in needs:
                if s not in splits[-1].inputs:
                    splits[-1].inputs[s] = _copy_of(s, name)
            written.update(written_by(t))
        return splits

    def _needs_copy(self, s: Tensor, t: Tensor, backend: str, buft_of: Callable[[Tensor], str]) -> bool:
        """Whether `backend` cannot read source `s` of `t` where it is. What `t` writes through is never copied."""
        if OPS[t.op].kernel is None or any(s.root is root for root in written_by(t)):
            return False
        return not self.backends[backend].supports_buft(buft_of(s.root))

    @locked
    def plan(self, graph: Graph, watched: Collection[Tensor] = ()) -> tuple[list[Split], alloc.Plan]:
        """All passes: how the backends would run `graph` with these nodes `watched`, and where results would lie.
        Nothing is allocated. Raises BackendError as `alloc`, and GraphError for a hazard (`pyggml.hazards`)."""
        check_graph("plan", graph)
        _refuse_read_only(graph)
        check_hazards(graph.nodes, graph)
        own = self.assign(graph)
        splits = self._split(graph, own, lambda root: self._buft_of(root, own))
        uses = Counter([s for t in graph.nodes for s in t.src if s is not None])
        uses.update(watched)  # a watcher reads the node, so that it is not fused away
        for split in splits:
            if not getattr(self.backends[split.backend], "varies", False):
                _refuse_sizes(split)
            split.steps = self.backends[split.backend].fuse(split.nodes, uses)
        steps = [step for split in splits for step in split.steps]
        plan = alloc.plan(steps, pool_of=lambda t: self.backends[own[t]].buft)
        for split in splits:  # copies live beside the plan for the whole run
            pool = self.backends[split.backend].buft
            for copy in split.inputs.values():
                at = plan.sizes.get(pool, 0)
                plan.offsets[copy] = (pool, at)
                plan.lives[copy] = (0, plan.n_steps - 1)
                plan.sizes[pool] = at + -(-largest(copy.nbytes) // 64) * 64
        return splits, plan

    def _grow(self, plan: alloc.Plan) -> None:
        for pool, size in plan.sizes.items():
            if (have := self._buffers.get(pool)) is None or have.size < size:
                self._buffers[pool] = Buffer.allocate(size, pool)

    def _make(self, graph: Graph) -> Schedule:
        for t in graph.leafs:
            if t.buffer is None:
                t.allocate(next(iter(self.backends.values())).buft)
                t.flags |= FLAG_UNSET
        watched = self.watches.of(graph.nodes)
        splits, plan = self.plan(graph, watched.keys())
        self._grow(plan)
        buffers = {pool: self._buffers[pool] for pool in plan.sizes}
        schedule = Schedule(splits, plan, buffers, _key(graph, self.watches), self.watches, self.lock)
        schedule.place()
        for split in splits:
            copies, backend = split.inputs, self.backends[split.backend]
            for cut in _cuts(split.steps, watched, backend):
                split.parts.append(Part(backend.compile(cut.steps, lambda s, copies=copies: copies.get(s, s)), cut))
        return schedule


def _cuts(steps: Sequence[alloc.Step], watched: Mapping[Tensor, bool], backend: Backend) -> list[Cut]:
    """The steps in cuts. A cut ends after a step that computes a watched node, and before a step that needs other
    streamed weights in memory."""
    if not watched and all(b.streamed is None for b in backend.reads(alloc.joined(steps))):
        return [Cut(steps, (), ())]
    cuts, begin, streamed = list[Cut](), 0, ()
    for i, step in enumerate(steps):
        needs = tuple(dict.fromkeys(b.streamed for b in backend.reads(step) if b.streamed is not None))
        if needs and needs != streamed and begin < i:  # not before: it may take what was just computed
            cuts.append(Cut(steps[begin:i], (), streamed))
            begin = i
        streamed = needs or streamed
        nodes = tuple((t, watched[t]) for t in step.nodes if t in watched)
        if nodes:
            cuts.append(Cut(steps[begin : i + 1], nodes, streamed))
            begin, streamed = i + 1, ()
    if begin < len(steps):
        cuts.append(Cut(steps[begin:], (), streamed))
    return cuts


def _refuse_read_only(graph: Graph) -> None:
    for t in [t for t in graph.nodes if t.flags & FLAG_STORE]:
        for root in written_by(t):
            if root.buffer is not None and not root.buffer.writable:
                raise node_error(t, f"the result would be written into {root.describe()}, which is read-only")


def _refuse_sizes(split: Split) -> None:
    for t in split.nodes:
        sizes = [n for s in (t, *t.src) if s is not None for n in (*s.ne, *s.nb)]
        if OPS[t.op].kernel is not None and Size in map(type, sizes):
            raise node_error(t, f"the backend {split.backend} does not run sizes that follow from Vars")


def _copy_of(s: Tensor, backend: str) -> Tensor:
    """An unplaced tensor of the same layout, for a copy of `s` on `backend`."""
    copy = Tensor(s.ctx, s.dtype, s.ne, s.nb, s.rank, s.site)
    copy.name = f"{s.name} (copy on {backend})"
    return copy
