"""Checks an op, a C function or a backend: compares it with the references in cases that are drawn at random."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hypothesis import assume
from hypothesis import strategies as st

from ..backends.cpu.isa import Function, Kernel, isa_levels, own_kernel, table_of
from ..backends.protocol import Backend, new_backend
from ..buffers.alloc import steps_of
from ..buffers.buffer import Buffer
from ..dtypes import DType
from ..errors import BackendError, nearest
from ..graph import Graph
from ..opdef import OPS, OpDef
from ..sched import Scheduler
from ..tensor import Tensor
from .draw import cases_of
from .gradients import has_gradients
from .harness import Case, Outcome, compare, explained, outcome, outcomes, record_case, run_case
from .search import Cases, cases_for, search
from .strategies import STRATEGIES


def levels_of(op: str) -> list[str]:
    """The instruction sets that have a kernel of their own for this op (views have none: any will do)."""
    stem = OPS[op].kernel
    return [name for name in isa_levels() if stem in table_of(name)] or ["generic"]


def check_op(
    op: OpDef,
    cases: Cases | None = None,
    *,
    isa: str | Sequence[str] | None = None,
    max_examples: int | None = None,
) -> None:
    """Look for a case in which the C kernels of `op` do not give what its reference gives, on one thread or two. When
    `op` has a gradient and `isa` is not given, look for a case whose gradient is wrong, too (`check_gradient`).

    cases         the strategy that draws cases; default: pyggml's, and `cases_of(op)` for an op of one's own
    isa           an instruction set or several, each of which computes every case; default: all instruction sets that
                  have their own kernel
    max_examples  how many cases; default: as the profile of hypothesis says

    Sources are dense, padded and permuted; memory lies between guard bytes. Raises Mismatch for the smallest case that
    was found, BackendError when a kernel is missing or fails.
    """
    _check_op(op)
    if op.kernel is None and op.name not in STRATEGIES:
        raise BackendError(f"{op.name} has no kernel to check: name one in its OpDef, and register_kernel it")

    levels = levels_of(op.name) if isa is None else isa

    def check(case: Case, n_threads: int) -> None:
        run_case(case, levels, n_threads)

    drawn = cases_for(op, cases)
    search(check, op.name, max_examples, drawn, st.sampled_from([1, 2]))
    if op.grad is not None and isa is None:
        has_gradients(op, drawn, max_examples)


def check_kernel(
    op: OpDef,
    function: Function,
    dst: DType,
    *srcs: DType | None,
    work: Function = 0,
    cases: Cases | None = None,
    max_examples: int | None = None,
) -> None:
    """Look for a case in which a C function does not do what the reference of `op` does. It need not be registered, and
    `op` may be one of pyggml's.

    The function and its types are given as to `register_kernel`; `cases` and `max_examples` as to `check_op`. Cases of
    other types are left out. Raises Mismatch for the smallest case that was found, BackendError when the function
    fails.
    """
    _check_op(op)
    kernel: Kernel = own_kernel(op, function, work)
    if cases is None and op.name not in STRATEGIES:
        rows = [row for row, result in op.dtypes.items() if row[: len(srcs)] == srcs and result is dst]
        if not rows:
            raise BackendError(f"{op.name} has no row of dtypes for {[t and t.name for t in srcs]} -> {dst.name}")
        cases = st.sampled_from(rows).flatmap(lambda row: cases_of(op, types=row))

    def check(case: Case, n_threads: int) -> None:
        node = record_case(case)
        own = [None if s is None else s.dtype for s in node.src[: len(srcs)]]
        assume(node.op == op.name and node.dtype is dst and own == [*srcs])
        run_case(case, "generic", n_threads, kernel)

    search(check, op.name, max_examples, cases_for(op, cases), st.sampled_from([1, 2]))


def check_backend(
    backend: str | Backend, ops: Collection[str] | None = None, *, max_examples: int | None = None
) -> list[str]:
    """Look for a case that a backend says it supports, but computes differently from the references.

    backend       the backend, or the name under which it is registered
    ops           names of ops; default: all that have a strategy
    max_examples  how many cases for each op; default: as the profile of hypothesis says

    A backend that reads host memory computes between guard bytes. Another backend gets its tensors from a scheduler.
    Returns the ops that the backend has computed. Raises Mismatch, and BackendError when it has computed no op.
    """
    b = new_backend(backend) if isinstance(backend, str) else backend
    computed: dict[str, None] = {}
    for name in ops or ():
        if name not in OPS:
            near = ", ".join(nearest(str(name), OPS)) or "none"
            raise BackendError(f"check_backend: no op is called {name!r:.60}; near: {near}")

    def check(case: Case) -> None:
        node = record_case(case)
        if not all(b.supports_op(t) for t in Graph().build_forward_expand(node).nodes if OPS[t.op].kernel is not None):
            return
        with explained(node, b.name):
            found = _both_on(b, case, node)
            if found is not None:
                computed[node.op] = None
                compare(*found, case.nmse)

    for name in sorted(STRATEGIES if ops is None else ops):
        search(check, name, max_examples, cases_for(OPS[name], None))
    if not computed:
        raise BackendError(f"the backend {b.name} has computed none of these ops: its supports_op refused all cases")
    return list(computed)


def _check_op(op: object) -> None:
    if not isinstance(op, OpDef):
        how = "of one's own; pyggml's are pyggml.opdef.OPS['silu'] ..."
        raise BackendError(f"the definition of an op (OpDef) is checked, not {op!r:.60}: one {how}")


def _both_on(b: Backend, case: Case, node: Tensor) -> tuple[Outcome, Outcome] | None:
    """What a backend computes, and what the reference does. None when the scheduler gives the node to another one."""
    if b.buft not in Buffer.device_types:
        return next(outcomes(node, [lambda nodes: b.compile(steps_of(nodes), lambda s: s)]))
    found: list[Outcome] = []
    for sched, t in ((Scheduler([b, "ref"]), node), (Scheduler(["ref"]), record_case(case))):
        graph = Graph().build_forward_expand(t)
        if t is node and sched.assign(graph)[t] != b.name:
            return None
        sched.compute(graph)
        found.append(outcome(t))
    return found[0], found[1]
