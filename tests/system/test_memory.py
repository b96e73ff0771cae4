"""Pages that the system may forget, where it refuses to."""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import closing

import pytest

from pyggml.system.memory import forget, lock_pages, read_few


@pytest.mark.skipif(sys.platform != "linux", reason="other systems forget locked pages, or none")
def test_locked_pages_stay() -> None:
    with closing(mmap.mmap(-1, mmap.PAGESIZE)) as memory:
        memory[0] = 7
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if lock_pages(address, mmap.PAGESIZE) is not None:
            pytest.skip("this process may lock no page")
        with pytest.raises(OSError, match="Invalid argument"):
            memory.madvise(mmap.MADV_DONTNEED)
        forget(memory, 0, mmap.PAGESIZE)
        assert memory[0] == 7


def test_a_sandbox_that_forbids_advice() -> None:
    class Refused(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise PermissionError(1, "Operation not permitted")

    with closing(Refused(-1, mmap.PAGESIZE)) as memory:
        forget(memory, 0, mmap.PAGESIZE)
        read_few(memory, 0, mmap.PAGESIZE)
