"""Memory nodes of a machine (NUMA): which CPUs are near to which memory, and where threads run and pages lie. Only
Linux tells, and lets programs choose."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from .cpus import allowed_cpus, cpus_of, system_text

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the number of the system call
_LOCAL, _INTERLEAVE = 0, 3  # MPOL_DEFAULT, MPOL_INTERLEAVE of the kernel
_MOST = 1024  # nodes that the kernel may have


def memory_nodes(root: str = "/") -> dict[int, set[int]]:
    """The CPUs that this process may use near each memory node: number -> CPUs, ascending, without nodes that have none
    of them. Empty when the system does not tell. `root`: where the system's files lie."""
    nodes: dict[int, set[int]] = {}
    for node in cpus_of(system_text(root, "sys/devices/system/node/online") or ""):
        listed = system_text(root, f"sys/devices/system/node/node{node}/cpulist") or ""
        if near := allowed_cpus() & set(cpus_of(listed)):
            nodes[node] = near
    return nodes


def this_cpu() -> int:
    """The CPU that this thread runs on."""
    return ctypes.CDLL(None).sched_getcpu()


def stay_on(cpus: Iterable[int]) -> None:
    """Let this thread, and those that it begins from now on, run on some CPUs only. Raises OSError."""
    os.sched_setaffinity(0, cpus)


def spread_pages(nodes: Iterable[int] | None) -> bool:
    """Take the pages that this thread, and those that it begins from now on, are the first to touch from `nodes` in
    turn; None: from the node where the thread runs. Returns False when the system refuses, as containers may do."""
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        return False
    mask = (ctypes.c_ulong * (_MOST // 64))()
    for node in nodes or ():
        mask[node // 64] |= 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    policy = (_LOCAL, None, 0) if nodes is None else (_INTERLEAVE, mask, _MOST)
    return libc.syscall(ctypes.c_long(number), *policy) == 0
