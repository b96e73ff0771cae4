"""How many threads the C library computes on."""

from __future__ import annotations

import os
from numbers import Integral

from pyggml.errors import BackendError

from . import lib


def n_cpus() -> int:
    """How many CPUs this process may use, 256 at most: the size of the thread pool."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(n, lib.PG_MAX_THREADS)


def thread_count(wanted: int | None) -> int:
    """`wanted` threads, by default one per CPU. Raises BackendError unless `wanted` is a whole number from 1."""
    if wanted is None:
        return n_cpus()
    if not isinstance(wanted, Integral) or wanted < 1:
        raise BackendError(f"n_threads must be a whole number from 1, not {wanted!r:.40}")
    return int(wanted)
