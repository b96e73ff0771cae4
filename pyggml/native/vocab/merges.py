"""Byte-pair merging in C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import ffi, lib
from .calls import SEED, interruptible

Ints = np.ndarray[Any, np.dtype[np.int32]]
Ends = np.ndarray[Any, np.dtype[np.int64]]


class Merges:
    """Pairs of symbols that become one, by their ranks, the lowest first. Symbols are numbers; of equal pairs the first
    counts. Without `ranks` a pair's rank is its place."""

    def __init__(self, left: Ints, right: Ints, merged: Ints, ranks: Ints | None = None) -> None:
        n_slots = 2 << max(1, len(left)).bit_length()
        arrays = {"left": left, "right": right, "merged": merged, "slots": np.full(n_slots, -1, np.int32)}
        self._arrays = arrays | ({} if ranks is None else {"ranks": ranks})
        self._c = ffi.new("pg_bpe *", {"n_slots": n_slots, "seed": SEED})
        for name, array in self._arrays.items():
            setattr(self._c, name, ffi.from_buffer("int32_t[]", array))
        lib.pg_bpe_index(self._c, len(left))

    def merge(self, symbols: Ints, lengths: Sequence[int]) -> tuple[Ints, Ends]:
        """Merge the symbols of words; `lengths` says how many symbols each word has. Returns all symbols that are left,
        and where each word ends among them. Any thread may call it."""
        out, ends = np.empty(len(symbols), np.int32), np.empty(len(lengths), np.int64)
        longest = max(lengths, default=0)
        links, heap = ffi.new("pg_bpe_link[]", longest), ffi.new("uint64_t[]", 3 * longest)

        def call(watch: bool) -> int:
            out[:] = symbols
            np.cumsum(lengths, out=ends)
            return lib.pg_bpe_merge(
                self._c,
                ffi.from_buffer("int32_t[]", out),
                ffi.from_buffer("int64_t[]", ends),
                len(lengths),
                links,
                heap,
                watch,
            )

        n = interruptible(len(out), call)
        return out[:n], ends
