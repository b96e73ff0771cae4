"""Programs whose sizes follow from Vars: recorded, planned and compiled once, they compute for each value what NumPy
does, and bit for bit what the same program of that size does."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.graph import Graph
from pyggml.opdef import OPS
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor
from pyggml.testing import STRATEGIES, Case

from .vary import Recorded, at

Array = np.ndarray[Any, Any]


def quick(max_examples: int) -> settings:
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck))


SIZES = (5, 1, 64, 17, 2)
NANS = np.array([1, np.nan] * 4, np.float32)


# -- against NumPy ----------------------------------------------------------------------------------------------------

F = dict[str, Callable[..., Any]]
BOTH: F = {  # x (n, 8), y (n, 8), z (8, k), with n, k: the same text for tensors and for arrays
    "methods": lambda x, y, z, n, k: x.reshape(n, 2, 4).transpose(1, 0, 2).reshape(2, -1).T,
    "sum": lambda x, y, z, n, k: x.sum(),
    "sum of axes": lambda x, y, z, n, k: x.reshape(n, 2, 4).sum(axis=(0, 2)),
    "sum over n": lambda x, y, z, n, k: x.sum(axis=0, keepdims=True),
    "mean": lambda x, y, z, n, k: x.mean(axis=0) - x.mean(),
    "max and min": lambda x, y, z, n, k: x.max(axis=0) + x.min(axis=1, keepdims=True),
    "var": lambda x, y, z, n, k: x.var(axis=1) + x.var(),
    "product": lambda x, y, z, n, k: x @ z,
    "products of n": lambda x, y, z, n, k: (x @ y.T) @ x,
    "product with a vector": lambda x, y, z, n, k: y.T @ x[:, 0],
    "two Vars": lambda x, y, z, n, k: (x @ z) * (x @ z).max(axis=1, keepdims=True) + z.sum(axis=0),
    "comparison": lambda x, y, z, n, k: (x > y) * x + (x <= 0) * y,
    "count": lambda x, y, z, n, k: (x > 0).sum(axis=0),
    "row against column": lambda x, y, z, n, k: x[:, :1] * y[:, 0] + y[:, 1],
    "index": lambda x, y, z, n, k: x[n - 1] + x[-1] + x[0],
    "slice": lambda x, y, z, n, k: x[:, 2:-2] - y[:n, 4:],
    "slice of k": lambda x, y, z, n, k: (x @ z)[:, k - 1] + (x @ z)[:, -1] + (x @ z)[:, 0],
    "ufuncs": lambda x, y, z, n, k: np.maximum(np.exp(-abs(x)), y) + np.square(x),
    "numbers": lambda x, y, z, n, k: 2 - x / 3 + 1 / (abs(y) + 1) + x**2,
    "array": lambda x, y, z, n, k: x * np.arange(8, dtype=np.float32) - np.float32(2),
}
OWN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "where": (lambda x, y, z, n, k: gg.where(x > y, x, -y), lambda x, y, z, n, k: np.where(x > y, x, -y)),
    "where numbers": (lambda x, y, z, n, k: gg.where(x > 0, 1.0, x), lambda x, y, z, n, k: np.where(x > 0, 1, x)),
    "isnan": (lambda x, y, z, n, k: gg.isnan(x * NANS), lambda x, y, z, n, k: np.isnan(x * NANS).astype(int)),
    **{
        f"einsum {s}": (
            lambda x, y, z, n, k, s=s: gg.einsum(s, x, y) if s.count(",") else gg.einsum(s, x),
            lambda x, y, z, n, k, s=s: np.einsum(s, x, y) if s.count(",") else np.einsum(s, x),
        )
        for s in ("ij,ij->i", "ij,kj->ik", "ij,ik->jk", "ij,ij->", "ij->j", "ij->ji", "ij,ij->ij", "ij,kj->ikj")
    },
    "einsum of two Vars": (
        lambda x, y, z, n, k: gg.einsum("ij,jk->ki", x, z),
        lambda x, y, z, n, k: np.einsum("ij,jk->ki", x, z),
    ),
    "soft_max": (
        lambda x, y, z, n, k: gg.soft_max(x @ y.T),
        lambda x, y, z, n, k: (e := np.exp((s := x @ y.T) - s.max(-1, keepdims=True))) / e.sum(-1, keepdims=True),
    ),
    "causal mask": (
        lambda x, y, z, n, k: gg.where(gg.arange(0, n, 1) <= gg.arange(0, n, 1).reshape(n, 1), x @ y.T, 0.0),
        lambda x, y, z, n, k: np.tril(x @ y.T),
    ),
    "sorted": (lambda x, y, z, n, k: gg.argsort(x.T, "desc"), lambda x, y, z, n, k: np.argsort(-x.T, kind="stable")),
    "top_k": (lambda x, y, z, n, k: gg.top_k(x.T, n), lambda x, y, z, n, k: np.argsort(-x.T, kind="stable")),
    "cumsum": (lambda x, y, z, n, k: gg.cumsum(x.T), lambda x, y, z, n, k: np.cumsum(x.T, axis=1)),
    "concat": (lambda x, y, z, n, k: gg.concat(x, y[:, :4], 0), lambda x, y, z, n, k: np.concatenate([x, y[:, :4]], 1)),
    "longer": (lambda x, y, z, n, k: gg.concat(x, y, 1), lambda x, y, z, n, k: np.concatenate([x, y])),
    "repeat": (lambda x, y, z, n, k: gg.repeat_4d(x[0], 8, 3, n, 1), lambda x, y, z, n, k: np.tile(x[0], (n, 3, 1))),
    "cont_2d": (lambda x, y, z, n, k: gg.cont_2d(x.T, n * 2, 4), lambda x, y, z, n, k: x.T.reshape(4, -1)),
}
PROGRAMS = {name: (f, f) for name, f in BOTH.items()} | OWN


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_plan_computes_what_numpy_does(name: str, backend: str) -> None:
    of_tensors, of_arrays = PROGRAMS[name]
    n, k = gg.Var("n", 64), gg.Var("k", 33)
    with gg.Context() as ctx:
        x, y, z = (ctx.new_tensor(gg.F32, ne, name) for name, ne in (("x", (8, n)), ("y", (8, n)), ("z", (k, 8))))
        out = of_tensors(x, y, z, n, k)
    graph = Graph().build_forward_expand(out + 0 * (z.sum() + y.sum() + x.sum()))
    made = len(ctx.tensors)
    rng = np.random.default_rng(3)
    for i, size in enumerate(SIZES):
        a, b = (rng.standard_normal((size, 8)).astype(np.float32) for _ in range(2))
        c = rng.standard_normal((8, 33 - i)).astype(np.float32)
        gg.compute(graph, {x: a, y: b, z: c}, n_threads=1 + i % 2, backend=backend)
        assert (n.value, k.value) == (size, 33 - i)
        want = of_arrays(a.astype(np.float64), b.astype(np.float64), c.astype(np.float64), size, 33 - i)
        got = graph.nodes[-1].numpy()
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert len(ctx.tensors) == made


# -- against the same program of one size -----------------------------------------------------------------------------

Step = tuple[int, int, int, int]  # which function, its operands, a number
ENDS: list[Callable[[int], int | None]] = [lambda n: None, lambda n: n, lambda n: n - 1, lambda n: 1, lambda n: -1]


def leafs(n: int, k: int) -> list[tuple[int, ...]]:
    """The ne of the leafs."""
    return [(8, n), (n, 2), (k, n), (n,), (4, n, 2), (3, n, k)]


def _axis(x: Tensor, i: int) -> int:
    return i % max(x.rank, 1)


def _key(x: Tensor, n: int, i: int, cut: Any) -> Tensor:
    return x[(*[slice(None)] * _axis(x, i), cut)]


FUNCTIONS: list[Callable[[Tensor, Tensor, int, int], Tensor]] = [
    lambda x, y, n, i: x + y,
    lambda x, y, n, i: x - y * 0.5,
    lambda x, y, n, i: x * y,
    lambda x, y, n, i: x / (abs(y) + 1),
    lambda x, y, n, i: (x @ y) * 0.1,
    lambda x, y, n, i: (x @ y.T) * 0.1,
    lambda x, y, n, i: gg.mul_mat(x, y) * 0.1,
    lambda x, y, n, i: x.T,
    lambda x, y, n, i: x.reshape(-1),
    lambda x, y, n, i: x.reshape(n, -1),
    lambda x, y, n, i: x.reshape(-1, n, 2),
    lambda x, y, n, i: x.reshape(*x.shape, 1),
    lambda x, y, n, i: x.permute(*range(x.rank)[i % 4 :], *range(x.rank)[: i % 4]),
    lambda x, y, n, i: x.sum(axis=_axis(x, i)),
    lambda x, y, n, i: x.mean(axis=_axis(x, i), keepdims=True),
    lambda x, y, n, i: x.max(axis=_axis(x, i), keepdims=i % 2 == 0),
    lambda x, y, n, i: x.min() + y,
    lambda x, y, n, i: x.var(axis=_axis(x, i), keepdims=True),
    lambda x, y, n, i: gg.where(x > y, x, y),
    lambda x, y, n, i: (x <= y) * y,
    lambda x, y, n, i: np.minimum(x, y),
    lambda x, y, n, i: np.exp(-abs(x)),
    lambda x, y, n, i: gg.soft_max(x),
    lambda x, y, n, i: gg.rms_norm(x, 1e-5) * y,
    lambda x, y, n, i: gg.silu(x) * y,
    lambda x, y, n, i: gg.cumsum(x) * 0.1,
    lambda x, y, n, i: gg.concat(x, y, i % 4),
    lambda x, y, n, i: gg.repeat(x, y),
    lambda x, y, n, i: gg.cont(x),
    lambda x, y, n, i: gg.cast(gg.cast(x, gg.F16), gg.F32),
    lambda x, y, n, i: gg.pad(x, i % 3, 1, 0, 0),
    lambda x, y, n, i: gg.get_rows(x.reshape(n, -1), gg.argsort(gg.cont(x.reshape(n, -1)[:, 0]))),
    lambda x, y, n, i: gg.einsum("ij,kj->ik", x, y) * 0.1,
    lambda x, y, n, i: gg.einsum("ij,ij->j", x, y),
    lambda x, y, n, i: gg.einsum("ij->i", x),
    lambda x, y, n, i: gg.add_inplace(gg.cont(x), y),
    lambda x, y, n, i: gg.cpy(x, gg.cont(y)),
    lambda x, y, n, i: _key(x, n, i, slice(ENDS[i % 5](n), None)),
    lambda x, y, n, i: _key(x, n, i, slice(None, ENDS[i % 5](n))),
    lambda x, y, n, i: _key(x, n, i, ENDS[i % 5](n)),
    lambda x, y, n, i: x[..., :: 1 + i % 2],
    lambda x, y, n, i: x[::3],
]


def program(n: int, k: int, steps: Sequence[Step], *, tried: bool = False) -> tuple[list[Tensor], list[Step]]:
    """The leafs and the results, and the steps that could be recorded. Not `tried`: all must be."""
    with gg.Context() as ctx:
        made = [ctx.new_tensor(gg.F32, ne) for ne in leafs(n, k)]
        done: list[Step] = []
        for f, a, b, i in steps:
            try:
                made.append(FUNCTIONS[f % len(FUNCTIONS)](made[-1 - a % len(made)], made[-1 - b % len(made)], n, i))
                done.append((f, a, b, i))
            except (gg.Varies, gg.ShapeError, gg.DTypeError):
                if not tried:
                    raise
    return made, done


def runner(tensors: Sequence[Tensor], backend: str, n_threads: int) -> Callable[[], list[Any]]:
    """What gives their values for the sizes that are now, of one plan."""
    graph = Graph()
    for t in tensors:
        graph.build_forward_expand(t.set_output())
    schedule = Scheduler((backend,), n_threads).alloc(graph)

    def run() -> list[Any]:
        rng = np.random.default_rng(1)
        for t in tensors[: len(leafs(1, 1))]:
            t.set(rng.standard_normal(t.layout[0][::-1][4 - t.rank :]))
        with np.errstate(all="ignore"):
            schedule.run()
        return [(t.numpy().shape, t.tobytes()) for t in tensors]

    return run


@quick(60)
@given(
    st.lists(st.tuples(st.integers(0, len(FUNCTIONS) - 1), *[st.integers(0, 11)] * 3), min_size=3, max_size=12),
    st.integers(1, 40).flatmap(lambda lo: st.tuples(st.just(lo), st.integers(lo, 70))),
    st.sampled_from(["cpu", "cpu", "ref"]),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_a_program_is_the_one_of_each_size(
    steps: list[Step], ends: tuple[int, int], backend: str, n_threads: int, random: Any
) -> None:
    lo, hi = ends
    n, k = gg.Var("n", hi, lo=lo), gg.Var("k", 7)
    tensors, done = program(n, k, steps, tried=True)
    run = runner(tensors, backend, n_threads)
    for size, other in ((hi, 7), (lo, 1), (random.randint(lo, hi), random.randint(1, 7))):
        n.bind(size)
        k.bind(other)
        assert run() == runner(program(size, other, done)[0], backend, n_threads)()


@pytest.mark.parametrize("op", sorted(STRATEGIES))
def test_an_op_is_the_one_of_each_size(op: str) -> None:
    """... or refused for what is not the same for every value."""

    @quick(4)
    @given(STRATEGIES[op], st.data())
    def check(case: Case, data: st.DataObject) -> None:
        of = sorted({k for s in case.srcs if s is not None for k in s.ne if k > 1})
        if not of:
            return
        d = data.draw(st.sampled_from(of))
        lo = data.draw(st.integers(1, d - 1))
        n, n_threads = gg.Var("size", d, lo=lo), data.draw(st.integers(1, 2))
        try:
            var = Recorded(case, d, n)
        except (gg.Varies, gg.ShapeError) as e:
            assert re.search(r"\bsize\b", str(e)) and str(e).split(":")[0] in {*OPS, "new_tensor"}
            return
        var.ready("cpu", n_threads)
        for size in (d, lo, data.draw(st.integers(lo, d))):
            n.bind(size)
            fixed = Recorded(at(case, d, size))
            fixed.ready("cpu", n_threads)
            assert outcome(var) == outcome(fixed)

    check()


def outcome(r: Recorded) -> object:
    try:
        return r.run()
    except gg.BackendError as e:  # indices that are too large: which of them is named is chance
        return re.sub(r"\d+", "N", str(e).splitlines()[0])
