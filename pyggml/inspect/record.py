"""Record a run: the graph, where its tensors lay, when its steps ran, and the values of its nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pyggml.backends.cpu.backend import CpuProgram, Spans
from pyggml.compute import leafs_of
from pyggml.errors import GraphError
from pyggml.graph import Graph
from pyggml.llm.batch import token_ids
from pyggml.llm.model import Model
from pyggml.llm.options import ContextOptions
from pyggml.sched import Schedule, Scheduler, require_values
from pyggml.tensor import Tensor

from .picture import keys_of
from .profile import Profile, StepTime
from .trace import one_ubatch
from .values import Values, first_rows, values_of

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


_RUNS = 3  # runs of a model: the first one is cold, and other programs disturb


@dataclass(repr=False)
class Run:
    """One run of one graph.

    steps   in the order in which they ran; fused nodes are one step
    values  the values of each node when it was computed, and of each leaf after the run
    """

    graph: Graph
    schedule: Schedule
    steps: list[StepTime]
    wall_ns: int
    n_threads: int
    values: dict[Tensor, Values] = field(default_factory=dict[Tensor, Values])

    def __repr__(self) -> str:
        return f"<Run of {self.graph!r}: {len(self.steps)} steps in {self.wall_ns / 1e6:.3f} ms>"

    @cached_property
    def step_of(self) -> dict[Tensor, StepTime]:
        """The step that computed each node."""
        return {t: s for s in self.steps for t in s.nodes}

    def on(self, graph: Graph) -> tuple[dict[Tensor, StepTime], dict[Tensor, Values]]:
        """The same steps and values, for the nodes of the same names in another graph."""
        mine = {key: t for t, key in keys_of(self.graph).items()}
        twin = {t: mine[key] for t, key in keys_of(graph).items() if key in mine}
        steps = {t: self.step_of[u] for t, u in twin.items() if u in self.step_of}
        return steps, {t: self.values[u] for t, u in twin.items() if u in self.values}


class Recorder(Profile):
    """Records the graphs that a scheduler runs within a `with` block. `run` is the run of the largest graph, with the
    times of its fastest run.

    With `values`, every node is looked at when it is computed; then nothing is fused, and each node runs alone. Raises
    BackendError as `Profile` does.
    """

    def __init__(self, scheduler: Scheduler, values: bool = True) -> None:
        super().__init__(scheduler)
        self.patterns = ("*", "and those that are not the last of their names")
        self._scheduler, self._look = scheduler, values
        self._values: dict[Tensor, Values] = {}
        self._schedules: dict[CpuProgram, Schedule] = {}
        self._times: dict[CpuProgram, tuple[list[StepTime], int]] = {}  # of each program's fastest run

    def asks(self, name: str, last: bool = True) -> bool:
        """See `Watcher.asks`."""
        return True

    def chosen(self, nodes: Sequence[Tensor]) -> Collection[Tensor]:
        """See `Watcher.chosen`."""
        return ()

    def deliver(self, t: Tensor) -> None:
        """See `Watcher.deliver`."""
        self._values[t] = values_of(t.elements()[(*(0,) * (4 - t.rank), ...)])

    def __enter__(self) -> Self:
        super().__enter__()
        if self._look:
            self._scheduler.watches.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._scheduler.watches.remove(self)
        super().__exit__(kind, error, traceback)

    def note(self, program: CpuProgram, spans: Spans) -> None:
        """See `Profile.note`."""
        before = self.wall_ns
        self._steps = []
        self._runs.clear()  # a slower run, whose steps are not needed
        super().note(program, spans)
        ns = self.wall_ns - before
        if program not in self._times or ns < self._times[program][1]:
            self._times[program] = self.steps, ns
        schedule = self._scheduler.last
        if schedule is not None and any(p is program for p in schedule.programs):
            self._schedules[program] = schedule

    @property
    def run(self) -> Run:
        """The recorded run. Raises GraphError when no graph that was planned within the block has run."""
        if not self._schedules:
            raise GraphError("nothing was recorded: no graph was planned and run on the cpu backend within the block")
        schedule = max(self._schedules.values(), key=lambda s: sum(len(split.nodes) for split in s.splits))
        times = [self._times[p] for p in self._schedules if any(p is q for q in schedule.programs)]
        graph = _graph_of(schedule)
        values = {t: v for t, v in self._values.items() if t in graph}
        if self._look:
            values |= {t: values_of(first_rows(t)) for t in graph.leafs if t.root.buffer is not None}
        steps = [s for part, _ in times for s in part]
        return Run(graph, schedule, steps, sum(ns for _, ns in times), self.n_threads, values)


def record(
    graph: Graph,
    inputs: Mapping[Tensor | str, Any] | None = None,
    n_threads: int | None = None,
    backends: Sequence[str] = ("cpu",),
) -> Run:
    """Run `graph` once, as `pyggml.compute` does, and record it: every node runs alone, and its values are kept. Raises
    what `compute` and `Recorder` raise."""
    given = leafs_of(graph, inputs)
    with graph.lock:
        scheduler = Scheduler(backends, n_threads)
        require_values(graph, given)
        with Recorder(scheduler) as recorder:
            schedule = scheduler.alloc(graph)
            for t, value in given.items():
                t.set(value)
            schedule.run()
    return recorder.run


def _graph_of(schedule: Schedule) -> Graph:
    graph = Graph()
    for split in schedule.splits:
        for t in split.nodes:
            graph.build_forward_expand(t)
    return graph


def record_model(model: Model, prompt: str | Sequence[int], **options: Unpack[ContextOptions]) -> Run:
    """Evaluate `prompt` (text, or token ids) in one batch, and record it. Graph, memory and times come from ordinary
    runs with all fusions, of which the fastest of three counts. The values come from another run, in which every node
    is looked at. `options` as for `Model.new_context`.

    Raises ModelError for n_batch or n_ubatch, which follow from the prompt, and what decoding raises.
    """
    ids = model.tokenize(prompt) if isinstance(prompt, str) else [int(i) for i in token_ids(prompt)]
    n = max(len(ids), 1)
    with model.new_context(n, **{**options, **one_ubatch(n, options)}) as ctx:
        with Recorder(ctx.scheduler, values=False) as timed:
            for _ in range(_RUNS):
                ctx.memory.clear()
                ctx.decode(ids)
        ctx.memory.clear()
        with Recorder(ctx.scheduler) as seen:
            ctx.decode(ids)
        run = timed.run
        _, run.values = seen.run.on(run.graph)
    return run
