"""Memory that tensors live in: a block of bytes with a known address and the buffer type it came from."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from pyggml.errors import AllocError, GGUFError
from pyggml.system.files import get_room
from pyggml.system.memory import forget, free_memory, memory_size

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

ALIGNMENT = 64  # a cache line, and the widest vector
IN_FILE = "CPU_FILE"  # the buffer type of host memory that the system may write to a disk: see `file_memory`


def check_memory(size: int, what: str) -> None:
    """Raises AllocError when `what` needs more bytes than the machine has. The system would grant them, and kill the
    process when it uses them."""
    have = memory_size()
    if size > have:
        raise AllocError(f"{what} needs {size / 2**30:.1f} GiB of memory; this machine has {have / 2**30:.1f}")


def check_free_memory(size: int, what: str) -> None:
    """Raises AllocError when `what` needs more bytes than the machine has free (on macOS: than it has), see
    `check_memory`. Less than 1 MiB is never refused: asking the system takes longer than filling it."""
    if size < 1 << 20:
        return
    check_memory(size, what)
    free = free_memory()
    if free is not None and size > free:
        raise AllocError(f"{what} needs {size / 2**30:.1f} GiB of memory; {free / 2**30:.1f} are free on this machine")


def file_memory(size: int) -> Bytes:
    """`size` zeroed bytes, uint8, of a file without a name, in TMPDIR or /var/tmp (not /tmp: that is memory on many
    machines). The file is gone when nobody holds the bytes, or the process ends. A parent sees what a forked child
    writes. Raises AllocError when there is no room for the file."""
    import tempfile  # it takes 5 ms to import

    folder = os.environ.get("TMPDIR") or ("/var/tmp" if os.path.isdir("/var/tmp") else tempfile.gettempdir())
    try:
        with tempfile.TemporaryFile(dir=folder) as f:
            get_room(f.fileno(), max(size, 1))
            return np.frombuffer(mmap.mmap(f.fileno(), max(size, 1)), np.uint8)[:size]
    except (OSError, OverflowError, ValueError) as e:
        raise AllocError(f"cannot allocate {size} bytes of a file in {folder}: {e}") from None


class MappedFile:
    """A whole file, mapped for reading.

    While it is in use the file may be replaced (renamed over, deleted), but not be made shorter or written to. When it
    is made shorter, the process lives on: the lost part reads as zeros for whoever holds an array of it. From then on
    `check` raises, and so do every run that has read the file and every look at a tensor in it. Nobody notices
    bytes that are written into the file, or a loss while an array of it is being copied.
    """

    guard: ClassVar[Callable[[MappedFile, int], Sequence[int]] | None] = None  # what catches such reads

    __slots__ = ("data", "lost", "map", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.map = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        self.data: Bytes = np.frombuffer(self.map, np.uint8)
        self.lost = (0,) if MappedFile.guard is None else MappedFile.guard(self, fd)

    def check(self) -> None:
        """Raises GGUFError when the file has become shorter since it was mapped."""
        if self.map.size() < self.data.nbytes or self.lost[0]:
            text = (
                f"had {self.data.nbytes} bytes when it was opened and has {self.map.size()} now: what was read is lost"
            )
            raise GGUFError(f"{self.path}: the file {text}; load it again")


class Streamed(Protocol):
    """Weights that come and go together, in memory that others use too. They are sure to be there from `acquire` to
    `release` only: the scheduler calls both, around the nodes that read them."""

    def acquire(self, nodes: Sequence[Any] = ()) -> None:
        """Wait until the weights that `nodes` (tensors) read are in memory. They stay until `release` was called as
        often as `acquire`."""
        ...

    def release(self) -> None:
        """The weights may go."""
        ...


class Buffer:
    """A block of host memory; a `DeviceBuffer` is one that the host cannot read.

    `memory` is a uint8 array that keeps the block alive, `base` its address, `size` its bytes, `buft` the name of the
    buffer type ("CPU", "CPU_MMAP", "REF" ...), `writable` False for memory that belongs to a mapped file, `file`.
    `streamed`: the weights that come and go in this memory, if they do. Acquire them before reading at an address.
    """

    __slots__ = ("base", "buft", "file", "memory", "size", "streamed", "writable")

    is_host: ClassVar[bool] = True
    device_types: ClassVar[dict[str, Callable[[int], Buffer]]] = {}  # buffer types that are no host memory

    def __init__(self, memory: Bytes, buft: str = "CPU", file: MappedFile | None = None) -> None:
        self.file = file
        self.memory = memory
        self.base: int = memory.__array_interface__["data"][0]
        self.size: int = memory.nbytes
        self.buft = buft
        self.streamed: Streamed | None = None
        self.writable: bool = memory.flags.writeable

    @classmethod
    def allocate(cls, size: int, buft: str = "CPU") -> Buffer:
        """`size` zeroed bytes of a buffer type (the host's: aligned to a cache line; IN_FILE: of one that is CPU's).
        Raises AllocError when there is no memory."""
        if buft in cls.device_types:
            return cls.device_types[buft](size)
        if buft == IN_FILE:
            return cls(file_memory(size))
        try:
            raw = np.zeros(size + ALIGNMENT, np.uint8)
        except (MemoryError, ValueError, OverflowError):
            raise AllocError(f"cannot allocate {size} bytes") from None
        start = -raw.__array_interface__["data"][0] % ALIGNMENT
        return cls(raw[start : start + size], buft)

    def give_back(self, start: int, n: int) -> None:
        """Let the system forget the pages of a mapped file that hold the `n` bytes from `start` on and nothing else.
        They are read again when someone reads them. Other memory stays."""
        owner: Any = self.memory if self.buft == "CPU_MMAP" else None  # its type is too narrow a hint
        while isinstance(owner, np.ndarray | memoryview):
            owner = owner.obj if isinstance(owner, memoryview) else owner.base
        if not isinstance(owner, mmap.mmap):
            return
        start += self.base - np.frombuffer(owner, np.uint8).__array_interface__["data"][0]
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + n) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            forget(owner, first, last - first)

    def read(self, start: int, n: int) -> Bytes:
        """`n` bytes from `start` on: a view of them; of a device's memory a copy, which cannot be written to."""
        return self.memory[start : start + n]

    def write(self, start: int, data: Bytes) -> None:
        """Overwrite the bytes from `start` on."""
        self.memory[start : start + data.nbytes] = data


class FetchedBuffer(Buffer):
    """Host memory that holds a weight while `streamed` is acquired (None: no memory at all). Anyone else who reads the
    weight on the host gets a copy of its bytes, uint8, read-only, which `fetch` makes."""

    __slots__ = ("_fetch",)

    def __init__(self, memory: Bytes | None, fetch: Callable[[], Bytes], file: MappedFile | None = None) -> None:
        self._fetch = fetch
        if memory is not None:
            super().__init__(memory, "CPU", file)
        else:
            self.size, self.buft, self.file, self.streamed = 0, "CPU", file, None
        self.writable = False

    def __getattr__(self, name: str) -> Any:
        raise AllocError(f"this weight is in memory for the products that read it alone: it has no {name}")

    def read(self, start: int, n: int) -> Bytes:
        return self._fetch()[start : start + n]


class LazyBuffer(FetchedBuffer):
    """A FetchedBuffer without memory, which gets it when something reads it at its address."""

    __slots__ = ()
    _making: ClassVar[threading.RLock] = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        with LazyBuffer._making:
            if not self.size:  # otherwise another thread has made it meanwhile
                memory = Buffer.allocate((stored := self._fetch()).nbytes).memory
                memory[:] = stored
                memory.flags.writeable = False
                self.memory, self.base, self.size = memory, memory.__array_interface__["data"][0], memory.nbytes
        return object.__getattribute__(self, name)

    def read(self, start: int, n: int) -> Bytes:
        return self.memory[start : start + n] if self.size else super().read(start, n)


class DeviceBuffer(Buffer):
    """Memory that a backend computes in and the host cannot read: `base` is the device's address, there is no `memory`.

    A backend registered from outside derives its own from it, with `fetch` and `write`, and names it with
    `register_device_buffer`.
    """

    __slots__ = ()
    is_host = False

    def __init__(self, base: int, size: int, buft: str) -> None:
        self.base, self.size, self.buft, self.file, self.writable = base, size, buft, None, True
        self.streamed = None

    def fetch(self, start: int, n: int) -> Bytes:
        """A copy of `n` bytes from `start` on, as uint8 on the host."""
        raise NotImplementedError

    def read(self, start: int, n: int) -> Bytes:
        copy = self.fetch(start, n)
        copy.flags.writeable = False
        return copy

    def write(self, start: int, data: Bytes) -> None:
        """Copy uint8 [n] of the host over the bytes from `start` on."""
        raise NotImplementedError


def register_device_buffer(buft: str, allocate: Callable[[int], Buffer]) -> None:
    """Make `allocate(size)`, a zeroed DeviceBuffer, what memory of the buffer type `buft` is."""
    Buffer.device_types[buft] = allocate
