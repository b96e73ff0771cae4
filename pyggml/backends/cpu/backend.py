"""CpuBackend and its programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from pyggml.native import ffi, lib
from pyggml.native.threads import n_cpus, thread_count

from ...breaker import breaker
from ...buffers.alloc import Step
from ...buffers.buffer import Buffer
from ...errors import Aborted, BackendError
from ...lock import Lock, acting_thread
from ...opdef import OPS
from ...ops.matmul import WITH_WEIGHTS, weights_of
from ...tensor import Tensor
from ..protocol import HostBackend, Resolve, node_error
from .fuse import enabled_fusions, fuse
from .host import HostCalls
from .isa import isa_name, kernel_of
from .lower import lower

Spans = np.ndarray[tuple[int, int, int], np.dtype[np.int64]]
Work = np.ndarray[tuple[int, int], np.dtype[np.float64]]
_NEVER = 2**62  # nanoseconds of the clock: when to try whether one thread is faster
_LONG_NS = 5e6  # from here on Ctrl-C does not wait for the end of the run
_HOST_BUFTS = ("CPU", "CPU_MMAP", "REF")


class CpuProgram:
    """A lowered plan of `steps`. `run()` is one C call that releases the GIL."""

    def __init__(self, backend: CpuBackend, steps: Sequence[Step], resolve: Resolve) -> None:
        self._backend, self._resolve, self.steps = backend, resolve, steps
        self.lowered = low = lower(steps, resolve, backend.isa, backend.n_threads)
        n = len(low.nodes)
        self._chunks = np.zeros(max(n, 1), np.int64)
        self._plan = p = ffi.new("pg_plan *")
        p.ops = ffi.cast("pg_op *", low.ops.__array_interface__["data"][0])
        p.n_ops = n
        self._is_long = low.cost_ns > _LONG_NS
        p.chunks = ffi.cast("int64_t *", self._chunks.__array_interface__["data"][0])
        address = int(ffi.cast("intptr_t", p))
        self._files = ffi.new("int32_t *[]", [file.lost for file in low.files])
        p.files, p.n_files = self._files, len(self._files)
        low.set_plan(address)
        has_calls = any(OPS[t.op].host is not None for t in low.nodes)
        self._calls = HostCalls(address, low.nodes, resolve) if has_calls else None
        if has_calls:
            p.pace.next = _NEVER  # a user who asks for threads gets them
        self._needs = ffi.new("pg_need[]", max(len(low.needs), 1))
        for need, (kernel, i) in zip(self._needs, low.needs, strict=False):
            need.work, need.op = kernel.row.work, i
        p.needs, p.n_needs = self._needs, len(low.needs)
        p.work_size, p.work_threads = low.work_size, backend.n_threads
        self._work_of: list[tuple[int, int]] | None = None  # operations and bytes of each op
        self._work = backend.work(low.work_size)
        low.set_work(self._work.base)
        self._units = {unit: i for i, unit in enumerate(dict.fromkeys(unit for *_, unit in low.binds))}
        self._values = ffi.new("int64_t[]", max(len(self._units), 1))
        self._binds = ffi.new("pg_bind[]", max(len(low.binds), 1))
        for i, (where, base, stride, unit) in enumerate(low.binds):
            b = self._binds[i]
            b.where, b.base = ffi.cast("int64_t *", where), base
            b.stride, b.var = stride, self._units[unit]
        p.binds, p.n_binds = self._binds, len(low.binds)

    def work_now(self) -> Work:
        """Operations and bytes, float64 [n_ops, 2], of each of `lowered.nodes`, as the op's costs say for the values
        that Vars have now."""
        if self._work_of is None:
            self._work_of = _work(self.steps, self.lowered.nodes)
        return np.array([(int(flops), max(int(n), 0)) for flops, n in self._work_of], np.float64).reshape(-1, 2)

    def abort(self) -> None:
        """Ask the run that is under way in another thread to stop before its next op; it raises Aborted there (as
        Ctrl-C does). Without one it does nothing."""
        self._plan.abort = 1

    def run(self, interruptible: bool = True, n_threads: int | None = None) -> None:
        with self._backend.lock:
            n = min(n_threads or self.lowered.n_threads, self.lowered.n_threads)
            for unit, i in self._units.items():
                self._values[i] = int(unit)
            if self._calls is not None:
                self._calls.thread = acting_thread()
            measure = self._backend.measure
            if measure is None:
                status = self._run(n, interruptible)
            else:
                spans = np.zeros((len(self.lowered.nodes), n, 2), np.int64)
                self._plan.spans = ffi.cast("int64_t *", spans.__array_interface__["data"][0])
                status = self._run(n, interruptible)
                self._plan.spans = ffi.NULL
                measure(self, spans)
            if status:
                self._raise(status)

    def _run(self, n_threads: int, interruptible: bool) -> int:
        p, watch = self._plan, self._is_long and interruptible
        if watch and (thread := breaker()) is not None:
            thread.begin(self)
            watch = False
        status = lib.pg_plan_run(p, self._values, n_threads, watch)
        if status == lib.PG_E_WORK:
            self._work = self._backend.work(int(p.bad_value))
            self.lowered.set_work(self._work.base)
            p.work_size = self._work.size
            status = lib.pg_plan_run(p, self._values, n_threads, watch)
        return status

    def _raise(self, status: int) -> None:
        for file in self.lowered.files:
            file.check()
        if status == lib.PG_E_NOMEM:
            raise BackendError("the thread pool could not start its threads")
        if status == lib.PG_E_NESTED:
            raise BackendError("a graph cannot be computed by one of its own nodes")
        node = self.lowered.nodes[int(self._plan.failed_op)]
        if status == lib.PG_E_INDEX:
            raise node_error(node, f"row index {self._plan.bad_value} is out of range")
        if status == lib.PG_E_ABORTED:
            raise node_error(node, "aborted", Aborted)
        returned = int(self._plan.bad_value)
        if self._calls is not None and returned == lib.PG_E_HOST:
            self._calls.reraise(node)
        raise node_error(node, f"kernel status {returned}")


def _work(steps: Sequence[Step], nodes: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Operations and bytes of the steps that end with these nodes. Values that pass between the nodes of one step count
    for no bytes: they are never in memory."""
    of = {step.nodes[-1]: step for step in steps}
    rows: list[tuple[int, int]] = []
    for step in (of[t] for t in nodes):
        costs = [OPS[t.op].cost(t) for t in step.nodes if OPS[t.op].kernel is not None]
        n_bytes = sum(c.read + c.written for c in costs) - 2 * sum(t.nbytes for t in step.inner)
        rows.append((sum(c.flops for c in costs), n_bytes))
    return rows


class CpuBackend(HostBackend):
    """The C kernels, on `n_threads` threads (default: one per core, at most `n_cpus()`) at instruction set `isa`, with
    the fusions named in `fusions` (default: all, or those that PYGGML_FUSE names; see fuse.py). Its programs share
    scratch memory: they run one at a time, under `lock`.

    Raises BackendError for an instruction set that this CPU or build does not have, a thread count below 1, or an
    unknown fusion.

    When `measure` is set, `measure(program, spans)` is called after each run. `spans`, int64 [n_ops, n_threads, 2], are
    the times (nanoseconds of time.perf_counter_ns) at which each thread began and ended the ops of
    `program.lowered.nodes`; 0 for a thread that took no part.
    """

    name = "cpu"
    varies = True

    def __init__(
        self, n_threads: int | None = None, isa: str | None = None, fusions: Collection[str] | None = None
    ) -> None:
        self.isa = isa_name(isa)
        self.fusions = enabled_fusions(fusions)
        self.n_threads = min(thread_count(n_threads), n_cpus())  # more would only wait for each other
        self.lock = Lock()
        self.measure: Callable[[CpuProgram, Spans], None] | None = None
        self._work = Buffer.allocate(0)

    def work(self, size: int) -> Buffer:
        """Scratch memory for a program; grows."""
        with self.lock:
            if size > self._work.size:
                self._work = Buffer.allocate(size)
            return self._work

    def supports_op(self, t: Tensor) -> bool:
        return OPS[t.op].host is not None or kernel_of(self.isa, t) is not None

    def supports_buft(self, buft: str) -> bool:
        return buft in _HOST_BUFTS

    def fuse(self, nodes: Sequence[Tensor], uses: Mapping[Tensor, int]) -> list[Step]:
        return fuse(nodes, uses, self.isa, self.fusions)

    def reads(self, step: Step) -> Iterable[Buffer]:
        weights = [a for t in step.nodes if t.op in WITH_WEIGHTS and (a := weights_of(t)) is not None]
        return [*super().reads(step), *(a.form.copy for a in weights if a.form.copy is not None)]

    def compile(self, steps: Sequence[Step], resolve: Resolve) -> CpuProgram:
        return CpuProgram(self, steps, resolve)
