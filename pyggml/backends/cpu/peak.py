"""The limits of this machine, measured, which `pyggml op-bench` compares kernels with."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

from pyggml.native import ffi, lib
from pyggml.native.thread_pool import ThreadPool

from ...buffers.buffer import Buffer
from .isa import isa_levels

KINDS = {"f32": lib.PG_PEAK_F32, "int8": lib.PG_PEAK_INT8, "bf16": lib.PG_PEAK_BF16}

_ROUNDS, _SECONDS = 5, 0.25  # at least, for each measurement: the best one is not disturbed by other work
_PAGE = 4096
_MIN_READ = 1 << 26  # bytes that each thread reads per round
_STEPS = 1 << 20  # steps that each thread makes per round: some 5 ms


@cache
def read_rate(isa: str, nbytes: int, n_threads: int) -> float:
    """Bytes per second that `n_threads` read from `nbytes` of memory, over and over: from a cache when it holds
    them."""
    share = max(nbytes // n_threads // _PAGE, 1) * _PAGE
    buffer = Buffer.allocate(share * n_threads)
    buffer.memory[::_PAGE] = 1  # memory that was never written is one page of zeros
    repeats = -(-_MIN_READ // share)

    def read(i: int) -> float:
        p = ffi.cast("void *", buffer.base + i * share)
        return sum(lib.pg_peak(isa_levels()[isa], lib.PG_PEAK_READ, p, share) for _ in range(repeats))

    return _best(read, n_threads)


@cache
def compute_rate(isa: str, kind: str, n_threads: int) -> float:
    """Operations per second (multiplications and additions) of `kind`, one of KINDS; 0 when `isa` has none."""
    return _best(lambda i: lib.pg_peak(isa_levels()[isa], KINDS[kind], ffi.NULL, _STEPS), n_threads)


def _best(work: Callable[[int], float], n_threads: int) -> float:
    """The highest rate of some rounds in which each thread does its share of the work."""
    best = 0.0
    with ThreadPool(n_threads) as pool:
        begin, rounds = time.perf_counter(), 0
        while rounds < _ROUNDS or time.perf_counter() - begin < _SECONDS:
            start = time.perf_counter()
            done = sum(pool.map(work, range(n_threads)))
            best = max(best, done / (time.perf_counter() - start))
            rounds += 1
    return best
