"""Locks of files, and reads at an offset."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyggml.system.files import lock_file, read_at


def test_one_at_a_time_locks_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with open(path, "wb") as one, open(path, "rb+") as other:
        lock_file(one.fileno())
        with pytest.raises(BlockingIOError):
            lock_file(other.fileno())
        one.close()
        lock_file(other.fileno())


def test_read_at(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(10)))
    place = bytearray(4)
    with open(path, "rb") as f:
        assert read_at(f.fileno(), memoryview(place), 3) == 4 and place == bytes([3, 4, 5, 6])
        assert read_at(f.fileno(), memoryview(place), 8) == 2 and place[:2] == bytes([8, 9])
        assert read_at(f.fileno(), memoryview(place), 10) == 0
        assert os.lseek(f.fileno(), 0, os.SEEK_CUR) == 0
