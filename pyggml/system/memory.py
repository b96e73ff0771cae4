"""Memory: how much there is, pages that the system may forget or must keep, addresses without memory; and forks."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress


def memory_size() -> int:
    """Bytes of memory that the machine has."""
    if sys.platform == "win32":
        return _windows_memory()[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> int | None:
    """Bytes of memory that programs could get now; None when the system does not tell (macOS)."""
    if sys.platform == "win32":
        return _windows_memory()[1]
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            found = re.findall(r"^(?:MemAvailable|SwapFree): +(\d+) kB$", f.read(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return sum(int(n) << 10 for n in found) if len(found) == 2 else None


def lock_pages(address: int, n: int) -> str | None:
    """Keep `n` bytes in memory. Returns None, or why that cannot be."""
    if sys.platform == "win32":
        done = ctypes.windll.kernel32.VirtualLock(ctypes.c_void_p(address), ctypes.c_size_t(n))
        return None if done else str(ctypes.WinError())
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(n)) == 0:
        return None
    return f"{os.strerror(ctypes.get_errno())}; see ulimit -l"


def forget(memory: mmap.mmap, start: int, n: int) -> None:
    """Let the system forget `n` bytes of a mapping, from a page's begin on: those of a file are read again when someone
    looks at them, others are zeros then. They stay when the system refuses: in a process whose pages are locked
    (mlockall), or in a container that does not allow it. (Windows keeps them, and forgets pages of files when others
    need memory.)"""
    if hasattr(mmap, "MADV_DONTNEED"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_DONTNEED, start, n)


def read_few(memory: mmap.mmap, start: int, n: int) -> None:
    """Say that of these `n` bytes of a mapped file, from a page's begin on, only a few here and there are read. Nothing
    depends on it: the system may refuse."""
    if hasattr(mmap, "MADV_RANDOM"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_RANDOM, start, n)


def reserve(n: int) -> mmap.mmap:
    """Addresses of `n` zeroed bytes, which take memory only where something is written. Raises OSError. (On Windows
    there must be room for all of them in memory or in its page file.)"""
    if sys.platform == "win32":
        return mmap.mmap(-1, n)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0x40)
    return mmap.mmap(-1, n, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)


def in_child(call: Callable[[], None]) -> None:
    """Call a function in each child that this process forks (Windows forks none)."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


if sys.platform == "win32":

    def _windows_memory() -> tuple[int, int]:
        """Bytes that the machine has, and that are free."""
        status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its size (and the load in percent), then seven sizes
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return status[1], status[2]
