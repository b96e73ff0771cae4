"""Counting CPUs, on machines that are made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyggml.native.threads import n_cpus, thread_count
from pyggml.system.cpus import n_fast, n_usable


def machine(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="utf-8")
    return str(root)


def siblings(*cores: str) -> dict[str, str]:
    """The files of CPUs whose lists of hyper-threads are these."""
    return {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": core for i, core in enumerate(cores)}


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch):
    def allow(*cpus: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*cpus}, raising=False)
        monkeypatch.setattr("sys.platform", "linux")

    return allow


def test_hyper_threads_share_a_core(tmp_path: Path, allow) -> None:
    root = machine(tmp_path, siblings("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"))
    allow(*range(8))
    assert (n_usable(root), n_fast(root)) == (8, 4)
    allow(0, 4, 5)  # taskset: two of them are one core
    assert (n_usable(root), n_fast(root)) == (3, 2)


def test_efficiency_cores_of_x86(tmp_path: Path, allow) -> None:
    files = siblings("0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7") | {"sys/devices/cpu_core/cpus": "0-3"}
    root = machine(tmp_path, files)
    allow(*range(8))
    assert (n_usable(root), n_fast(root)) == (8, 2)
    allow(4, 5, 6)  # nothing but efficiency cores
    assert (n_usable(root), n_fast(root)) == (3, 3)


def test_efficiency_cores_of_arm(tmp_path: Path, allow) -> None:
    capacity = (250, 250, 250, 250, 870, 870, 870, 1024)
    files = {f"sys/devices/system/cpu/cpu{i}/cpu_capacity": str(n) for i, n in enumerate(capacity)}
    allow(*range(8))
    assert n_fast(machine(tmp_path, files)) == 4


def test_a_machine_that_tells_nothing(tmp_path: Path, allow) -> None:
    allow(0, 1, 2)
    assert (n_usable(str(tmp_path)), n_fast(str(tmp_path))) == (3, 3)


@pytest.mark.parametrize(
    ("files", "n"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
                "sys/fs/cgroup/a/cpu.max": "5 10",
            },
            1,
        ),
        ({"proc/self/cgroup": "0::/not/seen/here", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/1\n2:memory:/docker/1\n0::/",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "4:cpuacct,cpu:/docker/1",  # RHEL 7, whose folder is cpu,cpuacct
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        ({"proc/self/cgroup": "0::/größe", "sys/fs/cgroup/größe/cpu.max": "500000 100000"}, 5),
        (
            {
                "proc/self/cgroup": "3:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            8,
        ),
    ],
)
def test_the_quota_of_a_container(tmp_path: Path, allow, files: dict[str, str], n: int) -> None:
    allow(*range(8))
    root = machine(tmp_path, files)
    assert n_usable(root) == n_fast(root) == n


def test_a_sandbox_that_forbids_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> set[int]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", refuse, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert n_usable(str(tmp_path)) == 6


def test_more_than_the_pool_has_threads(allow) -> None:
    allow(*range(1000))
    assert n_cpus() == thread_count(None) == 256
