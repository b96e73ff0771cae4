"""One graph for many sizes: elements that follow from a Var are bound when it runs, anything else is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu.backend import CpuProgram
from pyggml.backends.ref import RefBackend
from pyggml.graph import Graph
from pyggml.sched import Scheduler
from pyggml.tensor import Size, Tensor, Var
from pyggml.var import Varies, largest

SIZE = 48


class Attention:
    """softmax(k q) v over the first n rows of a cache, in memory that all sizes share."""

    def __init__(self, n_kv_heads: int = 1) -> None:
        rng = np.random.default_rng(5)
        self.ctx = gg.Context()
        self.k, self.v, self.q = (
            self.ctx.from_numpy(rng.standard_normal((n_kv_heads, n, 16)).astype(np.float32))
            for n in (SIZE * 32, SIZE * 32, 3)
        )
        self.v_trans = self.ctx.from_numpy(self.v.numpy().swapaxes(1, 2).copy())

    def build(self, n: int) -> Graph:
        with gg.Context():
            k, v = (gg.view_3d(t, 16, n, t.ne[2], t.nb[1], t.nb[2], 0) for t in (self.k, self.v))
            kq = gg.soft_max_ext(gg.mul_mat(k, self.q), None, 0.25, 0.0)
            out = gg.mul_mat(gg.view_3d(self.v_trans, n, 16, k.ne[2], self.v_trans.nb[1], self.v_trans.nb[2], 0), kq)
            flash = gg.flash_attn_ext(self.q, k, v, None, 0.25)
            both = gg.concat(gg.cont(gg.permute(out, 0, 2, 1, 3)), flash, 3).set_output()
        return Graph().build_forward_expand(both)

    def expected(self, n: int) -> np.ndarray:
        k, v, q = (t.numpy().astype(np.float64) for t in (self.k, self.v, self.q))
        s = np.exp(np.einsum("htd,hkd->htk", q, k[:, :n]) * 0.25)
        return np.einsum("htk,hkd->thd", s / s.sum(-1, keepdims=True), v[:, :n])


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("n_kv_heads", [1, 4])
@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_every_size(n_threads: int, n_kv_heads: int, backend: str) -> None:
    """Also where the op splits its work, and needs its scratch memory, differently from size to size."""
    a, n = Attention(n_kv_heads), Var("n", SIZE * 32, lo=32)
    graph = a.build(n * 1)
    schedule = Scheduler((backend,), n_threads).alloc(graph)
    for size in (SIZE * 32, 32, 33, 100, 255, 256, 511, 512, 513, 777, 1024, 1500):
        n.bind(size)
        schedule.run()
        for got in graph.nodes[-1].numpy():
            np.testing.assert_allclose(got, a.expected(size), rtol=1e-5, atol=1e-6)


def test_every_size_across_backends() -> None:
    """What is copied at the borders of splits has the size of the run."""
    a, n = Attention(4), Var("n", SIZE * 32, lo=32)
    graph = a.build(n * 1)
    scheduler = Scheduler(("cpu", "ref"))
    scheduler.set_tensor_backend(next(t for t in graph.nodes if t.op == "soft_max"), "ref")
    schedule = scheduler.alloc(graph)
    assert len(schedule.splits) == 3
    for size in (SIZE * 32, 32, 777):
        n.bind(size)
        schedule.run()
        for got in graph.nodes[-1].numpy():
            np.testing.assert_allclose(got, a.expected(size), rtol=1e-5, atol=1e-6)


def test_results_have_the_size_of_the_run() -> None:
    n = Var("n", 8, lo=1)
    with gg.Context() as ctx:
        x = ctx.from_numpy(np.arange(16, dtype=np.float32).reshape(2, 8))
        y = gg.scale(gg.view_2d(x, n * 1, 2, x.nb[1], 0), 2.0).set_output()
    schedule = Scheduler(("cpu",)).alloc(Graph().build_forward_expand(y))
    for size in (8, 1, 5):
        n.bind(size)
        schedule.run()
        assert np.array_equal(y.numpy(), 2 * x.numpy()[:, :size])
        assert y.tobytes() == y.numpy().tobytes()


def test_the_work_of_each_step_follows_the_size() -> None:
    a, n = Attention(4), Var("n", SIZE * 32, lo=32)
    schedule = Scheduler(("cpu",), 1).alloc(a.build(n * 1))
    for size in (SIZE * 32, 32, 500):
        n.bind(size)
        alone = Scheduler(("cpu",), 1).alloc(a.build(size))
        for p, q in zip(schedule.programs, alone.programs, strict=True):
            assert isinstance(p, CpuProgram) and isinstance(q, CpuProgram)
            np.testing.assert_allclose(p.work_now(), q.work_now(), rtol=1e-9)


@pytest.mark.parametrize(
    "build",
    [
        lambda t, n: gg.view_1d(t, n - n % 4, 0),
        lambda t, n: gg.scale(t, float(n)),
        lambda t, n: gg.scale(t, 1 / n),
        lambda t, n: gg.scale(t, n),
        lambda t, n: t * n,
        lambda t, n: t if n < 30 else gg.silu(t),
        lambda t, n: gg.add(gg.view_1d(t, n, 0), gg.view_1d(t, 4, 0)),
    ],
    ids=["steps", "float", "quotient", "parameter", "factor", "another graph", "shapes"],
)
def test_what_is_not_the_same_for_every_value_is_refused(build: Callable[[Tensor, int], Tensor]) -> None:
    t = gg.Context().from_numpy(np.arange(4000, dtype=np.float32))
    with gg.Context(), pytest.raises(Varies, match=r"n \(8\.\.49\)|n follows from a Var"):
        build(t, Var("n", 49, lo=8) * 1)


def test_sizes_are_compared_for_every_value() -> None:
    n = Var("n", 10, lo=2)
    size = 3 * n + 6
    assert isinstance(size, Size) and int(size) == 12 and largest(size) == 36
    assert size > 11 and size < 37 and size >= 12 and not size > 36 and size > n * 2
    assert size == 3 * n + 6 and size != 36 and size != 3 * Var("n", 10, lo=2) + 6
    assert size - 3 * n == 6 and not isinstance(size - 3 * n, Size)
    assert (size % 3, size // 3) == (0, n + 2) and (100 - size) + size == 100
    for undecided in (
        lambda: size < 20,
        lambda: size >= 20,
        lambda: max(20, size),
        lambda: size > n * 4,
        lambda: len([0] * size),
    ):
        with pytest.raises(Varies):
            undecided()


def test_a_backend_that_takes_numbers_alone_is_known() -> None:
    class Other(RefBackend):
        varies = False

    assert Scheduler(("cpu", "ref")).varies and not Scheduler(("cpu", Other())).varies
