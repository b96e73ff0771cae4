"""Runs one op case on the reference and on the C kernels of one instruction set, and compares.

Every tensor's memory lies between guard bytes, which must be intact after each run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyggml.backends.cpu import CpuBackend, lower
from pyggml.backends.ref import compute_node
from pyggml.buffers.alloc import steps_of
from pyggml.buffers.buffer import Buffer
from pyggml.dtypes import DType
from pyggml.errors import DTypeError
from pyggml.graph import Graph
from pyggml.ops import permute, view_4d
from pyggml.tensor import Context, Tensor

GUARD, FILL = 64, 0xA5
Values = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
Outcome = tuple[np.ndarray, bytes]  # elements, and as they are stored

lower._SHARE = -1.0  # even the smallest op is shared between threads here


def gaussian(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
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
    """`build` records the op on the sources; `nmse` bounds the error (0.0: equal bit for bit), `tiles` is what operands
    of two bf16 add to that (csrc/attention/flash_attn_amx.c)."""

    srcs: tuple[Src | None, ...]
    build: Callable[..., Tensor]
    nmse: float
    seed: int = 0
    tiles: float = 0.0


def guarded(nbytes: int) -> Buffer:
    buffer = Buffer.allocate(nbytes + 2 * GUARD)
    buffer.memory[:] = FILL
    return buffer


def place(t: Tensor) -> None:
    t.buffer, t.offset = guarded(t.nbytes), GUARD


def check_guards(t: Tensor) -> None:
    assert t.buffer is not None
    m = t.buffer.memory
    assert (m[:GUARD] == FILL).all(), f"bytes before {t.describe()} were overwritten"
    assert (m[GUARD + t.nbytes :] == FILL).all(), f"bytes after {t.describe()} were overwritten"


def fill(t: Tensor, values: np.ndarray) -> None:
    try:
        t.store(values.astype(np.int64) if t.dtype.name.startswith("I") and not t.dtype.is_quantized else values)
    except DTypeError:  # a type that the gguf package reads but does not write
        from pyggml.backends.quantize import quantize

        data = quantize(values.astype(np.float32).reshape(-1, t.ne[0]), t.dtype)
        t.raw()[...] = np.frombuffer(data, np.uint8)


def make_source(ctx: Context, spec: Src | None, rng: np.random.Generator) -> Tensor | None:
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
        return view_4d(t, *ne, t.nb[1], t.nb[2], t.nb[3], 0)
    return t


def outcome(t: Tensor) -> Outcome:
    return np.array(t.elements()), t.tobytes()


def check_places(got: np.ndarray, want: np.ndarray) -> None:
    """Assert that NaN and infinities are where the reference has them."""
    assert np.array_equal(np.isnan(got), np.isnan(want)), "NaN in other places than the reference"
    inf = np.isinf(want)
    assert np.array_equal(np.isinf(got), inf) and np.array_equal(got[inf], want[inf]), "infinities differ"


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    """Squared error over squared reference, where both are finite; NaN and infinities must agree in place."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    check_places(got, want)
    finite = np.isfinite(want)
    power = float(np.sum(want[finite] ** 2))
    error = float(np.sum((got[finite] - want[finite]) ** 2))
    return error / power if power else error


def record_case(case: Case) -> Tensor:
    """The op of `case` on sources that have their values."""
    rng = np.random.default_rng(case.seed)
    with Context() as ctx:
        return case.build(*[make_source(ctx, s, rng) for s in case.srcs])


def both(node: Tensor, isa: str, n_threads: int) -> tuple[Outcome, Outcome]:
    """What C at `isa` computes, and what the reference does. C must not write beside its tensors."""
    g = Graph().build_forward_expand(node)
    for t in g.leafs:
        if t.buffer is None:
            place(t)
    placed = [t for t in g.nodes if t.view_src is None]
    for t in placed:
        place(t)
    owners = [*g.leafs, *placed]
    before = {t: t.raw().copy() for t in owners}

    for t in g.nodes:
        compute_node(t)
    want = outcome(node)
    for t in owners:
        t.raw()[...] = before[t]

    CpuBackend(n_threads, isa).compile(steps_of(g.nodes), lambda s: s).run()
    got = outcome(node)
    for t in owners:
        check_guards(t)
    return got, want


def run_case(case: Case, isa: str, n_threads: int) -> None:
    """Assert that C at `isa` computes `case` as the reference does."""
    (got, got_bytes), (want, want_bytes) = both(record_case(case), isa, n_threads)
    if want.dtype.kind == "i":
        assert np.array_equal(got, want)
    elif case.nmse == 0.0:
        assert got_bytes == want_bytes or np.array_equal(got, want, equal_nan=True)
    else:
        error = nmse(got, want)
        limit = case.nmse + (case.tiles if isa == "amx" else 0)
        assert error <= limit, f"NMSE {error:.3g} > {limit:.3g}"


__all__ = ["Case", "Src", "both", "check_places", "gaussian", "nmse", "record_case", "run_case"]
