"""How many threads the C library computes on."""

from __future__ import annotations

from numbers import Integral

from pyggml.errors import BackendError
from pyggml.system.cpus import n_fast, n_usable

from . import lib


def n_cpus() -> int:
    """How many CPUs this process may use, 256 at most: the size of the thread pool."""
    return min(n_usable(), lib.PG_MAX_THREADS)


def thread_count(wanted: int | None) -> int:
    """`wanted` threads, by default one per core: hyper-threads and cores that save power are left out (`n_fast`).
    Raises BackendError unless `wanted` is a whole number from 1."""
    if wanted is None:
        return min(n_fast(), lib.PG_MAX_THREADS)
    if not isinstance(wanted, Integral) or wanted < 1:
        raise BackendError(f"n_threads must be a whole number from 1, not {wanted!r:.40}")
    return int(wanted)
