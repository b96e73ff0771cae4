"""CpuBackend and its programs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ...alloc import Step
from ...backend import HostBackend, Resolve, node_error
from ...buffer import Buffer
from ...errors import BackendError
from ...tensor import Tensor, Var
from .._pggml import ffi, lib
from .fuse import enabled_fusions, fuse
from .isa import isa_name, kernel_of, n_cpus
from .lower import lower
from .vary import Variant, vary

_LONG_NS = 5e6  # from here on Ctrl-C does not wait for the end of the run
_HOST_BUFTS = ("CPU", "CPU_MMAP", "REF")


class CpuProgram:
    """A lowered plan. `run()` is one C call that releases the GIL; `op_ns` holds times when profiling is on."""

    def __init__(self, backend: CpuBackend, steps: Sequence[Step], resolve: Resolve) -> None:
        self._backend, self._resolve = backend, resolve
        self.lowered = low = lower(steps, resolve, backend.isa, backend.n_threads)
        n = len(low.nodes)
        self._chunks = np.zeros(max(n, 1), np.int32)
        self._plan = p = ffi.new("pg_plan *")
        p.ops = ffi.cast("pg_op *", low.ops.__array_interface__["data"][0])
        p.n_ops, p.n_threads = n, backend.n_threads
        self._is_long = low.cost_ns > _LONG_NS
        p.chunks = ffi.cast("int32_t *", self._chunks.__array_interface__["data"][0])
        low.set_plan(int(ffi.cast("intptr_t", p)))
        self._bind()
        self.op_ns: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None

    def _bind(self) -> None:
        """Give the plan its scratch memory and what is patched before each run."""
        low, p = self.lowered, self._plan
        self._work = self._backend.work(low.work_size)
        low.set_work(self._work.base)
        self._vars: list[Var] = list(dict.fromkeys(var for *_, var in low.binds))
        self._values = np.zeros(max(len(self._vars), 1), np.int64)
        self._values_c = ffi.from_buffer("int64_t[]", self._values)
        self._binds = ffi.new("pg_bind[]", max(len(low.binds), 1))
        for i, (where, base, stride, var) in enumerate(low.binds):
            b = self._binds[i]
            b.where, b.base = ffi.cast("int64_t *", where), base
            b.stride, b.var = stride, self._vars.index(var)
        p.binds, p.n_binds = self._binds, len(low.binds)

    def vary(self, var: Var, others: Sequence[tuple[int, Sequence[Step]]]) -> bool:
        """See `Program.vary`: False where the records do not depend on it linearly."""
        b = self._backend
        variants = [Variant(value, lower(steps, self._resolve, b.isa, b.n_threads)) for value, steps in others]
        if not vary(self.lowered, var, variants):
            return False
        self._bind()
        return True

    def profile(self) -> None:
        """From now on add the nanoseconds of each step (`lowered.nodes` has their last nodes) to `op_ns`."""
        self.op_ns = np.zeros(len(self.lowered.nodes), np.int64)
        self._plan.op_ns = ffi.cast("int64_t *", self.op_ns.__array_interface__["data"][0])

    def abort(self) -> None:
        """Ask a run in another thread to stop before its next op; it raises BackendError there (as Ctrl-C does)."""
        self._plan.abort = 1

    def run(self, interruptible: bool = True) -> None:
        if self._is_long:
            self._plan.watch = interruptible
        for i, var in enumerate(self._vars):
            self._values[i] = var.value
        status = lib.pg_plan_run(self._plan, self._values_c)
        if status:
            self._raise(status)

    def _raise(self, status: int) -> None:
        self._plan.abort = 0
        if status == lib.PG_E_NOMEM:
            raise BackendError("the thread pool could not start its threads")
        node = self.lowered.nodes[int(self._plan.failed_op)]
        if status == lib.PG_E_INDEX:
            raise node_error(node, f"row index {self._plan.bad_value} is out of range")
        raise node_error(node, "aborted" if status == lib.PG_E_ABORTED else f"kernel status {status}")


class CpuBackend(HostBackend):
    """The C kernels, on `n_threads` threads (default: the CPUs this process may use) at instruction set `isa`, with the
    fusions named in `fusions` (default: all, or those that PYGGML_FUSE names; see fuse.py).

    Raises BackendError for an instruction set that this CPU or build does not have, a thread count below 1, or an
    unknown fusion.
    """

    name = "cpu"

    def __init__(
        self, n_threads: int | None = None, isa: str | None = None, fusions: Collection[str] | None = None
    ) -> None:
        self.isa = isa_name(isa)
        self.fusions = enabled_fusions(fusions)
        wanted = n_cpus() if n_threads is None else n_threads
        if wanted < 1:
            raise BackendError(f"n_threads must be at least 1, not {wanted}")
        self.n_threads = min(wanted, n_cpus())  # more would only wait for each other
        self._work = Buffer.allocate(0)

    def work(self, size: int) -> Buffer:
        """Scratch memory for programs, which never run at the same time; grows."""
        if size > self._work.size:
            self._work = Buffer.allocate(size)
        return self._work

    def supports_op(self, t: Tensor) -> bool:
        return kernel_of(self.isa, t) is not None

    def supports_buft(self, buft: str) -> bool:
        return buft in _HOST_BUFTS

    def fuse(self, nodes: Sequence[Tensor], uses: Mapping[Tensor, int]) -> list[Step]:
        return fuse(nodes, uses, self.isa, self.fusions)

    def compile(self, steps: Sequence[Step], resolve: Resolve) -> CpuProgram:
        return CpuProgram(self, steps, resolve)
