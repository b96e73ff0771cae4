"""Models in several GGUF files, NAME-00001-of-00003.gguf and so on, as llama.cpp splits them.

Each part has the keys `split.no` (from 0), `split.count` and `split.tensors.count` (of all parts together); the first
has the model's metadata, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from pyggml.errors import GGUFError, path_name
from pyggml.native.packing import unpacked
from pyggml.small_file import open_regular
from pyggml.tensor import rank_of

from .baked import with_layout
from .read import GGUF_DEFAULT_ALIGNMENT, Bytes, GGUFFile, GGUFTensor, open_gguf
from .write import GGUFOut, TensorInfo, kv_record, stored_bytes

NO, COUNT, TENSORS = SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
MAX_PARTS = 65535  # the keys are UINT16
_CHUNK = 1 << 22  # bytes in memory at a time


def part_path(prefix: str, no: int, count: int) -> str:
    """`model`, 0, 3 -> `model-00001-of-00003.gguf`."""
    return f"{prefix}-{no + 1:05d}-of-{count:05d}.gguf"


def prefix_of(path: str | os.PathLike[str]) -> str:
    """What the names of the parts begin with: `path` without -00001-of-00003.gguf, or .gguf."""
    return re.sub(r"(-\d{5,}-of-\d{5,})?\.gguf$", "", os.fspath(path))


# -- reading


def open_model(path: str | os.PathLike[str], use_mmap: bool = True) -> GGUFFile:
    """Open a GGUF file. When it is the first of several parts of a model, all parts are opened, as one GGUFFile with
    the tensors of all. Repacked weights (`baked`) appear as the tensors from which they were made. Arguments are those
    of `open_gguf`.

    Raises GGUFError for a bad file; for a part that is not the first or does not have the name of a part; and for a
    part that is missing or belongs to another model.
    """
    return with_layout(_open_parts(path, use_mmap))


def _open_parts(path: str | os.PathLike[str], use_mmap: bool = True) -> GGUFFile:
    first = open_gguf(path, use_mmap)
    count = _number(first, COUNT) if COUNT in first.kv else 0
    if count < 2:
        return first
    if count > MAX_PARTS:  # before any list with a name for each of them
        raise GGUFError(f"{first.path}: {COUNT} is {count}: a model has at most {MAX_PARTS} parts")
    no = _number(first, NO)
    name = path_name(path, GGUFError)
    prefix = prefix_of(name)
    if name != part_path(prefix, no, count):
        raise GGUFError(f"{name}: is part {no + 1} of {count}, and must be named so: {part_path(prefix, no, count)}")
    if no:
        raise GGUFError(f"{name}: is part {no + 1} of {count}; open the first, {part_path(prefix, 0, count)}")
    names = [part_path(prefix, i, count) for i in range(1, count)]
    missing = [part for part in names if not os.path.exists(part)]
    if missing:
        raise GGUFError(f"{name}: {len(missing)} of its {count} parts are missing, the first is {missing[0]}")
    others = tuple(open_gguf(part, use_mmap) for part in names)
    tensors = dict(first.tensors)
    for i, part in enumerate(others, 1):
        _check_part(first, part, i)
        for t in part.tensors.values():
            if t.name in tensors:
                raise GGUFError(f"{part.path}: the tensor {t.name} is in part {tensors[t.name].part + 1} already")
            tensors[t.name] = replace(t, part=i)
    if len(tensors) != _number(first, TENSORS):
        raise GGUFError(f"{name}: its parts have {len(tensors)} tensors together, not {_number(first, TENSORS)}")
    return replace(first, tensors=tensors, others=others)


def _check_part(first: GGUFFile, part: GGUFFile, i: int) -> None:
    if _number(part, NO) != i:
        raise GGUFError(f"{part.path}: holds part {_number(part, NO) + 1}, where its name says part {i + 1}")
    for key in sorted(set(first.kv) & set(part.kv) - {NO}):
        a, b = first.kv[key], part.kv[key]
        if type(a) is not type(b) or not np.array_equal(a, b):
            raise GGUFError(f"{part.path}: is no part of {first.path}: {key} is {b!r:.60}, there {a!r:.60}")


def _number(file: GGUFFile, key: str) -> int:
    value = file.kv.get(key)
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise GGUFError(f"{file.path}: {key} is {'missing' if value is None else 'no count'}")
    return value


def metadata_records(file: GGUFFile) -> list[bytes]:
    """The records of the file's keys as they are, without the keys of a split."""
    return [bytes(file.data[a:b]) for key, (a, b) in file.kv_spans.items() if key not in SPLIT_KEYS]


class PartReader:
    """A context manager that reads the stored bytes of tensors from the parts of a file. It does not map the parts,
    because the pages of a mapping would stay in memory."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def __enter__(self) -> PartReader:
        with ExitStack() as opened:
            self._fds = [opened.enter_context(_reopened(part)) for part in self._file.parts]
            self._open = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._open.close()

    def read(self, t: GGUFTensor, start: int, n: int) -> Bytes:
        """Bytes `start` to `start + n` of the tensor. Raises GGUFError when the file has become shorter."""
        packed = t.packed
        if t.offset < 0 and packed is not None:
            return unpacked(t.dtype, t.ne, start, n, lambda start, n: self.read(packed, start, n))
        f = self._fds[t.part]
        f.seek(t.offset + start)
        data = np.fromfile(f, np.uint8, n)
        if data.size != n:
            raise GGUFError(f"{f.name}: ended within tensor {t.name}; was it changed meanwhile?")
        return data

    def chunks(self, t: GGUFTensor) -> Iterator[Bytes]:
        """All bytes of the tensor, in pieces."""
        for start in range(0, t.nbytes, _CHUNK):
            yield self.read(t, start, min(_CHUNK, t.nbytes - start))


def _reopened(part: GGUFFile) -> BinaryIO:
    """An open part, opened once more. Raises GGUFError when its path names something else by now."""
    f = open_regular(part.path, GGUFError)
    if os.fstat(f.fileno()).st_size != part.size:
        f.close()
        raise GGUFError(f"{part.path}: had {part.size} bytes when it was opened; was it changed meanwhile?")
    return f


# -- writing


def split_tensors(
    tensors: Sequence[TensorInfo], alignment: int, max_size: int | None = None, max_tensors: int | None = None
) -> list[list[TensorInfo]]:
    """The tensors of each part, in order. A part has at most `max_size` bytes of data (each tensor padded) but at least
    one tensor; or at most `max_tensors`. Raises GGUFError when these are too many parts."""
    parts: list[list[TensorInfo]] = []
    size = 0
    for info in tensors:
        n = stored_bytes(info[1], info[2])
        n += -n % alignment
        full = not parts or (len(parts[-1]) == max_tensors if max_size is None else size + n > max_size)
        if full:
            parts.append([])
            size = 0
        parts[-1].append(info)
        size += n
    if len(parts) > MAX_PARTS:
        raise GGUFError(f"these would be {len(parts)} parts, and at most {MAX_PARTS} can be")
    return parts or [[]]


class SplitOut:
    """A context manager like GGUFOut that writes a model in parts. `kv` are its metadata records, `parts` the tensors
    of each part. Write the data of all tensors in that order. The files get their names together at the end, the first
    part last."""

    def __init__(self, prefix: str, kv: Sequence[bytes], parts: Sequence[Sequence[TensorInfo]], alignment: int) -> None:
        self._stack = ExitStack()
        self._left = [len(part) for part in parts]
        self._outs: list[GGUFOut] = []
        n_tensors = sum(self._left)
        self.paths = [part_path(prefix, i, len(parts)) for i in range(len(parts))]
        with ExitStack() as opened:  # when one file cannot be made, the others are closed
            for i, (path, part) in enumerate(zip(self.paths, parts, strict=True)):
                split = zip(SPLIT_KEYS, (np.uint16(i), np.uint16(len(parts)), np.int32(n_tensors)), strict=True)
                own = [kv_record(key, value) for key, value in split]
                out = (
                    GGUFOut(path, own, part, GGUF_DEFAULT_ALIGNMENT)
                    if i
                    else GGUFOut(path, [*kv, *own], part, alignment)
                )
                self._outs.append(opened.enter_context(out))
            self._stack = opened.pop_all()
        self._at = 0

    def write_tensor(self, chunks: Iterable[np.ndarray[Any, np.dtype[Any]]]) -> None:
        """The data of the next tensor: contiguous arrays that follow each other."""
        while not self._left[self._at]:
            self._at += 1
        self._left[self._at] -= 1
        self._outs[self._at].write_tensor(chunks)

    def __enter__(self) -> SplitOut:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, e, tb)


Progress = Callable[[int, int], None]  # bytes done, bytes in all


def split_model(
    path: str | os.PathLike[str],
    prefix: str,
    max_size: int | None = None,
    max_tensors: int | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write a model (in one file, or in several already) in parts, see `split_tensors`; returns their names.

    One pass with constant memory; either all parts appear or none. Raises GGUFError for a bad file, for a prefix that
    has no name, and when a part would replace one that is read, or cannot be written.
    """
    if not os.path.basename(prefix):
        raise GGUFError(f"{prefix!r} names no file: the parts are called NAME-00001-of-00003.gguf")
    file = _open_parts(path)
    infos = [(t.name, t.dtype, t.ne[: rank_of(t.ne)]) for t in file.tensors.values()]
    parts = split_tensors(infos, file.alignment, max_size, max_tensors)
    paths = [part_path(prefix, i, len(parts)) for i in range(len(parts))]
    _write(file, paths, lambda: SplitOut(prefix, metadata_records(file), parts, file.alignment), progress)
    return paths


def merge_model(
    path: str | os.PathLike[str], out: str | os.PathLike[str], progress: Progress | None = None
) -> GGUFFile:
    """Write a model in several files, of which `path` is the first, as one; returns what was read. As `split_model`."""
    file = _open_parts(path)
    infos = [(t.name, t.dtype, t.ne[: rank_of(t.ne)]) for t in file.tensors.values()]
    _write(file, [os.fspath(out)], lambda: GGUFOut(out, metadata_records(file), infos, file.alignment), progress)
    return file


def _write(
    file: GGUFFile, paths: Sequence[str], make: Callable[[], GGUFOut | SplitOut], progress: Progress | None
) -> None:
    refuse_own_output(file, paths)
    total, done = sum(t.nbytes for t in file.tensors.values()), 0
    try:
        with PartReader(file) as reader, make() as out:
            for t in file.tensors.values():
                out.write_tensor(reader.chunks(t))
                done += t.nbytes
                if progress is not None:
                    progress(done, total)
    except OSError as e:
        raise GGUFError(f"{paths[0]}: cannot be written: {e.strerror}") from e


def refuse_own_output(file: GGUFFile, paths: Iterable[str]) -> None:
    """Raises GGUFError when one of `paths` is a part of `file`."""
    for out in paths:
        if os.path.exists(out) and any(os.path.samefile(out, part.path) for part in file.parts):
            raise GGUFError(f"{out}: the output is the input; name another file")


def refuse_source(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Raises GGUFError when `out` is what is converted: the file `source`, or a file of the folder `source`. A GGUF
    file in a folder may be replaced: nothing of a folder is read from one."""
    if not os.path.exists(out):
        return
    read = [os.fspath(source)]
    if os.path.isdir(source):
        with os.scandir(source) as entries:
            read = [entry.path for entry in entries if not entry.name.endswith(".gguf")]
    if any(os.path.exists(path) and os.path.samefile(out, path) for path in read):
        raise GGUFError(f"{os.fspath(out)}: is read, too, and would be lost; name another file")
