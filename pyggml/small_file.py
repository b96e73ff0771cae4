"""Reading files that strangers made: regular ones only, and of those that should be small no more than a limit."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

from . import limits
from .errors import GGMLError
from .system.files import READ

HALF = re.compile("[\ud800-\udfff]")  # half of a surrogate pair, which JSON may have alone


def open_regular(path: str | os.PathLike[str], error: type[GGMLError]) -> BinaryIO:
    """The regular file `path`, open for reading. Raises `error` when it is not a regular file (a FIFO would block, a
    device may never end) and for what no file can be called, OSError when it cannot be opened."""
    try:
        file = os.open(path, READ)
    except ValueError:  # a NUL, or half of a character of UTF-16
        raise error(f"{os.fspath(path)!r}: no file can be called so") from None
    try:
        f = os.fdopen(file, "rb")
    except OSError as e:  # a directory
        os.close(file)
        raise OSError(e.errno, e.strerror, str(path)) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        f.close()
        raise error(f"{path}: is no regular file")
    return f


def read_small(path: Path, limit: int, error: type[GGMLError]) -> bytes:
    """The content of the regular file `path`, of at most `limit` bytes.

    Raises FileNotFoundError when there is no such file; `error` when the file is not a regular one (a FIFO would block,
    a device may never end), is larger than `limit`, or cannot be read.
    """
    try:
        with open_regular(path, error) as f:
            size = min(os.fstat(f.fileno()).st_size, limit)
            data = f.read(size + 1)  # `read(limit + 1)` would allocate as many bytes, however small the file is
            if len(data) > size:  # it has grown, or its size was not known
                data += f.read(limit - size)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise error(f"{path}: cannot be read: {e.strerror}") from None
    if len(data) > limit:
        raise error(f"{path}: is larger than {limit} bytes")
    return data


def read_text(path: str | Path, limit: int, error: type[GGMLError]) -> str:
    """The text of the file `path`, UTF-8. Raises as `read_small`, and `error` for bytes that are no UTF-8."""
    try:
        return read_small(Path(path), limit, error).decode()
    except UnicodeDecodeError:
        raise error(f"{path}: is no UTF-8 text") from None


def parse_json(what: str, data: str | bytes, error: type[GGMLError]) -> Any:
    """What the JSON text `data` says. Raises `error`, which names `what`, when it is no JSON or nested too deeply."""
    import json  # most programs read none

    try:
        return json.loads(data)
    except RecursionError:
        raise error(f"{what}: its JSON is nested too deeply") from None
    except ValueError as e:  # also bytes that are no UTF-8, and integers of thousands of digits
        raise error(f"{what}: is no JSON: {e}") from None


def read_json(path: Path, error: type[GGMLError]) -> Any:
    """What the JSON file `path` says. Raises FileNotFoundError, or `error`: see `read_small` and `parse_json`."""
    return parse_json(str(path), read_small(path, limits.JSON_BYTES, error), error)
