"""Runs one op case on the reference and on the C kernels of one instruction set, and compares.

Every tensor's memory lies between guard bytes, and so does the scratch memory of each op. They must be intact after
each run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from ..backends.cpu import CpuBackend
from ..backends.cpu.backend import CpuProgram
from ..backends.cpu.isa import Kernel
from ..backends.cpu.record import record_of
from ..backends.protocol import Program, Resolve
from ..backends.ref import compute_node
from ..buffers.alloc import Step
from ..buffers.buffer import Buffer
from ..codec import Array
from ..dtypes import DType
from ..errors import DTypeError, explain
from ..graph import Graph
from ..opdef import opdef_of, written_by
from ..ops import permute, view_4d
from ..tensor import Context, Tensor
from .cells import see

GUARD = 1024  # bytes
BEYOND = 1 << 16  # bytes beside scratch memory, where a thread's part lies behind another's
FILL = 0x7F  # fills guard bytes: huge as F32 and BF16, NaN as F16, so that it shows when someone reads them
_LEAST = 2.0**-126  # half of the smallest number of F32, times 2^24; see `nmse`
Values = Callable[[np.random.Generator, tuple[int, ...]], Array]
Outcome = tuple[Array, bytes]  # elements, and as they are stored


def gaussian(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Normal values, 1 in 97 of them twenty times as large."""
    x = rng.standard_normal(shape)
    return np.where(rng.integers(0, 97, shape) == 0, x * 20, x)


@dataclass(frozen=True)
class Src:
    """One source tensor of a case: `ne` as the op sees it, and how it is stored."""

    dtype: DType
    ne: tuple[int, ...]
    permute: tuple[int, int, int, int] | None = None  # stored densely so that permute(stored, *permute) has `ne`
    pad: int = 0  # stored with rows this many elements longer, seen through a view
    values: Values | None = None  # (rng, 4-d NumPy shape) -> values; default: gaussian with outliers


@dataclass(frozen=True)
class Case:
    """`build` records the op on the sources; `nmse` bounds the error (0.0: equal bit for bit)."""

    srcs: tuple[Src | None, ...]
    build: Callable[..., Tensor]
    nmse: float
    seed: int = 0


def guarded(nbytes: int, guard: int = GUARD) -> Buffer:
    """Memory of `nbytes` bytes, with `guard` bytes before and after it. All of it is FILL."""
    buffer = Buffer.allocate(nbytes + 2 * guard)
    buffer.memory[:] = FILL
    return buffer


def check_guarded(buffer: Buffer, nbytes: int, what: str, guard: int = GUARD) -> None:
    """Check that nothing was written beside the `nbytes` bytes of `guarded`. Raises Mismatch."""
    m = buffer.memory
    for side, memory in (("before", m[:guard]), ("after", m[guard + nbytes :])):
        if not (memory == FILL).all():
            raise Mismatch(f"bytes {side} {what} were overwritten")


def place(t: Tensor) -> None:
    """Give a tensor memory between guard bytes."""
    t.buffer, t.offset = guarded(t.nbytes), GUARD


def check_guards(t: Tensor) -> None:
    """Check that nothing was written beside a tensor that `place` has placed. Raises Mismatch."""
    assert t.buffer is not None
    check_guarded(t.buffer, t.nbytes, t.describe())


def fill(t: Tensor, values: Array) -> None:
    """Store values in a tensor of any type."""
    try:
        t.store(values.astype(np.int64) if t.dtype.name.startswith("I") and not t.dtype.is_quantized else values)
    except DTypeError:  # a type that the gguf package reads but does not write
        from ..backends.quantize import quantize

        data = quantize(values.astype(np.float32).reshape(-1, t.ne[0]), t.dtype)
        t.raw()[...] = np.frombuffer(data, np.uint8)


def make_source(ctx: Context, spec: Src | None, rng: np.random.Generator) -> Tensor | None:
    """A tensor as `spec` says, with values. None for a source that is absent."""
    if spec is None:
        return None
    ne = (*spec.ne, *(1,) * (4 - len(spec.ne)))
    if spec.permute is not None:
        stored_ne = tuple(ne[spec.permute[i]] for i in range(4))
    else:
        stored_ne = (ne[0] + spec.pad, *ne[1:])
    t = ctx.new_tensor(spec.dtype, stored_ne)
    place(t)
    fill(t, np.asarray((spec.values or gaussian)(rng, t.ne[::-1])))
    if spec.permute is not None:
        return permute(t, *spec.permute)
    if spec.pad:
        return view_4d(t, ne[0], ne[1], ne[2], ne[3], t.nb[1], t.nb[2], t.nb[3], 0)
    return t


def outcome(t: Tensor) -> Outcome:
    """What a tensor holds now."""
    return np.array(t.elements()), t.tobytes()


def record_case(case: Case) -> Tensor:
    """The op of `case` on sources that have their values."""
    rng = np.random.default_rng(case.seed)
    with Context() as ctx:
        return case.build(*[make_source(ctx, s, rng) for s in case.srcs])


# -- comparing ------------------------------------------------------------------------------------------------------


class Mismatch(AssertionError):
    """A kernel does not do what the reference does."""


def check_places(got: Array, want: Array) -> None:
    """Check that NaN and infinities are where the reference has them. Raises Mismatch."""
    inf = np.isinf(want)
    for text, wrong in (
        ("NaN in other places than in the reference", np.isnan(got) != np.isnan(want)),
        ("infinities in other places than in the reference", (np.isinf(got) | inf) & (got != want)),
    ):
        if wrong.any():
            raise Mismatch(f"{text}; {_at(got, want, wrong)}")


def _at(got: Array, want: Array, wrong: Array) -> str:
    """For the message: the first element that is wrong."""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"element {list(at[::-1])} (by ne) is {got[at]}, the reference has {want[at]}"


def nmse(got: Array, want: Array) -> float:
    """Squared error over squared reference, where both are finite. Raises Mismatch when NaN or infinities are in other
    places.

    Errors of less than `_LEAST` do not count: F32 cannot tell numbers below its smallest one, and kernels multiply what
    they have rounded there (`silu(-100)` is -100 times 4e-44) by operands of less than 2^24.
    """
    got, want = got.astype(np.float64), want.astype(np.float64)
    check_places(got, want)
    finite = np.isfinite(want)
    power = float(np.sum(want[finite] ** 2))
    error = float(np.sum(np.maximum(np.abs(got[finite] - want[finite]) - _LEAST, 0) ** 2))
    return error / power if power else error


def tolerance(dtype: DType, roundings: float = 4.0) -> float:
    """The NMSE of a result of type `dtype` when each element is off by `roundings` roundings: (roundings * u)^2. Here u
    is 2^-24 for F32 (kernels compute in F32), 2^-11 for F16, and 2^-8 for BF16. It is 0.0 for integers and block types,
    which must be equal bit for bit.

    A sum of k products adds roundings: about sqrt(k) when all of them have one sign. Sums that cancel have no bound of
    this kind; draw values that do not cancel.
    """
    bits = {DType.F64: 24, DType.F32: 24, DType.F16: 11, DType.BF16: 8}.get(dtype)
    return 0.0 if bits is None else (roundings * 2.0**-bits) ** 2


def compare(got: Outcome, want: Outcome, limit: float) -> None:
    """Raises Mismatch when the NMSE is above `limit`; with a limit of 0.0 when an element is not equal."""
    (a, a_bytes), (b, b_bytes) = got, want
    if b.dtype.kind == "i" or limit == 0.0:
        if a_bytes != b_bytes and not np.array_equal(a, b, equal_nan=b.dtype.kind == "f"):
            wrong = (a != b) & ~((a != a) & (b != b))
            raise Mismatch(f"the result must be equal; {_at(a, b, wrong)}")
        return
    error = nmse(a, b)
    if error > limit:
        finite = np.isfinite(b)
        worst = np.abs(np.where(finite, a, 0).astype(np.float64) - np.where(finite, b, 0))
        raise Mismatch(f"NMSE {error:.3g} is above {limit:.3g}; worst {_at(a, b, worst == worst.max())}")


# -- running --------------------------------------------------------------------------------------------------------


class GuardedProgram(CpuProgram):
    """Before each run, every op gets scratch memory of its own, between guard bytes. It has as many bytes as the kernel
    asked for. Raises Mismatch after a run that wrote beside it."""

    def run(self, interruptible: bool = True, n_threads: int | None = None) -> None:
        sizes = self.lowered.work_sizes()
        memory = [guarded(n, BEYOND) for n in sizes]
        self.lowered.set_work(np.array([m.base + BEYOND for m in memory], np.int64))
        super().run(interruptible, n_threads)
        for t, m, n in zip(self.lowered.nodes, memory, sizes, strict=True):
            check_guarded(m, n, f"the {n} bytes of scratch memory of {t.describe()}", BEYOND)


class GuardedBackend(CpuBackend):
    """A CpuBackend whose programs are guarded. Graphs with Vars, whose ops may ask for more as they run, are not for
    it."""

    def compile(self, steps: Sequence[Step], resolve: Resolve) -> GuardedProgram:
        program = GuardedProgram(self, steps, resolve)
        assert not program.lowered.needs
        return program


@cache
def _backend(n_threads: int, isa: str) -> GuardedBackend:
    """One for all cases: making it asks the system how many CPUs there are."""
    return GuardedBackend(n_threads, isa)


def compiled(nodes: Sequence[Tensor], isa: str, n_threads: int, kernel: Kernel | None = None) -> Program:
    """The C program for nodes that have memory, at one instruction set. Even the smallest op is shared between the
    threads. The last node is computed by `kernel` when one is given."""
    steps: list[Step] = []
    for t in nodes:
        r = record_of(t, isa)
        if r.shared is None:
            r = replace(r, shared=True)
        if kernel is not None and t is nodes[-1]:
            r = replace(r, kernel=kernel, packed=())
        steps.append(Step((t,), match=r))
    return _backend(n_threads, isa).compile(steps, lambda s: s)


def outcomes(
    node: Tensor, compilers: Iterable[Callable[[list[Tensor]], Program]]
) -> Generator[tuple[Outcome, Outcome]]:
    """What the program that each of `compilers` makes of the graph's nodes computes, and what the reference does, which
    is computed once. Raises Mismatch when a program writes beside its results."""
    g = Graph().build_forward_expand(node)
    for t in g.leafs:
        if t.buffer is None:
            place(t)
    placed = [t for t in g.nodes if t.view_src is None]
    for t in placed:
        place(t)
    owners = [*g.leafs, *placed]
    before = {t: np.array(t.raw()) for t in owners}

    for t in g.nodes:
        compute_node(t)
    want = outcome(node)
    changed = [s for i in opdef_of(node).changes if (s := node.src[i]) is not None]
    wanted = [outcome(s) for s in changed]
    written = {root for t in g.nodes if opdef_of(t).kernel is not None for root in (t.root, *written_by(t))}
    for compile in compilers:
        for t in owners:
            t.raw()[...] = before[t]
        compile(g.nodes).run()
        for t in owners:
            check_guards(t)
        for t in owners:
            if t not in written and not np.array_equal(t.raw(), before[t]):
                raise Mismatch(f"the source {t.describe()} was overwritten")
        for s, old in zip(changed, wanted, strict=True):
            compare(outcome(s), old, tolerance(s.dtype))
        yield outcome(node), want


def at_levels(
    node: Tensor, levels: Iterable[str], n_threads: int, kernel: Kernel | None = None
) -> Generator[tuple[Outcome, Outcome]]:
    """What C computes at each of `levels`, and what the reference does."""
    return outcomes(node, (partial(compiled, isa=isa, n_threads=n_threads, kernel=kernel) for isa in levels))


def run_case(
    case: Case, isa: str | Sequence[str] = "generic", n_threads: int = 1, kernel: Kernel | None = None
) -> None:
    """Check that C at `isa`, at each of several levels, computes `case` as the reference does. Raises Mismatch, naming
    the op and its tensors."""
    node = record_case(case)
    levels = [isa] if isinstance(isa, str) else isa
    found = at_levels(node, levels, n_threads, kernel)
    for level in levels:
        with explained(node, f"{level}, {n_threads} thread{'s' * (n_threads > 1)}"):
            compare(*next(found), case.nmse)
        see(node, level)


@contextmanager
def explained(node: Tensor, where: str) -> Generator[None]:
    """Within it, Mismatch says which op on which tensors was computed, and where. NumPy does not warn of overflows."""
    wrong: Mismatch | None = None
    try:
        with np.errstate(all="ignore"):
            yield
    except Mismatch as e:
        wrong = e
    if wrong is not None:  # raised here, without a context: to hypothesis, one failure is made small whatever its text
        op = opdef_of(node)
        named = [(op.role(i), "None" if s is None else s.describe()) for i, s in enumerate(node.src)]
        at = ", ".join([where, *(f"{name}={value!r}" for name, value in node.op_params.items())])
        raise Mismatch(explain(op.name, f"{wrong} ({at})", [("result", node.describe()), *named], None))
