"""Files that appear whole, or not at all."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_OUR_FILES = "/proc/self/fd"  # the folder of our open files, through which the nameless one gets its name


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
            self.file = open(self._temporary, "wb", opener=self._create)  # noqa: SIM115 (this is a context manager)
        except OSError as e:
            self._remove()
            raise OSError(e.errno, e.strerror, os.fspath(path)) from None
        except BaseException:
            self._remove()
            raise
        try:
            with suppress(FileNotFoundError):  # a new file has what the umask leaves
                os.fchmod(self.file.fileno(), stat.S_IMODE(os.stat(self.path).st_mode) & 0o777)
        except BaseException:
            self.discard()
            raise

    def _create(self, path: str, flags: int) -> int:
        """The descriptor of a new file without a name, or called `path`."""
        if os.path.isdir(_OUR_FILES):
            with suppress(OSError, AttributeError):  # a file system, or a system, without O_TMPFILE
                return os.open(os.path.dirname(path) or ".", os.O_TMPFILE | os.O_WRONLY, 0o666)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        self._named = True
        return fd

    def commit(self) -> None:
        """Give the file its name, replacing what is there."""
        self.file.flush()
        os.fsync(self.file.fileno())
        if not self._named:
            files = os.open(_OUR_FILES, os.O_RDONLY)
            try:
                os.link(str(self.file.fileno()), self._temporary, src_dir_fd=files)
            finally:
                os.close(files)
            self._named = True
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


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Write the names in a folder to disk, when its permissions and the file system allow that. Raises OSError when the
    disk fails."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder that may be written to and not read
        return
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that does not sync folders
            raise
    finally:
        os.close(fd)


def sync_tree(folder: str | os.PathLike[str]) -> None:
    """Write all files of a folder, and their names, to disk. Raises OSError when the disk fails."""
    for root, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(root, name), "rb") as f:
                os.fsync(f.fileno())
        sync_folder(root)
