"""Files that appear whole, and what they may replace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pyggml.gguf_io import atomic_file
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


@pytest.mark.parametrize("named", [False, True])
def test_a_file_keeps_its_permissions(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it is written, and where files without a name cannot be."""
    if named:
        monkeypatch.delattr(os, "O_TMPFILE")
    path = tmp_path / "cache"
    for mode in (0o600, 0o666, 0o640):
        path.write_bytes(b"old")
        path.chmod(mode)
        with AtomicFile(path) as file:
            assert os.fstat(file.file.fileno()).st_mode & 0o777 == mode
            file.file.write(b"new")
        assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == mode
    umask = os.umask(0o027)
    try:
        write(tmp_path / "first")
        assert (tmp_path / "first").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(umask)


def test_the_name_is_on_disk_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def seen(fd: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")
        fsync(fd)

    def named(*args: str) -> None:
        done.append("name")
        replace(*args)

    monkeypatch.setattr(os, "fsync", seen)
    monkeypatch.setattr(os, "replace", named)
    write(tmp_path / "file")
    assert done == ["file", "name", "folder"]


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


@pytest.mark.parametrize("call", ["open_new", "name_file"])
def test_an_interrupt_right_after_the_file_got_a_name(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM, as Python hears of it: between the call and the next line. The temporary file stayed."""
    name = getattr(atomic_file, call)

    def interrupted(*args: Any) -> None:
        name(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic_file, call, interrupted)
    if call == "open_new":
        monkeypatch.setattr(atomic_file, "open_nameless", lambda folder: None)  # pyright: ignore
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_a_temporary_name_of_others_stays_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda n: bytes(n))
    (tmp_path / ".file.00000000.tmp").write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        write(tmp_path / "file")
    monkeypatch.setattr(atomic_file, "open_nameless", lambda folder: None)  # pyright: ignore
    with pytest.raises(FileExistsError):
        write(tmp_path / "file")
    assert [p.name for p in tmp_path.iterdir()] == [".file.00000000.tmp"]
