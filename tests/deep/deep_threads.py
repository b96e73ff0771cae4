"""Threads and forks at random: every number is compared with what one thread alone computes."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, lower
from pyggml.backends.cpu import backend as cpu_backend
from pyggml.llm.context import LlamaContext
from pyggml.llm.state import save_load as state
from pyggml.sched import Schedule
from pyggml.tensor import Tensor
from tests.child import in_child
from tests.tiny_model import write_gguf

from . import SECONDS

N_THREADS = 8


@pytest.fixture(autouse=True)
def many_cpus_all_ops_shared_all_runs_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    monkeypatch.setattr(lower, "_SHARE", -1.0)
    monkeypatch.setattr(cpu_backend, "_LONG_NS", 0)


@pytest.fixture
def model(tmp_path: Path) -> gg.Model:
    return gg.load_model(write_gguf(tmp_path / "tiny.gguf"))


def counted(work: Callable[[np.random.Generator], str], n: int = N_THREADS) -> Counter[str]:
    """`work` again and again in n threads until the time is over; how often it returned what. Failures are raised."""
    counts: Counter[str] = Counter()
    failures: list[BaseException] = []
    end = time.monotonic() + SECONDS

    def loop(seed: int) -> None:
        rng = np.random.default_rng([seed, time.time_ns()])
        try:
            while time.monotonic() < end and not failures:
                counts[work(rng)] += 1
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=loop, args=(i,), daemon=True) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(max(0.0, end - time.monotonic()) + 60)
        assert failures or not t.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]
    print(f"\n{dict(counts)}")
    return counts


class Product:
    """soft_max(w x + x'), and what one thread alone makes of some inputs."""

    def __init__(self, rng: np.random.Generator) -> None:
        n, m, k = int(rng.integers(1, 40)), int(rng.integers(1, 80)), 32 * int(rng.integers(1, 9))
        ctx = gg.Context()
        dtype = (gg.F32, gg.F16, gg.Q8_0, gg.Q4_0)[rng.integers(4)]
        w = rng.standard_normal((m, k)).astype(np.float32)
        a = ctx.from_bytes(gg.quantize(w, dtype), dtype, (k, m)) if dtype.is_quantized else ctx.from_numpy(w, dtype)
        self.x = ctx.new_tensor(gg.F32, (k, n)).set_input()
        self.y: Tensor = gg.soft_max(gg.mul_mat(a, gg.silu(self.x)))
        self.graph = gg.Graph().build_forward_expand(self.y)
        self.values = [rng.standard_normal((n, k)).astype(np.float32) for _ in range(4)]
        self.wanted = [self.run(v, CpuBackend(1)) for v in self.values]

    def run(self, value: np.ndarray, backend: CpuBackend) -> np.ndarray:
        with self.graph.lock:
            gg.compute(self.graph, {self.x: value}, backend=backend)  # pyright: ignore[reportArgumentType]
            return np.array(self.y.numpy())


def test_graphs_and_backends_shared_by_threads() -> None:
    seeds = np.random.default_rng()
    products = [Product(seeds) for _ in range(12)]
    backends = [CpuBackend(n) for n in (1, 1, 2, 3, 6)]

    def work(rng: np.random.Generator) -> str:
        p, backend, i = products[rng.integers(12)], backends[rng.integers(5)], int(rng.integers(4))
        assert np.array_equal(p.run(p.values[i], backend), p.wanted[i])
        return f"{backend.n_threads} threads"

    counted(work)


def test_schedules_run_and_aborted_by_threads() -> None:
    seeds = np.random.default_rng()
    made: list[tuple[Product, Schedule]] = []
    for n in (1, 2, 3, 6):
        p = Product(seeds)
        schedule = gg.Scheduler(("cpu",), n).alloc(p.graph)
        p.x.set(p.values[0])
        made.append((p, schedule))

    def work(rng: np.random.Generator) -> str:
        p, schedule = made[rng.integers(4)]
        if rng.integers(4) == 0:
            schedule.programs[0].abort()  # pyright: ignore[reportAttributeAccessIssue]
            return "abort"
        with schedule.lock:
            try:
                schedule.run()
            except gg.BackendError as e:
                assert "aborted" in str(e)
                return "aborted"
            assert np.array_equal(p.y.numpy(), p.wanted[0])
        return "run"

    assert counted(work)["run"]


def test_contexts_shared_by_threads(model: gg.Model) -> None:
    prompts = [[1, *map(int, np.random.default_rng(i).integers(3, 259, 1 + i))] for i in range(8)]
    wanted: list[np.ndarray] = []
    for ids in prompts:
        ctx = model.new_context(256, n_threads=1)
        ctx.decode(ids)
        wanted.append(ctx.logits_ith(-1))
    shared = [model.new_context(256, n_seq_max=4, n_threads=n) for n in (1, 1, 2, 6)]

    def whole(rng: np.random.Generator, ctx: LlamaContext) -> str:
        i = int(rng.integers(len(prompts)))
        with ctx.lock:
            ctx.memory.clear()
            ctx.decode(prompts[i])
            np.testing.assert_allclose(ctx.logits_ith(-1), wanted[i], atol=1e-5)
        return "decode from empty"

    def work(rng: np.random.Generator) -> str:
        """Also operations without a lock of one's own: they may be refused for lack of room, and nothing else."""
        ctx, kind = shared[rng.integers(4)], int(rng.integers(8))
        a, b = map(int, rng.integers(0, 4, 2))
        with suppress(gg.KVCacheFull):
            if kind == 0:
                ctx.decode([75])
            elif kind == 1:
                ctx.memory.seq_cp(a, b)
            elif kind == 2:
                ctx.memory.seq_rm(a, int(rng.integers(0, 20)))
            elif kind == 3:
                state.load_seq_bytes(ctx, state.seq_bytes(ctx, a), b)
            elif kind == 4:
                state.load_state_bytes(ctx, state.state_bytes(ctx))
            elif kind == 5:
                ctx.memory.defrag()
                ctx.update()
            elif kind == 6:
                ctx.warmup()
            else:
                return whole(rng, ctx)
        with ctx.lock:
            kv = ctx.memory.caches[0]
            assert kv.used == int((kv.pos >= 0).sum()) and np.array_equal(kv.pos >= 0, kv.seq.any(axis=0))
        return f"operation {kind}"

    counted(work)


@contextmanager
def at_work(products: list[Product], ctx: LlamaContext) -> Iterator[None]:
    stop = threading.Event()

    def compute(p: Product, n_threads: int) -> None:
        backend = CpuBackend(n_threads)
        while not stop.is_set():
            assert np.array_equal(p.run(p.values[0], backend), p.wanted[0])

    def decode() -> None:
        while not stop.is_set():
            with ctx.lock:
                ctx.memory.clear()
                ctx.decode([1, 70, 80])

    threads = [threading.Thread(target=compute, args=(p, i + 1)) for i, p in enumerate(products)]
    threads.append(threading.Thread(target=decode))
    for t in threads:
        t.start()
    try:
        yield
    finally:
        stop.set()
        for t in threads:
            t.join()


def test_forks_while_threads_compute(model: gg.Model) -> None:
    """A child computes what was free, and either computes or refuses what was not; it never hangs."""
    rng = np.random.default_rng()
    products, free, n = [Product(rng) for _ in range(4)], Product(rng), 0
    busy, idle = model.new_context(64, n_threads=2), model.new_context(64, n_threads=2)
    idle.decode([1, 70, 80])
    wanted = idle.logits_ith(-1)

    def child() -> None:
        assert np.array_equal(free.run(free.values[1], CpuBackend(3)), free.wanted[1])
        idle.memory.clear()
        idle.decode([1, 70, 80])
        assert np.array_equal(idle.logits_ith(-1), wanted)
        for p in products:
            try:
                assert np.array_equal(p.run(p.values[1], CpuBackend(2)), p.wanted[1])
            except gg.BackendError as e:
                assert "was forked" in str(e)
        with suppress(gg.BackendError):
            busy.memory.clear()
            busy.decode([1, 70, 80])
            assert np.array_equal(busy.logits_ith(-1), wanted)

    with at_work(products, busy):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            time.sleep(rng.uniform(0, 0.01))
            in_child(child)
            n += 1
    print(f"\n{n} forks")
