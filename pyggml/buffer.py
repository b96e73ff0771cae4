"""Memory that tensors live in: a block of bytes with a known address and the buffer type it came from."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import AllocError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

ALIGNMENT = 64  # a cache line, and the widest vector


class Buffer:
    """A block of host memory.

    `memory` is a uint8 array that keeps the block alive, `base` its address, `size` its bytes, `buft` the name of the
    buffer type ("CPU", "CPU_MMAP", "REF" ...), `writable` False for memory that belongs to a mapped file.
    """

    __slots__ = ("base", "buft", "memory", "size", "writable")

    def __init__(self, memory: Bytes, buft: str = "CPU") -> None:
        self.memory = memory
        self.base: int = memory.__array_interface__["data"][0]
        self.size: int = memory.nbytes
        self.buft = buft
        self.writable: bool = memory.flags.writeable

    @classmethod
    def allocate(cls, size: int, buft: str = "CPU") -> Buffer:
        """`size` zeroed bytes, aligned to a cache line. Raises AllocError where there is no memory."""
        try:
            raw = np.zeros(size + ALIGNMENT, np.uint8)
        except (MemoryError, ValueError):
            raise AllocError(f"cannot allocate {size} bytes") from None
        start = -raw.__array_interface__["data"][0] % ALIGNMENT
        return cls(raw[start : start + size], buft)
