"""Calls of the system that fail: named exceptions, no leaks, nothing half written, and objects that go on.

`faults.py` has the operations and says what must hold; `tests/deep/deep_faults.py` tries every call.
"""

from __future__ import annotations

from pathlib import Path

from .preloaded import faulty


def test_calls_of_each_kind_fail(tmp_path: Path) -> None:
    names = ("decode", "decode streamed", "quantize", "save_state", "batch", "imatrix")
    done = faulty(tmp_path, 2, names=names, kinds=("alloc", "read", "write", "sync", "thread"))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for seen in ("alloc: MemoryError", "read: ", "sync: OSError", "thread: BackendError", "write: OSError"):
        assert seen in done.stdout  # the library does make calls fail
