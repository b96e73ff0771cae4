"""How many CPUs this process may use, and on how many of them threads that only compute pay."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache

_EFFICIENT = 0.75  # of the fastest core's capacity: slower ones are made for efficiency


def n_usable(root: str = "/") -> int:
    """How many CPUs this process may use at a time: those that its affinity allows (taskset, cpusets), within the quota
    of its control groups (containers: `docker run --cpus`) at the first call. `root`: where the system's files lie."""
    return max(math.ceil(min(len(allowed_cpus()), _quota(root))), 1)


def n_fast(root: str = "/") -> int:
    """The number of threads that pays: one per physical core, without cores that are made for efficiency (threads wait
    for the slowest at each step), and not more than `n_usable`. On Windows one per CPU."""
    if sys.platform == "darwin":
        return min(_mac_cores(), n_usable(root))
    allowed = allowed_cpus()
    fast = _performance(allowed, root) or allowed
    cores = {system_text(root, f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list") or str(i) for i in fast}
    return min(len(cores), n_usable(root))


def allowed_cpus() -> set[int]:
    """The CPUs that the affinity of this thread allows; all of the machine when the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        with suppress(OSError):  # a sandbox may forbid to ask
            return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _performance(allowed: Iterable[int], root: str) -> set[int]:
    """The allowed CPUs that the system does not call efficiency cores."""
    listed = system_text(root, "sys/devices/cpu_core/cpus")  # x86 with two kinds of cores
    if listed:
        return set(allowed) & set(cpus_of(listed))
    # Arm, and newer kernels
    told = {i: system_text(root, f"sys/devices/system/cpu/cpu{i}/cpu_capacity") for i in allowed}
    most = max((int(n) for n in told.values() if n), default=0)
    return {i for i, n in told.items() if not n or int(n) >= _EFFICIENT * most}


def cpus_of(listed: str) -> Iterator[int]:
    """The numbers of a list as Linux writes it: 0-3,8."""
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _quota(root: str) -> float:
    """CPUs that the control groups of this process, and those around them, grant."""
    quota = math.inf
    for line in (system_text(root, "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        parts = path.strip("/").split("/")
        # Version 1: the folder of several controllers may have them in another order (RHEL 7); then `cpu` links to it.
        for folder in {controllers, "cpu"} if controllers else {""}:
            # A container may see its group as the root, under another name than here.
            for n in range(len(parts), -1, -1):
                group = os.path.join("sys/fs/cgroup", folder, *parts[:n])
                quota = min(quota, _quota_of(root, group, 1 if controllers else 2))
    return quota


def _quota_of(root: str, group: str, version: int) -> float:
    """How many CPUs the folder of a control group allows; infinity when it sets no quota."""
    if version == 1:
        limit = system_text(root, f"{group}/cpu.cfs_quota_us")
        period = system_text(root, f"{group}/cpu.cfs_period_us")
    else:
        limit, _, period = (system_text(root, f"{group}/cpu.max") or "max").partition(" ")
    return int(limit) / int(period) if limit and period and limit not in ("max", "-1") else math.inf


@cache  # each new scheduler asks for the number of threads: 0.13 ms, were the files read again
def system_text(root: str, name: str) -> str | None:
    """What a file of the system says, without space around it; None when it cannot be read. A process reads it once.
    `root`: where the system's files lie."""
    try:
        with open(os.path.join(root, name), "rb") as f:
            return os.fsdecode(f.read()).strip()  # names of control groups may have any bytes
    except OSError:
        return None


def _mac_cores() -> int:
    """Cores of the fast kind: `sysctl hw.perflevel0.physicalcpu`, or on Macs with one kind `hw.physicalcpu`."""
    import ctypes

    n, size = ctypes.c_int32(), ctypes.c_size_t(4)
    for name in (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu"):
        if ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(n), ctypes.byref(size), None, 0) == 0:
            return n.value
    return os.cpu_count() or 1
