"""Files: open them for reading, lock them, read at an offset, get room for them, make their names lasting."""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import suppress

# Windows translates the ends of lines in files that are opened without O_BINARY. A FIFO must not block, nor stay open
# in the programs that this one starts.
READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_OUR_FILES = "/proc/self/fd"  # the folder of our open files, through which one without a name gets a name

if sys.platform == "win32":
    import msvcrt
    from threading import Lock

    _seeking = Lock()

    def lock_file(fd: int) -> None:
        """Keep other processes from locking an open file, until it is closed. Raises BlockingIOError when one of them
        has locked it."""
        try:
            os.lseek(fd, 2**62, os.SEEK_SET)  # the lock is of a byte behind all that is read and written
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError as e:
            raise BlockingIOError(errno.EWOULDBLOCK, "another process has locked it") from e

    def read_at(fd: int, place: memoryview, offset: int) -> int:
        """Read bytes from `offset` on into `place`. Returns how many there were; 0 at the end. Raises OSError."""
        with _seeking:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(place))
        place[: len(data)] = data
        return len(data)

    def open_files() -> float:
        """How many files this process may have open."""
        return float("inf")

else:
    import fcntl

    def lock_file(fd: int) -> None:
        """Keep other processes from locking an open file, until it is closed. Raises BlockingIOError when one of them
        has locked it."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def read_at(fd: int, place: memoryview, offset: int) -> int:
        """Read bytes from `offset` on into `place`. Returns how many there were; 0 at the end. Raises OSError."""
        return os.preadv(fd, [place], offset)

    def open_files() -> float:
        """How many files this process may have open."""
        import resource

        n = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return float("inf") if n == resource.RLIM_INFINITY else n


def get_room(fd: int, size: int) -> None:
    """Give an empty file `size` bytes, now: when the disk is full, writing to a mapped file would kill the process.
    Raises OSError. (macOS and Windows give them when they are written.)"""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)


def open_nameless(folder: str) -> int | None:
    """The descriptor of a new file in a folder, which has no name until `name_file` gives it one; None when the system
    or the file system has no such files."""
    if os.path.isdir(_OUR_FILES):
        with suppress(OSError, AttributeError):
            return os.open(folder or ".", os.O_TMPFILE | os.O_WRONLY, 0o666)
    return None


def open_new(path: str) -> int:
    """The descriptor of a new file, for writing. Raises OSError."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o666)


def name_file(fd: int, path: str) -> None:
    """Give a file of `open_nameless` its name. Raises OSError."""
    files = os.open(_OUR_FILES, os.O_RDONLY)
    try:
        os.link(str(fd), path, src_dir_fd=files)
    finally:
        os.close(files)


def take_permissions(fd: int, path: str) -> None:
    """Give an open file the permissions of the file `path`, when there is one and the system knows permissions."""
    if hasattr(os, "fchmod"):
        with suppress(FileNotFoundError):  # a new file has what the umask leaves
            os.fchmod(fd, stat.S_IMODE(os.stat(path).st_mode) & 0o777)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Write the names in a folder to disk, when its permissions and the file system allow that. Raises OSError when the
    disk fails. (Windows does so by itself.)"""
    if not hasattr(os, "O_DIRECTORY"):
        return
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
            with open(os.path.join(root, name), "rb+" if sys.platform == "win32" else "rb") as f:
                os.fsync(f.fileno())
        sync_folder(root)
