"""Reads weights from their files to their places, in pieces. One thread reads each piece, and repacks it when that is
needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING
from weakref import finalize

from pyggml.buffers.buffer import Buffer, Bytes, MappedFile
from pyggml.dtypes import DType
from pyggml.errors import GGUFError
from pyggml.gguf_io.read import GGUFFile, GGUFTensor
from pyggml.gguf_io.split import PartReader
from pyggml.native.packing import GROUP, matrix_size, pack_groups
from pyggml.system.files import READ, read_at
from pyggml.tensor import Ne

from .ring import READERS, Job

if TYPE_CHECKING:
    from pyggml.hf.folder import HFFolder

Rows = Callable[[int], Iterator[Bytes]]

_PIECE = 1 << 20  # bytes: READERS of them are memory that weights do not have, and larger ones are no faster


@dataclass(frozen=True)
class Origin:
    """Where the stored bytes of a tensor are: in a file from `offset` on, or, when `file` is None, in what `rows(n)`
    makes: uint8 [rows, bytes of a row] of about `n` elements at a time, each within one matrix. `packed`: the file that
    has a repacked copy, and the offset of that."""

    file: MappedFile | None
    offset: int = 0
    rows: Rows | None = None
    packed: tuple[MappedFile, int] | None = None

    def fetch(self, nbytes: int) -> Bytes:
        """All stored bytes."""
        if self.file is not None:
            return self.file.data[self.offset : self.offset + nbytes]
        assert self.rows is not None
        memory = Buffer.allocate(nbytes).memory
        _copy(self.rows, memory)
        memory.flags.writeable = False
        return memory


def origins_of(model: GGUFFile | HFFolder) -> dict[str, Origin]:
    """Where the tensors of an open model come from, by name."""
    if isinstance(model, GGUFFile):
        return {t.name: _origin(model, t) for t in model.tensors.values()}
    stored = {t.name: t.mapped() for t in model.tensors.values()}
    return {
        name: Origin(None, rows=model.tensors[name].rows) if t is None else Origin(t.file, t.offset)
        for name, t in stored.items()
    }


def _origin(model: GGUFFile, t: GGUFTensor) -> Origin:
    packed = None
    if t.packed is not None and (file := model.parts[t.packed.part].mapped) is not None:
        packed = file, t.packed.offset
    if t.offset >= 0:
        return Origin(model.parts[t.part].mapped, t.offset, packed=packed)
    row_size, m = t.dtype.row_size(t.ne[0]), t.ne[1]

    def rows(n_elements: int) -> Iterator[Bytes]:
        step = max(1, n_elements // t.ne[0] // GROUP) * GROUP
        with PartReader(model) as reader:
            for matrix, first in product(range(t.ne[2]), range(0, m, step)):
                n = min(step, m - first)
                yield reader.read(t, (matrix * m + first) * row_size, n * row_size).reshape(n, row_size)

    return Origin(None, rows=rows, packed=packed)


class Files:
    """The files of a model, open for reads from several threads."""

    def __init__(self) -> None:
        self._fds: dict[MappedFile, int] = {}
        self._staged = threading.local()

    def _fd(self, file: MappedFile) -> int:
        fd = self._fds.get(file)
        if fd is None:
            try:
                fd = os.open(file.path, READ)
            except OSError as e:
                raise GGUFError(f"{file.path}: cannot be read: {e.strerror}") from e
            self._fds[file] = fd
            finalize(self, os.close, fd)
        if os.fstat(fd).st_size != file.data.nbytes:
            raise GGUFError(f"{file.path}: the file was changed while it was opened; load it again")
        return fd

    def jobs(self, origin: Origin, packed: bool, dtype: DType, ne: Ne, place: Bytes) -> list[Job]:
        """Jobs that put a tensor into `place`, uint8 with room for it: its repacked copy, or its stored bytes."""
        if packed:
            return self._packed(origin, dtype, ne, Buffer(place))
        file, rows, nbytes = origin.file, origin.rows, dtype.row_size(ne[0]) * ne[1] * ne[2] * ne[3]
        if file is None:
            assert rows is not None
            return [lambda: _copy(rows, place)]
        return self._as_they_are(file, origin.offset, nbytes, place)

    def _as_they_are(self, file: MappedFile, offset: int, nbytes: int, place: Bytes) -> list[Job]:
        fd = self._fd(file)

        def job(start: int) -> int:
            return _read(file, fd, offset + start, place[start : min(start + _PIECE, nbytes)])

        return [lambda start=start: job(start) for start in range(0, nbytes, _PIECE)]

    def _packed(self, origin: Origin, dtype: DType, ne: Ne, place: Buffer) -> list[Job]:
        file, rows = origin.file, origin.rows
        row_size, size, step = dtype.row_size(ne[0]), matrix_size(dtype, ne), _groups_at_a_time(dtype, ne)
        if origin.packed is not None:
            return self._as_they_are(*origin.packed, size * ne[2], place.memory)
        if file is None:
            assert rows is not None
            return [lambda: _pack_rows(rows, dtype, ne, place, step)]
        fd = self._fd(file)

        def job(matrix: int, group: int) -> int:
            first, last = group * GROUP, min(group + step, n_groups)
            staged = self._staging((min(last * GROUP, ne[1]) - first) * row_size)
            n = _read(file, fd, origin.offset + (matrix * ne[1] + first) * row_size, staged.memory)
            pack_groups(dtype, ne, staged.base - first * row_size, place.base + matrix * size, group, last)
            return n

        n_groups = -(-ne[1] // GROUP)
        starts = product(range(ne[2]), range(0, n_groups, step))
        return [lambda matrix=matrix, group=group: job(matrix, group) for matrix, group in starts]

    def _staging(self, n: int) -> Buffer:
        """`n` bytes of memory that this thread alone uses."""
        have: Buffer | None = getattr(self._staged, "buffer", None)
        if have is None or have.size < n:
            have = self._staged.buffer = Buffer.allocate(n)
        return Buffer(have.memory[:n])


def _groups_at_a_time(dtype: DType, ne: Ne) -> int:
    return max(1, _PIECE // (GROUP * dtype.row_size(ne[0])))


def staging_size(dtype: DType, ne: Ne) -> int:
    """Bytes that the readers need to repack such a tensor."""
    return READERS * min(_groups_at_a_time(dtype, ne) * GROUP, ne[1]) * dtype.row_size(ne[0])


def _read(file: MappedFile, fd: int, offset: int, place: Bytes) -> int:
    """Fill `place` from the file. Raises GGUFError when the file has become shorter, or cannot be read."""
    done, n = 0, place.nbytes
    while done < n:
        try:
            got = read_at(fd, place[done:].data, offset + done)
        except OSError as e:
            raise GGUFError(f"{file.path}: cannot be read: {e.strerror}") from e
        if got == 0:
            raise GGUFError(f"{file.path}: the file ends {n - done} bytes before its weights do; load it again")
        done += got
    return n


def _copy(rows: Rows, place: Bytes) -> int:
    end = 0
    for piece in rows(_PIECE):
        place[end : end + piece.size] = piece.reshape(-1)
        end += piece.size
    return end


def _pack_rows(rows: Rows, dtype: DType, ne: Ne, place: Buffer, step: int) -> int:
    row_size, size, done = dtype.row_size(ne[0]), matrix_size(dtype, ne), 0
    for piece in rows(step * GROUP * ne[0]):
        matrix, first = divmod(done, ne[1])
        at = Buffer(piece.reshape(-1)).base - first * row_size
        last = -(-(first + len(piece)) // GROUP)
        pack_groups(dtype, ne, at, place.base + matrix * size, first // GROUP, last)
        done += len(piece)
    return done * row_size
