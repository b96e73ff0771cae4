"""Record a run: the graph, where its tensors lay, when its steps ran, and the values of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pyggml.backends.cpu.backend import CpuProgram, Spans
from pyggml.codec import Array
from pyggml.errors import GraphError
from pyggml.graph import Graph
from pyggml.llm.batch import token_ids
from pyggml.llm.media_prompt import MediaPrompt
from pyggml.llm.model import Model
from pyggml.llm.options import ContextOptions
from pyggml.run_graph import bound_by, leafs_of
from pyggml.sched import Schedule, Scheduler, require_values
from pyggml.signature import hands_on, keywords_of
from pyggml.tensor import Tensor

from .picture import is_store, keys_of
from .profile import Profile, StepTime
from .trace import one_ubatch
from .values import Values, first_rows, values_of

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


_SHORT_NS = 50_000_000  # waking threads and other programs disturb the times of shorter runs: three are measured


@dataclass(repr=False)
class Run:
    """One run of one graph.

    steps   in the order in which they ran, in nanoseconds from 0 to `wall_ns`; fused nodes are one step
    values  the values of each node when it was computed, and of each leaf after the run
    tokens  the texts of a model's tokens
    """

    graph: Graph
    schedule: Schedule
    steps: list[StepTime]
    wall_ns: int
    n_threads: int
    values: dict[Tensor, Values] = field(default_factory=dict[Tensor, Values])
    tokens: tuple[str, ...] = ()

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
        self._values[t] = values_of(t.elements()[(*(0,) * (4 - t.rank), ...)], planes=True)

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
        steps, wall_ns = list[StepTime](), 0
        for part, ns in (self._times[p] for p in self._schedules if any(p is q for q in schedule.programs)):
            steps += _moved(part, wall_ns)  # programs stand one after another, without what ran between them
            wall_ns += ns
        graph = _graph_of(schedule)
        values = {t: v for t, v in self._values.items() if t in graph}
        if self._look:
            values |= {t: values_of(first_rows(t), planes=True) for t in graph.leafs if t.root.buffer is not None}
        return Run(graph, schedule, steps, wall_ns, self.n_threads, values)


def record(
    graph: Graph,
    inputs: Mapping[Tensor | str, Any] | None = None,
    n_threads: int | None = None,
    backends: Sequence[str] = ("cpu",),
) -> Run:
    """Run `graph` twice as `pyggml.compute` does, and record it. The values come from the first run, in which every
    node is looked at, so that nothing is fused. Graph, memory and times come from the second one, an ordinary run with
    all fusions; when it takes less than 50 ms, it is run three times and the fastest counts.

    Leafs that the graph writes into are as after one run. Raises what `compute` and `Recorder` raise."""
    given = leafs_of(graph, inputs)
    with graph.lock, bound_by(given):
        scheduler = Scheduler(backends, n_threads)
        require_values(graph, given)
        scheduler.alloc(graph)  # gives memory to the leafs that have none
        written = {t.root for t in graph.nodes if is_store(t) and t.root.op == "none"}
        before: dict[Tensor, Array] = {t: t.raw().copy() for t in written}

        def once() -> None:
            schedule = scheduler.alloc(graph)
            for t, data in before.items():
                assert t.buffer is not None
                t.buffer.write(t.offset, data)
            for t, value in given.items():
                t.set(value)
            schedule.run()

        return _recorded(scheduler, once)


def _recorded(scheduler: Scheduler, once: Callable[[], object]) -> Run:
    """What `once` runs: the values of its first run, which also warms memory and caches, and the times of another."""
    with Recorder(scheduler) as looking:
        once()
    seen = looking.run
    with Recorder(scheduler, values=False) as timed:
        once()
        for _ in range(2 if timed.wall_ns < _SHORT_NS else 0):
            once()
    run = timed.run
    _, run.values = seen.on(run.graph)
    return run


def _moved(steps: Sequence[StepTime], to: int) -> list[StepTime]:
    """The same steps, of which the first begins at `to`."""
    by = to - min((begin for s in steps for begin, _ in s.spans.values()), default=0)
    return [replace(s, spans={i: (begin + by, end + by) for i, (begin, end) in s.spans.items()}) for s in steps]


def _graph_of(schedule: Schedule) -> Graph:
    graph = Graph()
    for split in schedule.splits:
        for t in split.nodes:
            graph.build_forward_expand(t)
    return graph


@hands_on(*keywords_of(Model.new_context))
def record_model(model: Model, prompt: str | Sequence[int] | MediaPrompt, **options: Unpack[ContextOptions]) -> Run:
    """Evaluate `prompt` (text, token ids, or one with pictures) in one batch, and record it as `record` does. `options`
    as for `Model.new_context`.

    Raises ModelError for n_batch or n_ubatch, which follow from the prompt, and what decoding raises.
    """
    if isinstance(prompt, str):
        prompt = model.tokenize(prompt)
    ids = [int(i) for i in token_ids(prompt.ids if isinstance(prompt, MediaPrompt) else prompt)]
    whole = prompt if isinstance(prompt, MediaPrompt) else ids
    n = max(len(ids), 1)
    with model.new_context(n, **{**options, **one_ubatch(n, options)}) as ctx:

        def once() -> None:
            ctx.memory.clear()
            ctx.decode(whole)

        run = _recorded(ctx.scheduler, once)
    run.tokens = tuple([model.vocab.token_to_piece(i, special=True).decode(errors="replace") for i in ids])
    return run
