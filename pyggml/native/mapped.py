"""Mapped files that shrink do not end the process: csrc/os/posix_mapped.c."""

from __future__ import annotations

import os
from collections.abc import Sequence
from weakref import finalize

from pyggml.buffers.buffer import MappedFile

from . import ffi, lib


def guard(file: MappedFile, fd: int) -> Sequence[int]:
    """From now on pages that the file loses are read as zeros. The only number of the result becomes 1 when the first
    page is lost. Raises OSError."""
    lost = lib.pg_guard(fd, ffi.cast("void *", file.data.__array_interface__["data"][0]), file.data.nbytes)
    if lost == ffi.NULL:
        raise OSError(ffi.errno, os.strerror(ffi.errno))
    finalize(file.map, lib.pg_unguard, lost).atexit = False
    return lost


MappedFile.guard = guard
