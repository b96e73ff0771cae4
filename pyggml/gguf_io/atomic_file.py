"""Files that appear whole, or not at all, and lines that are added whole, or not at all."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from pyggml.system.files import name_file, open_nameless, open_new, sync_folder, take_permissions

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a disk that is full


@contextmanager
def saying_where(path: str | os.PathLike[str]) -> Generator[None]:
    """A full disk inside the block is an OSError that names `path`: that of a write to an open file names none."""
    try:
        yield
    except OSError as e:
        if e.errno in FULL and e.filename is None:
            raise OSError(e.errno, e.strerror, os.fspath(path)) from e
        raise


def append(fd: int, data: bytes, path: str | os.PathLike[str]) -> None:
    """Write at the end of an open file, which is called `path` in errors; no half of it stays when that fails."""
    size, left = os.fstat(fd).st_size, memoryview(data)
    try:
        with saying_where(path):
            while left:
                left = left[os.write(fd, left) :]
    except BaseException:
        os.ftruncate(fd, size)
        raise


class _Raw(io.FileIO):
    """A file without a buffer that is new; the errors of its writes name the `path` that it will have."""

    def __init__(self, file: str, path: str, opener: Callable[[str, int], int]) -> None:
        super().__init__(file, "wb", opener=opener)
        self._path = path

    def write(self, data: Buffer, /) -> int:
        """Write some of the bytes."""
        with saying_where(self._path):
            return super().write(data)


class AtomicFile:
    """A binary file that appears at `path`, whole and on disk, when its `with` block ends without an exception, or when
    `commit()` is called, and never otherwise.

    Until then it has no name, when the file system can do that: a killed process leaves nothing behind. Otherwise its
    name begins with a dot and ends with `.tmp`. A link stays a link: the file that it leads to is replaced. The new
    file has the permissions of the one that it replaces.

    Raises OSError when `path` is a device, a pipe or a folder, which no file may replace, and when the file cannot be
    written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.realpath(path)
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise OSError(errno.EINVAL, "is no file, and is not replaced by one", os.fspath(path))
        folder, name = os.path.split(self.path)
        self._temporary = os.path.join(folder, f".{name}.{os.urandom(4).hex()}.tmp")
        self._named = False
        try:
            self.file = io.BufferedWriter(_Raw(self._temporary, self.path, self._create))
        except OSError as e:
            self._remove()
            raise OSError(e.errno, e.strerror, os.fspath(path)) from None
        except BaseException:
            self._remove()
            raise
        try:
            take_permissions(self.file.fileno(), self.path)
        except BaseException:
            self.discard()
            raise

    def _create(self, path: str, flags: int) -> int:
        """The descriptor of a new file without a name, or called `path`."""
        fd = open_nameless(os.path.dirname(path))
        if fd is None:
            with self._naming():
                fd = open_new(path)
        return fd

    @contextmanager
    def _naming(self) -> Generator[None]:
        """The file gets its temporary name. An interrupt may come when it has the name, but before anything else."""
        self._named = True
        try:
            yield
        except OSError:  # it has none, and the name may be another file's
            self._named = False
            raise

    def commit(self) -> None:
        """Give the file its name, replacing what is there."""
        self.file.flush()
        with saying_where(self.path):
            os.fsync(self.file.fileno())
        if not self._named:
            with self._naming():
                name_file(self.file.fileno(), self._temporary)
        self.file.close()  # Windows renames no open file
        os.replace(self._temporary, self.path)
        self._named = False
        sync_folder(os.path.dirname(self.path))

    def discard(self) -> None:
        """Close the file. When it was not committed, nothing of it remains."""
        with suppress(OSError):  # what could not be written before is given up
            self.file.close()
        self._remove()

    def _remove(self) -> None:
        if self._named:
            with suppress(OSError):
                os.unlink(self._temporary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.discard()
