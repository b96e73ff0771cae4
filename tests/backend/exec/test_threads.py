"""Several threads at once: one plan, one graph, one backend; aborts; how many workers a job wakes; forks meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, lower
from pyggml.native.threads import n_cpus

from ...child import in_child
from .test_sched import chain

N = 20_000


@pytest.fixture(autouse=True)
def share_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small ops are shared between threads."""
    monkeypatch.setattr(lower, "_SHARE", -1.0)


def expected(value: float, n_nodes: int = 12) -> np.float32:
    y = v = np.float32(value)
    for i in range(n_nodes):
        y = y + v if i % 2 else y * np.float32(0.5)
    return y


def in_threads(work: Callable[[int], None], n: int = 8) -> None:
    with ThreadPoolExecutor(n) as pool:
        list(pool.map(work, range(n)))


@pytest.mark.parametrize("n_threads", [1, 2])
def test_threads_that_share_a_graph_take_turns(n_threads: int) -> None:
    g, x, y = chain(12, N)

    def work(i: int) -> None:
        for k in range(20):
            value = 1 + i + k / 32
            with g.lock:
                gg.compute(g, {x: np.full(N, value)}, n_threads=n_threads)
                got = np.array(y.numpy())
            assert np.all(got == expected(value)), (i, k)

    in_threads(work)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_threads_that_share_a_plan(n_threads: int) -> None:
    """Each run is whole, with a lock around it (who reads what it gave needs one) and without."""
    g, x, y = chain(12, N)
    schedule = gg.Scheduler(("cpu",), n_threads).alloc(g)
    x.set(np.full(N, 3.0))

    def work(i: int) -> None:
        for _ in range(60):
            if i % 2:
                schedule.run()
                continue
            with schedule.lock:
                schedule.run()
                assert np.all(y.numpy() == expected(3.0))

    in_threads(work)
    assert np.all(y.numpy() == expected(3.0))


@pytest.mark.parametrize("n_threads", [1, 2])
def test_graphs_on_one_backend_do_not_share_scratch_at_the_same_time(n_threads: int) -> None:
    """Products that convert their second factor into the scratch memory of the backend first."""
    backend = CpuBackend(n_threads)
    w = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)

    def work(i: int) -> None:
        ctx = gg.Context()
        a, b = ctx.from_numpy(w, gg.F16), ctx.new_tensor(gg.F32, (512, 24)).set_input()
        product = gg.mul_mat(a, b)
        g, value = gg.Graph().build_forward_expand(product), np.full((24, 512), float(i + 1))
        gg.compute(g, {b: value}, backend=CpuBackend(1))  # pyright: ignore[reportArgumentType]
        want = np.array(product.numpy())
        for _ in range(30):
            gg.compute(g, {b: value}, backend=backend)  # pyright: ignore[reportArgumentType]
            assert np.array_equal(product.numpy(), want), i

    in_threads(work)


def test_abort_is_for_the_run_that_is_under_way() -> None:
    g, x, y = chain(12, N)
    schedule = gg.Scheduler(("cpu",), n_threads=2).alloc(g)
    x.set(np.ones(N))
    schedule.programs[0].abort()  # pyright: ignore[reportAttributeAccessIssue]
    schedule.run()
    assert np.all(y.numpy() == expected(1.0))


def test_more_cpus_than_the_pool_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(300))
    assert n_cpus() == CpuBackend().n_threads == CpuBackend(1000).n_threads == 256

    def compute() -> None:
        g, x, y = chain(2, 1 << 20)
        gg.compute(g, {x: np.ones(1 << 20)})
        assert np.all(y.numpy() == expected(1.0, 2))

    in_child(compute)


def test_a_job_wakes_the_workers_that_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))

    def switches() -> dict[str, int]:
        tasks = {t: (t / "status").read_text() for t in Path("/proc/self/task").iterdir()}
        return {t.name: int(text.split("voluntary_ctxt_switches:")[1].split()[0]) for t, text in tasks.items()}

    def count() -> None:
        for n_threads in (12, 2):
            g, x, _ = chain(12, N)
            schedule = gg.Scheduler(("cpu",), n_threads).alloc(g)
            x.set(np.ones(N))
            schedule.run()
            time.sleep(0.2)  # all asleep again
        before = switches()
        for _ in range(10):
            schedule.run()
            time.sleep(0.01)
        after = switches()
        assert len(after) >= 12 and sum(after[t] != before[t] for t in after) <= 2, (before, after)

    in_child(count)


def test_workers_leave_signals_to_the_program() -> None:
    """A signal that the program blocks, to fetch it with `sigwait`, would end the process in a worker."""

    def wait() -> None:
        g, x, _ = chain(12, N)
        gg.compute(g, {x: np.ones(N)}, n_threads=2)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.sigwait({signal.SIGUSR1}) == signal.SIGUSR1

    in_child(wait)


def test_threads_that_record_in_one_context() -> None:
    ctx, other = gg.Context(), gg.Context()
    barrier = threading.Barrier(8)

    def work(_: int) -> None:
        for _ in range(20):
            with ctx:
                barrier.wait()  # all blocks are open
                with other:
                    assert gg.Context.current() is other
                assert gg.Context.current() is ctx
            assert gg.Context.current() is None

    in_threads(work)


def test_a_child_forked_during_a_run() -> None:
    """It computes graphs of its own; the graph that another thread was computing is refused there."""
    busy, x, _ = chain(200, N)
    free, z, y = chain(12, N)
    at_work, stop = threading.Event(), threading.Event()

    def work() -> None:
        with busy.lock:
            while not stop.is_set():
                gg.compute(busy, {x: np.ones(N)}, n_threads=2)
                at_work.set()

    def compute() -> None:
        gg.compute(free, {z: np.full(N, 2.0)}, n_threads=2)
        assert np.all(y.numpy() == expected(2.0))
        with pytest.raises(gg.BackendError, match="was forked"):
            gg.compute(busy, {x: np.ones(N)}, n_threads=2)

    gg.compute(free, {z: np.ones(N)}, n_threads=2)
    thread = threading.Thread(target=work)
    thread.start()
    at_work.wait()
    try:
        for _ in range(5):
            in_child(compute)
    finally:
        stop.set()
        thread.join()
