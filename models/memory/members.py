"""Which sequences the cells of a KV cache belong to, a bit for each: servers have many cells, and many sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pyggml.types import Ints

Bools = npt.NDArray[np.bool_]
_BIT = np.left_shift(1, np.arange(8)).astype(np.uint8)


class Members:
    """For each of `size` cells a set of sequences below `n_seq_max`."""

    def __init__(self, n_seq_max: int, size: int) -> None:
        self.n_seq_max = n_seq_max
        self._bits = np.zeros((bytes_of(n_seq_max), size), np.uint8)  # bit s % 8 of byte s // 8 for sequence s

    def copied(self) -> Members:
        """The same, with bits of its own."""
        new = object.__new__(Members)
        new.n_seq_max, new._bits = self.n_seq_max, self._bits.copy()
        return new

    def cells_of(self, seq: int, end: int | None = None) -> Bools:
        """Whether each cell (before `end`) belongs to a sequence: bool [size]."""
        return (self._bits[seq >> 3, :end] & _BIT[seq & 7]) != 0

    def cells_of_each(self, seq: Ints, cells: slice) -> Bools:
        """Whether some cells belong to each of these sequences: bool [len(seq), cells]."""
        return (self._bits[seq >> 3, cells] & _BIT[seq & 7, None]) != 0

    def of(self, cells: Any) -> Bools:
        """Which sequences some cells belong to: bool [n_seq_max, cells]."""
        return np.unpackbits(self._bits[:, cells], axis=0, count=self.n_seq_max, bitorder="little").view(np.bool_)

    def put(self, cells: Any, members: Bools) -> None:
        """Let cells belong to these sequences alone, see `of`."""
        self._bits[:, cells] = np.packbits(members, axis=0, bitorder="little")

    def add(self, seq: int, cells: Any) -> None:
        """Let cells belong to a sequence, too."""
        self._bits[seq >> 3, cells] |= _BIT[seq & 7]

    def add_each(self, seq: Ints, cells: Ints) -> None:
        """Let each of the cells, which are distinct, belong to a sequence of its own, too."""
        self._bits[seq >> 3, cells] |= _BIT[seq & 7]

    def remove(self, seq: int, cells: Any) -> None:
        """Take cells from a sequence."""
        self._bits[seq >> 3, cells] &= ~_BIT[seq & 7]

    def clear(self, cells: Any) -> None:
        """Take cells from all sequences."""
        self._bits[:, cells] = 0


def bytes_of(n_seq_max: int) -> int:
    """Bytes for each cell."""
    return -(-n_seq_max // 8)
