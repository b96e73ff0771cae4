"""Where the time goes: when each thread began and ended each step of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from pyggml.backends.cpu.backend import CpuBackend, CpuProgram, Spans, Work
from pyggml.errors import BackendError, one_of
from pyggml.sched import Scheduler
from pyggml.scope import common, scopes_of
from pyggml.tensor import Tensor

from .layers import layer_of_node

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class StepTime:
    """One step of one run, which computed `nodes`. `name` and `op` are the last node's; `op` of fused nodes is the
    fusion's name. begin and end have, for each thread that took part, nanoseconds of time.perf_counter_ns. flops and
    bytes come from the op's cost."""

    nodes: tuple[Tensor, ...]
    name: str
    op: str
    spans: dict[int, tuple[int, int]]
    flops: int
    n_bytes: int

    @property
    def ns(self) -> int:
        """From the first thread's begin to the last one's end."""
        return max(end for _, end in self.spans.values()) - min(begin for begin, _ in self.spans.values())

    @property
    def layer(self) -> str:
        """The layer that the step's name says: `3` for `Qcur-3` and `layer 3/Qcur`, `encoder/layer 3` and `head` for
        those of other scopes, "" for none."""
        return layer_of_node(self.name)

    @property
    def scope(self) -> str:
        """The scope in which all its nodes were made: `layer 3/attention`."""
        return "/".join(common([scopes_of(t.name) for t in self.nodes]))


@dataclass
class Row:
    """A sum over steps: how many, their time from begin to end, the time that all threads worked, flops and bytes."""

    key: str
    n: int = 0
    ns: int = 0
    busy_ns: int = 0
    flops: int = 0
    n_bytes: int = 0

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second."""
        return self.n_bytes / self.ns if self.ns else 0.0

    @property
    def gflops(self) -> float:
        """10^9 floating-point operations per second."""
        return self.flops / self.ns if self.ns else 0.0


class Profile:
    """Measures, step by step, the graphs that the cpu backend of a scheduler (`ctx.scheduler` of a context) runs within
    a `with` block.

    wall_ns     nanoseconds within runs
    n_threads   the largest number of threads that took part in a run
    """

    def __init__(self, scheduler: Scheduler) -> None:
        if not isinstance(scheduler, Scheduler):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BackendError(f"a Scheduler is measured (ctx.scheduler, of a context), not {type(scheduler).__name__}")
        found = [b for b in scheduler.backends.values() if isinstance(b, CpuBackend)]
        if not found:
            raise BackendError(f"only the cpu backend is measured; here are {', '.join(scheduler.backends)}")
        self._backend = found[0]
        self._runs: list[tuple[CpuProgram, Spans, Work]] = []  # runs that are not turned into steps yet
        self._steps: list[StepTime] = []
        self.wall_ns, self.n_threads = 0, 1

    def __enter__(self) -> Self:
        if self._backend.measure is not None:
            raise BackendError("this backend is being measured already")
        self._backend.measure = self.note
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._backend.measure = None

    def note(self, program: CpuProgram, spans: Spans) -> None:
        """See `CpuBackend.measure`."""
        ran = spans[spans > 0]
        self.wall_ns += int(ran.max() - ran.min()) if len(ran) else 0
        self.n_threads = max(self.n_threads, spans.shape[1])
        self._runs.append((program, spans, program.work_now()))

    @property
    def steps(self) -> list[StepTime]:
        """The steps in the order in which they ran. Steps that an interrupted run did not reach are left out."""
        for program, spans, work in self._runs:
            of = {step.nodes[-1]: step for step in program.steps}
            for node, threads, (flops, n_bytes) in zip(
                program.lowered.nodes, spans.tolist(), work.tolist(), strict=True
            ):
                step = of[node]
                times = {i: (begin, end) for i, (begin, end) in enumerate(threads) if end}
                if times:
                    op = step.fusion or node.op
                    self._steps.append(StepTime(step.nodes, node.name, op, times, round(flops), round(n_bytes)))
        self._runs.clear()
        return self._steps

    def table(self, by: Literal["op", "layer", "scope"] = "op") -> list[Row]:
        """The steps summed up by `op` (the longest first), by `layer` (those of a model in order, then others as they
        ran), or by `scope`, all that was made in one (`layer 3/attention`, as they ran).
        Raises BackendError for another `by`."""
        one_of("by", by, ("op", "layer", "scope"), BackendError)
        rows: dict[str, Row] = {}
        for s in self.steps:
            key = s.op if by == "op" else s.layer if by == "layer" else s.scope
            row = rows.setdefault(key, Row(key))
            row.n, row.ns, row.flops, row.n_bytes = (
                row.n + 1,
                row.ns + s.ns,
                row.flops + s.flops,
                row.n_bytes + s.n_bytes,
            )
            row.busy_ns += sum(end - begin for begin, end in s.spans.values())
        if by == "op":
            return sorted(rows.values(), key=lambda r: -r.ns)
        if by == "layer":
            return sorted(rows.values(), key=lambda r: int(r.key) if r.key.isdecimal() else inf if r.key else -1)
        return list(rows.values())

    @property
    def idle(self) -> float:
        """The part of the threads' time, from 0 to 1, in which they had nothing to do during runs."""
        busy = sum(end - begin for s in self.steps for begin, end in s.spans.values())
        return max(0.0, 1 - busy / (self.wall_ns * self.n_threads)) if self.wall_ns else 0.0


def time_line(profiles: Iterable[Profile]) -> dict[str, Any]:
    """The steps as JSON for Perfetto and chrome://tracing: a row for each thread, times in microseconds since the first
    step."""
    events = [e for p in profiles for s in p.steps for e in _events(s)]
    start = min((e["ts"] for e in events), default=0.0)
    return {"traceEvents": [e | {"ts": e["ts"] - start} for e in events], "displayTimeUnit": "ns"}


def _events(s: StepTime) -> Iterable[dict[str, Any]]:
    what = {"name": s.name, "cat": s.op, "ph": "X", "pid": 0, "args": {"flops": s.flops, "bytes": s.n_bytes}}
    for thread, (begin, end) in s.spans.items():
        yield what | {"tid": thread, "ts": begin / 1e3, "dur": (end - begin) / 1e3}
