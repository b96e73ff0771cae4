"""Machines with several memory nodes (NUMA): threads stay near the memory that they read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, get_args

from pyggml.errors import BackendError, one_of
from pyggml.logger import LOG
from pyggml.system.nodes import memory_nodes, spread_pages, stay_on, this_cpu

from . import ffi, lib

Numa = Literal["distribute", "isolate", "numactl"]
_homes: Sequence[set[int]] = ()  # the CPUs of the nodes over which threads are spread; none or one: they are not
_bits: Any = None  # the same for C, which does not copy it


def numa_init(strategy: Numa) -> None:
    """Say how threads and memory of this process are placed on a machine with several memory nodes. Call it once, in
    the main thread, before models are loaded. On a machine with one node, and on macOS and Windows, it does nothing.

    distribute  the threads of a run are spread evenly over the nodes and stay there. Repacked weights lie in the memory
                of the node whose threads read them, and all else (caches, files, weights that are not repacked) on all
                nodes in turn, page by page
    isolate     this thread and all threads that it begins stay on the node where it runs, and so does their memory
    numactl     everything stays where the program `numactl` has put it

    Raises BackendError for another strategy.
    """
    one_of("strategy", strategy, get_args(Numa), BackendError)
    if strategy == "numactl":
        return
    nodes = memory_nodes()
    if len(nodes) < 2:
        LOG.info("numa %r: the system tells of no second memory node, so nothing is placed", strategy)
    elif strategy == "isolate":
        cpu = this_cpu()
        try:
            stay_on(next((near for near in nodes.values() if cpu in near), nodes[min(nodes)]))
        except OSError as e:
            LOG.info("numa 'isolate': the system does not let threads stay on a node: %s", e.strerror)
        lib.pg_pool_stop()  # its threads begin again, on this node
    else:
        place(list(nodes.values()))
        if not spread_pages(nodes):
            LOG.info("numa 'distribute': the system does not allow pages to be spread over nodes")


def place(homes: Sequence[set[int]]) -> None:
    """Spread the threads of runs evenly over the nodes with these CPUs; fewer than two: let them run anywhere."""
    global _homes, _bits
    bits: Any = None
    if len(homes) > 1:
        bits = ffi.new("uint64_t[]", len(homes) * lib.PG_MAX_CPUS // 64)
        for i, cpus in enumerate(homes):
            for cpu in cpus:
                if cpu < lib.PG_MAX_CPUS:
                    bits[(i * lib.PG_MAX_CPUS + cpu) // 64] |= 1 << cpu % 64
    lib.pg_pool_place(bits or ffi.NULL, len(homes) if bits else 0)
    _homes, _bits = homes, bits


def n_homes() -> int:
    """How many memory nodes the threads of a run are spread over, 1 if they are not."""
    return max(len(_homes), 1)


def home_of_rows(first: int, n: int) -> int:
    """The node whose threads read row `first` of `n` rows, in products of few columns. Three quarters of the rows are
    cut into one part for each thread; the last quarter is read by those who are early (csrc/products/deal.h), and is
    cut here for the nodes."""
    near = n * 3 // 4
    return first * n_homes() // near if first < near else (first - near) * n_homes() // (n - near)


def go_home(node: int) -> None:
    """Let this thread, which must be one of a short-lived pool, run on a node and take memory there."""
    if len(_homes) > 1:
        with suppress(OSError):  # forbidden, or the node's CPUs are gone: it runs anywhere, and no result changes
            stay_on(_homes[node])
        spread_pages(None)
