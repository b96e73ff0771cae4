"""Where the K/V cache of a context lies: in memory, or in a file where that is more than it may have."""

from __future__ import annotations

import os
from weakref import WeakSet

from pyggml.buffers.buffer import IN_FILE, Buffer
from pyggml.errors import ModelError
from pyggml.models.memory.memory import Memory
from pyggml.stream.layout import memory_size

from .closeable import Closeable

_in_files: WeakSet[Closeable] = WeakSet()


def allocate_cache(ctx: Closeable, memory: Memory, buft: str, kv_ram: int | str | None) -> None:
    """Give the cache of `ctx` its memory: of the buffer type `buft`, or, where it needs more than `kv_ram`, in a file.
    Raises ModelError for a bad `kv_ram`, and where the cache is a device's; AllocError where there is no room."""
    if kv_ram is None or memory.nbytes <= memory_size(kv_ram, "kv_ram"):
        memory.allocate(buft)
        return
    if buft in Buffer.device_types:
        raise ModelError(f"kv_ram: the cache is in memory of type {buft}, and cannot be in a file")
    memory.allocate(IN_FILE)
    _in_files.add(ctx)


def _close_all() -> None:
    for ctx in tuple(_in_files):
        ctx.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)  # it would write into the parent's cache
