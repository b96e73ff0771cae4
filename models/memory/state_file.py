"""The container of saved states: a checked header, arrays, a checksum; written so that a file is whole or not there.
`pyggml/llm/state/save_load.py` says what stands in the header, and which arrays follow.

bytes  what (little-endian)
8      magic `PGSTATE\\0`
4      version, u32: 1
4      length of the header, u32
8      length of the file, u64
...    the header: one JSON object, UTF-8
...    arrays back to back, without padding; the header says which, and how long they are
32     SHA-256 of everything before
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pyggml.errors import StateError, path_name
from pyggml.gguf_io.atomic_file import AtomicFile
from pyggml.small_file import open_regular
from pyggml.types import Ints

MAGIC, VERSION = b"PGSTATE\0", 1
_FIXED = struct.Struct("<8sIIQ")
_DIGEST = 32
_MAX_COUNT = 1 << 31
Array = npt.NDArray[Any]
Path = str | os.PathLike[str]


def digest(parts: Iterable[bytes | memoryview]) -> bytes:
    """The SHA-256 of these bytes, one after the other."""
    from hashlib import sha256  # which loads OpenSSL

    h = sha256()
    for part in parts:
        h.update(part)
    return h.digest()


def pack(header: Mapping[str, Any], arrays: Iterable[Array], checksum: bool = True) -> list[bytes | memoryview]:
    """The parts of a file with that header and those arrays. `checksum`: see `StateReader`."""
    text = json.dumps(header, separators=(",", ":")).encode()
    body = [np.ascontiguousarray(a).data.cast("B") for a in arrays if a.size]
    size = _FIXED.size + len(text) + sum(len(part) for part in body) + _DIGEST
    parts: list[bytes | memoryview] = [_FIXED.pack(MAGIC, VERSION, len(text), size), text, *body]
    return [*parts, digest(parts) if checksum else bytes(_DIGEST)]


class StateReader:
    """Reads the header and then the arrays of a file, in order. Raises StateError for everything that `pack` does not
    write. What stays in the memory of a process needs no `checksum`: it would take longer than all the rest."""

    def __init__(self, data: bytes, checksum: bool = True) -> None:
        if data[: len(MAGIC)] != MAGIC[: len(data)] or not data:
            raise StateError("this is no saved state: it does not begin with PGSTATE")
        if len(data) < _FIXED.size:
            raise StateError(f"the state is truncated: {len(data)} bytes")
        _, version, n_header, size = _FIXED.unpack_from(data)
        if version != VERSION:
            raise StateError(f"the state has version {version}; this pyggml reads version {VERSION}")
        if len(data) < size:
            raise StateError(f"the state is truncated: {len(data)} of {size} bytes")
        end = _FIXED.size + n_header
        if len(data) != size or end + _DIGEST > size:
            raise StateError("the state is damaged: its lengths contradict each other")
        view = memoryview(data)
        if checksum and digest([view[:-_DIGEST]]) != data[-_DIGEST:]:
            raise StateError("the state is damaged: its checksum does not match")
        try:
            header = json.loads(bytes(view[_FIXED.size : end]))
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise StateError("the header of the state is not a JSON object")
        self.header = cast("dict[str, Any]", header)
        self._body = view[end:-_DIGEST]
        self._lists: dict[str, list[object]] = {}  # lists of the header: the items that are still to be read

    def count(self, name: str, of: Mapping[str, Any] | None = None) -> int:
        """A whole number from 0 in the header."""
        value: object = (self.header if of is None else of).get(name)
        if type(value) is not int or not 0 <= value < _MAX_COUNT:
            raise StateError(f"the header of the state has {name} = {value!r}")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """An object in the header."""
        value: object = self.header.get(name)
        if not isinstance(value, dict):
            raise StateError(f"the header of the state should have {name}")
        return cast("dict[str, Any]", value)

    def next(self, name: str) -> dict[str, Any]:
        """The next object of a list in the header."""
        value: object = self.header.get(name)
        items = self._lists.setdefault(name, list(cast("list[object]", value)) if isinstance(value, list) else [])
        item = items.pop(0) if items else None
        if not isinstance(item, dict):
            raise StateError(f"the header of the state should have more {name}")
        return cast("dict[str, Any]", item)

    def array(self, dtype: npt.DTypeLike, *shape: int) -> Array:
        """The next array, read-only."""
        dtype = np.dtype(dtype)
        size = dtype.itemsize
        for n in shape:
            size *= n
        if size > len(self._body):
            raise StateError("the state is damaged: arrays are missing")
        part, self._body = self._body[:size], self._body[size:]
        return np.frombuffer(part, dtype).reshape(shape)

    def end(self) -> None:
        """Raises StateError when something is left to read."""
        for name, items in self._lists.items():
            if items:
                raise StateError(f"the header of the state should not have {len(items)} {name} more")
        if len(self._body):
            raise StateError(f"the state is damaged: {len(self._body)} bytes too many")


def members_of(saved: npt.NDArray[np.bool_], n_seq_max: int) -> npt.NDArray[np.bool_]:
    """Which sequences have each cell of a saved state: bool [n_seqs, n] as bool [n_seq_max, n]. Raises StateError for a
    sequence that this context does not have."""
    highest = max(np.flatnonzero(saved.any(axis=1)), default=0)
    if highest >= n_seq_max:
        raise StateError(f"the state has a sequence {highest}, but n_seq_max is {n_seq_max}")
    members = np.zeros((n_seq_max, saved.shape[1]), np.bool_)
    members[: len(saved)] = saved[:n_seq_max]
    return members


def ascending(a: Ints) -> bool:
    """Whether indices rise from one to the next, and none is negative."""
    return not a.size or (a[0] >= 0 and bool((a[1:] > a[:-1]).all()))


def write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file that appears whole or, on any error, not at all. Raises StateError when it cannot be written."""
    path = path_name(path, StateError)
    try:
        with AtomicFile(path) as out:
            out.file.writelines(parts)
    except OSError as e:
        raise StateError(f"cannot write {path}: {e.strerror}") from None


def read(path: Path) -> bytes:
    """The bytes of a file. Raises StateError when it cannot be read."""
    path = path_name(path, StateError)
    try:
        with open_regular(path, StateError) as f:
            return f.read()
    except OSError as e:
        raise StateError(f"cannot read {path}: {e.strerror}") from None
