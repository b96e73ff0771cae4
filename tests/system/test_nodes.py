"""Memory nodes, on machines that are made of files; and on this machine, whose CPUs are taken for nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, backend, lower
from pyggml.backends.cpu import repack as module
from pyggml.backends.cpu.repack import repack
from pyggml.buffers.alloc import steps_of
from pyggml.llama_cpp.llama_cpp import llama_numa_init
from pyggml.native import lib, numa
from pyggml.native.threads import thread_count
from pyggml.system import nodes
from pyggml.testing.harness import place

from .test_cpus import allow as allow
from .test_cpus import machine


def node_files(*cpus: str, online: str | None = None) -> dict[str, str]:
    """The files of a machine whose nodes have these CPUs."""
    files = {f"sys/devices/system/node/node{i}/cpulist": listed for i, listed in enumerate(cpus)}
    return files | {"sys/devices/system/node/online": online or f"0-{len(cpus) - 1}"}


def test_the_cpus_of_each_node(tmp_path: Path, allow) -> None:
    allow(*range(96))
    root = machine(tmp_path, node_files("0-23,48-71", "24-47,72-95"))
    assert nodes.memory_nodes(root) == {0: {*range(24), *range(48, 72)}, 1: {*range(24, 48), *range(72, 96)}}
    allow(3, 30)  # taskset
    assert nodes.memory_nodes(root) == {0: {3}, 1: {30}}
    allow(3, 4)
    assert nodes.memory_nodes(root) == {0: {3, 4}}


def test_nodes_without_cpus(tmp_path: Path, allow) -> None:
    allow(*range(8))
    root = machine(tmp_path, node_files("0-3", "", "4-7", online="0,2"))  # memory alone; and one that is off
    assert nodes.memory_nodes(root) == {0: {0, 1, 2, 3}, 2: {4, 5, 6, 7}}
    assert nodes.memory_nodes(str(tmp_path / "no such machine")) == {}


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[int]]]:
    """Two CPUs of this machine, as if each were a node."""
    cpus = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []
    if len(cpus) < 2:
        pytest.skip("takes two CPUs, on Linux")
    monkeypatch.setattr(numa, "memory_nodes", lambda: {0: {cpus[0]}, 1: {cpus[1]}})
    monkeypatch.setattr(numa, "spread_pages", lambda among: True)  # the nodes are none
    monkeypatch.setattr(lower, "_SHARE", -1.0)  # even small ops are shared
    lib.pg_pool_stop()
    yield [{cpu} for cpu in cpus]
    numa.place([])


def products(n_threads: int, n_runs: int = 8) -> np.ndarray:
    """Products of one column by repacked matrices, computed some times: a plan may try one thread now and then."""
    rng, ctx = np.random.default_rng(0), gg.Context()
    weights = [ctx.from_numpy(rng.standard_normal((m, 256)).astype(np.float32), gg.Q4_0) for m in (900, 80, 1)]
    assert repack(weights, n_threads=2) == 3
    x = ctx.from_numpy(rng.standard_normal((1, 256)).astype(np.float32))
    results = [gg.mul_mat(w, x) for w in weights]
    for y in results:
        place(y)
    program = CpuBackend(n_threads).compile(steps_of(results), lambda step: step)
    for _ in range(n_runs):
        program.run()
    return np.concatenate([y.numpy().ravel() for y in results])


def threads() -> list[set[int]]:
    """The CPUs that each thread of this process may use."""
    return [set(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]


def test_threads_stay_on_their_nodes(two_nodes: list[set[int]]) -> None:
    before = os.sched_getaffinity(0)
    want = products(2)
    assert not any(cpus in two_nodes for cpus in threads())
    numa.numa_init("distribute")
    assert np.array_equal(products(2), want)
    assert [cpus for cpus in threads() if cpus in two_nodes] == two_nodes[1:]  # the worker
    assert os.sched_getaffinity(0) == before  # the leader is at home only as long as a plan runs
    numa.place([])
    assert np.array_equal(products(2), want)
    assert not any(cpus in two_nodes for cpus in threads())


def test_a_hundred_threads(two_nodes: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "n_cpus", lambda: 100)
    want = products(1)
    assert np.array_equal(products(100, 1), want)
    numa.numa_init("distribute")
    assert np.array_equal(products(100, 1), want)
    assert [threads().count(cpus) for cpus in two_nodes] == [49, 50]  # and the leader
    lib.pg_pool_stop()


def test_isolated(two_nodes: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(numa, "this_cpu", lambda: min(two_nodes[1]))
    try:
        numa.numa_init("isolate")
        assert os.sched_getaffinity(0) == two_nodes[1]
        assert thread_count(None) == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_container_that_lets_no_thread_stay(two_nodes: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    want = products(2)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    for strategy in ("distribute", "isolate"):
        numa.numa_init(strategy)
        assert np.array_equal(products(2), want)


def test_one_node_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "memory_nodes", lambda: {0: {0, 1}})
    for strategy in ("distribute", "isolate", "numactl"):
        numa.numa_init(strategy)
        assert numa.n_homes() == 1
    with pytest.raises(gg.BackendError, match="distribute, isolate, numactl, not 'mirror'"):
        numa.numa_init("mirror")  # type: ignore[arg-type]
    llama_numa_init(3)
    with pytest.raises(gg.BackendError, match="0, 1, 2, 3, not 4"):
        llama_numa_init(4)


@pytest.mark.parametrize(("n_nodes", "n_threads"), [(2, 2), (2, 16), (4, 64), (2, 7), (8, 128)])
def test_pages_are_touched_by_who_reads_them(monkeypatch: pytest.MonkeyPatch, n_nodes: int, n_threads: int) -> None:
    monkeypatch.setattr(numa, "_homes", [set[int]()] * n_nodes)
    n = 5000
    large = n * 3 // 4 // n_threads  # csrc/products/deal.h
    first_rows = range(large * n_threads)
    near = [numa.home_of_rows(i, n) == i // large * n_nodes // n_threads for i in first_rows]
    assert sum(near) > 0.9 * len(near)
    assert {numa.home_of_rows(i, n) for i in range(large * n_threads, n)} == {*range(n_nodes)}


def test_weights_are_packed_on_all_nodes(two_nodes: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    homes: list[set[int]] = []
    monkeypatch.setattr(numa, "stay_on", homes.append)
    monkeypatch.setattr(module, "_CHUNK", 1 << 10)
    products(2)
    assert not homes
    numa.numa_init("distribute")
    products(2)
    assert {homes.count(cpus) for cpus in two_nodes} != {0} and homes[:2] == two_nodes
