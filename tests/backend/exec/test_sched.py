"""The scheduler on two real backends: assignment, pins, splits, copies, reserve; and the executor's edges."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, CpuProgram, isa_levels, lower
from pyggml.llm.interrupt import uninterrupted
from pyggml.native.threads import n_cpus
from pyggml.tensor import Tensor

from ...child import in_child


def network(ctx: gg.Context) -> tuple[gg.Graph, Tensor, Tensor]:
    rng = np.random.default_rng(1)
    w = ctx.from_numpy(rng.standard_normal((16, 8)), name="w")
    x = ctx.new_tensor(gg.F32, (8, 4), "x").set_input()
    h = gg.silu(gg.mul_mat(w, x))
    cache = ctx.new_tensor(gg.F16, (16, 4), "cache")
    cache.allocate()
    store = gg.cpy(h, gg.view_2d(cache, 16, 4, cache.nb[1], 0))
    k = gg.view_2d(cache, 16, 4, cache.nb[1], 0)
    y = gg.soft_max(gg.mul_mat(k, gg.rms_norm(h, 1e-5)))
    z = gg.add(y, gg.scale_inplace(gg.dup(y), 0.5)).set_name("z")
    return gg.Graph().build_forward_expand(store).build_forward_expand(z), x, z


X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


def run(pins: set[int]) -> tuple[np.ndarray, gg.Scheduler, gg.Graph]:
    with gg.Context() as ctx:
        g, x, z = network(ctx)
        sched = gg.Scheduler(("cpu", "ref"), n_threads=2)
        for i in pins:
            sched.set_tensor_backend(g.nodes[i], "ref")
        sched.alloc(g)
        x.set(X)
        sched.compute(g)
    return z.numpy().copy(), sched, g


ALL_CPU = run(set())[0]
N_NODES = run(set())[2].n_nodes


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, N_NODES - 1)))
def test_any_node_may_run_on_ref(pins: set[int]) -> None:
    np.testing.assert_allclose(run(pins)[0], ALL_CPU, rtol=2e-4, atol=1e-6)


def test_splits_copies_and_assignment() -> None:
    _, sched, g = run({0})
    assert [s.backend for s in sched.splits] == ["ref", "cpu"]
    assert {t.name for t in sched.splits[0].inputs} == {"w", "x"}
    text = sched.assignment(g)
    assert "split 0 on ref" in text and "mul_mat" in text and "copies w, x" in text
    assert sched.buffer_size("cpu") > 0 and sched.buffer_size("ref") > 0
    _, sched, g = run(set())
    assert len(sched.splits) == 1
    del g
    assert sched.splits == [], "a scheduler keeps no graph alive"


def test_reserve_makes_room_for_the_worst_case() -> None:
    def graph(ctx: gg.Context, n: int) -> tuple[gg.Graph, Tensor, Tensor]:
        x = ctx.new_tensor(gg.F32, (n,)).set_input()
        y = gg.sqr(gg.sqr(x))
        return gg.Graph().build_forward_expand(y), x, y

    with gg.Context() as ctx:
        sched = gg.Scheduler(("cpu",))
        large, _, _ = graph(ctx, 4096)
        small, x, y = graph(ctx, 4)
        sched.reserve(large)
        size = sched.buffer_size("cpu")
        schedule = sched.alloc(small)
        x.set(np.full(4, 2.0))
        sched.compute(small)
        assert y.numpy().tolist() == [16.0] * 4
        assert sched.buffer_size("cpu") == size >= 4096 * 4
        assert sched.alloc(small) is schedule, "a graph is planned once"


def test_scheduler_errors() -> None:
    with gg.Context() as ctx:
        g, x, _ = network(ctx)
    sched = gg.Scheduler(("cpu", "ref"))
    with pytest.raises(gg.BackendError, match="cuda"):
        sched.set_tensor_backend(g.nodes[0], "cuda")
    with pytest.raises(gg.GraphError, match="leaf"):
        sched.set_tensor_backend(x, "ref")
    with pytest.raises(gg.BackendError, match="at least one"):
        gg.Scheduler(())
    for n in (0, 1.5, "2"):
        with pytest.raises(gg.BackendError, match=f"a whole number from 1, not {n!r}"):
            gg.Scheduler(("cpu",), n_threads=n)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("backend", ["cpu", "ref"])
@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1])
def test_row_index_out_of_range_is_caught_at_run_time(backend: str, bad: int) -> None:
    with gg.Context() as ctx:
        rows = ctx.from_numpy(np.ones((5, 8), np.float32), name="rows")
        ids = ctx.new_tensor(gg.I32, (3,), "ids").set_input()
        y = gg.get_rows(rows, ids)
    g = gg.Graph().build_forward_expand(y)
    with pytest.raises(gg.GGMLError) as e:
        gg.compute(g, inputs={ids: np.array([0, bad, 1])}, backend=backend)
    assert "get_rows" in str(e.value) and str(bad) in str(e.value) and "test_sched.py" in str(e.value)
    gg.compute(g, inputs={ids: np.array([0, 4, 1])}, backend=backend)
    assert (y.numpy() == 1).all()


def test_an_impossible_isa_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGGML_ISA", "altivec")
    with pytest.raises(gg.BackendError, match=r"altivec.*generic"):
        CpuBackend()
    monkeypatch.setenv("PYGGML_ISA", "generic")
    assert CpuBackend().isa == "generic" and "generic" in isa_levels()


def chain(n_nodes: int, n: int) -> tuple[gg.Graph, Tensor, Tensor]:
    ctx = gg.Context()
    x = ctx.new_tensor(gg.F32, (n,)).set_input()
    y = x
    for i in range(n_nodes):
        y = gg.add(y, x) if i % 2 else gg.scale(y, 0.5)
    return gg.Graph().build_forward_expand(y), x, y


def test_plans_run_at_the_same_time_from_several_python_threads() -> None:
    def work(seed: int) -> None:
        g, x, y = chain(40, 30_000)
        value = np.random.default_rng(seed).standard_normal(30_000).astype(np.float32)
        want = value
        for i in range(40):
            want = want + value if i % 2 else want * np.float32(0.5)
        for _ in range(20):
            gg.compute(g, {x: value}, n_threads=2)
            np.testing.assert_allclose(y.numpy(), want, rtol=1e-6)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_one_plan_for_all_thread_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    compile_ = CpuBackend.compile

    def count(self: CpuBackend, *args: Any) -> Any:
        compiled.append(self.n_threads)
        return compile_(self, *args)

    monkeypatch.setattr(CpuBackend, "compile", count)
    g, x, y = chain(6, 100_000)
    for value, n_threads in enumerate((1, 2, None)):
        gg.compute(g, {x: np.full(100_000, value)}, n_threads)
        assert np.all(y.numpy() == 1.875 * value)
    assert len(compiled) == 1


def test_little_work_wakes_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "_SHARE", 4000.0)  # the harness of the op tests shares everything
    for n, n_threads in ((100, 1), (20_000, 1), (1_000_000, 2)):
        g, *_ = chain(1, n)
        program = gg.Scheduler(("cpu",), n_threads=2).alloc(g).programs[0]
        assert isinstance(program, CpuProgram)
        assert program.lowered.n_threads == min(n_threads, n_cpus())


def test_a_run_can_be_aborted_and_run_again() -> None:
    g, x, y = chain(4000, 100_000)
    sched = gg.Scheduler(("cpu",), n_threads=2)
    schedule = sched.alloc(g)
    x.set(np.ones(100_000))
    program = schedule.programs[0]
    threading.Timer(0.01, program.abort).start()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(gg.BackendError, match="aborted"):
        for _ in range(1000):
            schedule.run()
    schedule.run()
    assert np.isfinite(y.numpy()).all()


def test_a_forked_child_starts_its_own_threads() -> None:
    g, x, y = chain(10, 50_000)
    gg.compute(g, {x: np.ones(50_000)}, n_threads=2)

    def compute() -> None:
        gg.compute(g, {x: np.ones(50_000)}, n_threads=2)
        assert np.isfinite(y.numpy()).all()

    in_child(compute)


def test_ctrl_c_stops_a_long_run() -> None:
    g, x, _ = chain(3000, 1_000_000)
    sched = gg.Scheduler(("cpu",), n_threads=2)
    schedule = sched.alloc(g)
    x.set(np.ones(1_000_000))
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        schedule.run()
        pytest.fail("the run went on to its end")
    timer.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_waits_for_a_run_that_must_be_whole() -> None:
    g, x, y = chain(100, 1_000_000)
    schedule = gg.Scheduler(("cpu",), n_threads=2).alloc(g)
    x.set(np.ones(1_000_000))
    schedule.run()
    expected = np.array(y.numpy())
    y.numpy()[:] = 0
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        timer.start()
        while timer.is_alive() or time.perf_counter() - start < 0.05:  # also in the middle of a run
            schedule.run(interruptible=False)
        finished = True
    assert finished and np.array_equal(y.numpy(), expected)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
