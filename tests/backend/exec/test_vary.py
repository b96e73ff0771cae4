"""One program for graphs of many sizes: what is linear in the size is patched, anything else is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu.backend import CpuProgram
from pyggml.graph import Graph
from pyggml.sched import Scheduler
from pyggml.tensor import Tensor, Var

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
        self.top: Tensor | None = None

    def build(self, n: int) -> Graph:
        with gg.Context():
            k, v = (gg.view_3d(t, 16, n, t.ne[2], t.nb[1], t.nb[2], 0) for t in (self.k, self.v))
            kq = gg.soft_max_ext(gg.mul_mat(k, self.q), None, 0.25, 0.0)
            out = gg.mul_mat(gg.view_3d(self.v_trans, n, 16, k.ne[2], self.v_trans.nb[1], self.v_trans.nb[2], 0), kq)
            flash = gg.flash_attn_ext(self.q, k, v, None, 0.25)
            both = gg.concat(gg.cont(gg.permute(out, 0, 2, 1, 3)), flash, 3).set_output()
        self.top = self.top or both
        return Graph().build_forward_expand(both)

    def expected(self, n: int) -> np.ndarray:
        k, v, q = (t.numpy().astype(np.float64) for t in (self.k, self.v, self.q))
        s = np.exp(np.einsum("htd,hkd->htk", q, k[:, :n]) * 0.25)
        return np.einsum("htk,hkd->thd", s / s.sum(-1, keepdims=True), v[:, :n])


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("n_kv_heads", [1, 4])
def test_every_size(n_threads: int, n_kv_heads: int) -> None:
    """Also where the op splits its work, and needs its scratch memory, differently from size to size."""
    a = Attention(n_kv_heads)
    n = Var("n", SIZE * 32)
    schedule = Scheduler(("cpu",), n_threads).alloc_varying(a.build, (n,), (32,))
    assert schedule is not None and a.top is not None
    for size in (SIZE * 32, 32, 33, 100, 255, 256, 511, 512, 513, 777, 1024, 1500):
        n.bind(size)
        schedule.run()
        for got in a.top.numpy():
            np.testing.assert_allclose(got, a.expected(size), rtol=1e-5, atol=1e-6)


def test_the_work_of_each_step_follows_the_size() -> None:
    a, n = Attention(4), Var("n", SIZE * 32)
    schedule = Scheduler(("cpu",), 1).alloc_varying(a.build, (n,), (32,))
    assert schedule is not None
    for size in (SIZE * 32, 32, 500):
        n.bind(size)
        alone = Scheduler(("cpu",), 1).alloc(a.build(size))
        for p, q in zip(schedule.programs, alone.programs, strict=True):
            assert isinstance(p, CpuProgram) and isinstance(q, CpuProgram)
            np.testing.assert_allclose(p.work_now(), q.work_now(), rtol=1e-9)


@pytest.mark.parametrize(
    "build",
    [
        lambda t, n: gg.cont(gg.view_1d(t, n * n, 0)),
        lambda t, n: gg.cont(gg.view_1d(t, n - n % 4, 0)),
        lambda t, n: gg.scale(gg.view_1d(t, 4, 0), float(n)),
        lambda t, n: gg.cont(t) if n < 30 else gg.silu(gg.cont(t)),
    ],
    ids=["square", "steps", "parameter", "another graph"],
)
def test_what_is_not_linear_is_refused(build: Callable[[Tensor, int], Tensor]) -> None:
    t = gg.Context().from_numpy(np.arange(4000, dtype=np.float32))

    def graph(n: int) -> Graph:
        with gg.Context():
            return Graph().build_forward_expand(build(t, n).set_output())

    assert Scheduler(("cpu",)).alloc_varying(graph, (Var("n", 49),), (8,)) is None


def test_other_backends_refuse() -> None:
    assert Scheduler(("ref",)).alloc_varying(Attention().build, (Var("n", 64),), (32,)) is None
