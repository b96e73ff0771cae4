"""Files that appear whole, and what they may replace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyggml.gguf_io.atomic_file import AtomicFile


def write(path: Path) -> None:
    file = AtomicFile(path)
    try:
        file.file.write(b"new")
        file.commit()
    finally:
        file.discard()


def test_a_file_is_replaced_and_a_link_is_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write(link)
    assert link.is_symlink() and target.read_bytes() == b"new"
    write(target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "target"]


def test_pipes_and_folders_are_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(OSError, match="is not replaced"):
            AtomicFile(path)
    assert pipe.is_fifo() and [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_errors_name_the_path_that_was_given(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No such file or directory: '.*/missing/m\.gguf'"):
        AtomicFile(tmp_path / "missing" / "m.gguf")
