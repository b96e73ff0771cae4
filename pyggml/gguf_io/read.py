"""Read GGUF v2 and v3 files: strict, zero-copy. Source: the GGUF document (ggml/docs/gguf.md).

The parsing is ours (a test equates our constants with the gguf package's): `gguf.GGUFReader` is slow on vocabularies,
and trusts the lengths and offsets in a file.

Everything is checked before anything is allocated: a first walk over the metadata only follows lengths, and values are
decoded when the whole file has been found sound.
"""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from pyggml.buffers.buffer import Buffer, MappedFile
from pyggml.dtypes import DType
from pyggml.errors import GGUFError, path_name
from pyggml.native.packing import unpacked
from pyggml.native.vocab.strings import read_strings, walk_strings
from pyggml.small_file import open_regular
from pyggml.system.memory import lock_pages

Bytes = npt.NDArray[np.uint8]
KVValue = int | float | bool | str | list[str] | npt.NDArray[Any]
Override = int | float | bool | str

_VERSIONS = (2, 3)
_HEADER_SIZE = 24  # magic, version, tensor count, key count
_MIN_KV_SIZE = 8 + 1 + 4 + 1  # key length, a key of one byte, value type, a value of one byte
_MIN_TENSOR_SIZE = 8 + 1 + 4 + 4 + 8  # name length, a name of one byte, n_dims = 0, type, offset
_MAX_KEY = 65535
MAX_NAME = 64
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 21  # a large page; that of most files is 32

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
GGUF_MAGIC = 0x46554747  # "GGUF"
_WHISPER_MAGIC = _U32.pack(0x67676D6C)  # of the files of whisper.cpp, "ggml"
GGUF_DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"


class GGUFValueType(IntEnum):
    """Types of metadata values."""

    UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)


SCALARS: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("u1"),
    GGUFValueType.INT8: np.dtype("i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies in a file. `ne` always has four entries, `ne[0]` fastest. `offset` counts from the beginning
    of the file; -1: the file has only the repacked copy, `packed` (see `baked`)."""

    name: str
    dtype: DType
    ne: tuple[int, int, int, int]
    offset: int
    nbytes: int
    n_dims: int  # as the file has it: dims of one element at the end count
    part: int = 0  # the file that it lies in: a number among the model's `parts`
    packed: GGUFTensor | None = None  # its repacked copy


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """An open GGUF file. The mapping lives as long as this object or any view of its data. For a model in several files
    (`split.open_model`) this is the first file, with the tensors of all."""

    path: str
    size: int
    version: int
    alignment: int
    kv: dict[str, KVValue]
    tensors: dict[str, GGUFTensor]
    data: Bytes  # the whole file, read-only
    kv_spans: dict[str, tuple[int, int]]  # where each key's record (key, type, value) begins and ends
    mapped: MappedFile | None = None  # the mapping that `data` is of; None: the file was read into memory
    others: tuple[GGUFFile, ...] = ()  # the other parts of the model
    layout: str = ""  # the layout of repacked weights; "": the file has no repacked weights

    @property
    def parts(self) -> tuple[GGUFFile, ...]:
        """All files of the model, this one first."""
        return (self, *self.others)

    @property
    def contents(self) -> list[Bytes]:
        """The bytes of each of its files."""
        return [part.data for part in self.parts]

    def tensor_bytes(self, name: str) -> Bytes:
        """The stored bytes of a tensor: uint8 [nbytes], read-only, no copy (for a repacked weight a new array). Raises
        GGUFError for an unknown name, and when the file has become shorter (see `MappedFile`)."""
        t = self.tensors.get(name)
        if t is None:
            raise GGUFError(f"{self.path}: no tensor named {_clip(name)}")
        data, mapped = self.parts[t.part].data, self.parts[t.part].mapped
        if t.offset < 0 and t.packed is not None:
            at = t.packed.offset
            stored = unpacked(t.dtype, t.ne, 0, t.nbytes, lambda start, n: data[at + start : at + start + n])
        else:
            stored = data[t.offset : t.offset + t.nbytes]
        if mapped is not None:
            mapped.check()
        return stored


def open_gguf(path: str | os.PathLike[str], use_mmap: bool = True) -> GGUFFile:
    """Open a GGUF file; `use_mmap=False` reads it into memory (64-byte aligned) instead of mapping it.

    In `kv`, numbers, bools and strings are Python's, arrays of strings are lists, arrays of numbers read-only NumPy
    arrays of the stored type. Strings that are not UTF-8 keep their bytes as surrogates ("surrogateescape").
    Raises GGUFError when the file cannot be opened, is truncated, lies about itself or is of an unknown kind.
    """
    name = path_name(path, GGUFError)
    try:
        with open_regular(name, GGUFError) as f:
            size = os.fstat(f.fileno()).st_size
            if size < _HEADER_SIZE:
                begin = f" ({f.read()!r})" if size else ""
                raise GGUFError(f"{name}: {size} bytes{begin} are too few for a GGUF header of {_HEADER_SIZE}")
            mapped = MappedFile(name, f.fileno())
    except OSError as e:
        raise GGUFError(f"{name}: cannot be read: {e.strerror}") from e
    file = _Parser(name, mapped.data).parse()
    file = replace(file, mapped=mapped) if use_mmap else replace(file, data=_aligned_copy(mapped.data))
    mapped.check()
    return file


def is_whisper_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as those of whisper.cpp do."""
    try:
        with open_regular(path, GGUFError) as f:
            return f.read(4) == _WHISPER_MAGIC
    except (OSError, GGUFError):
        return False  # whoever opens it says why


def with_overrides(kv: Mapping[str, KVValue], overrides: Mapping[str, Override] | None) -> dict[str, KVValue]:
    """A copy of `kv` with values replaced or added; `{arch}` in a key is the file's architecture. A replacement must
    have the kind of the value that it replaces (an int is taken for a float). Raises GGUFError when it has another
    kind, and when the file has an array there."""
    out = dict(kv)
    for pattern, value in (overrides or {}).items():
        new: KVValue = value
        key = pattern.replace("{arch}", str(kv.get("general.architecture")))
        if type(value) not in (int, float, bool, str):
            raise GGUFError(f"override of {_clip(key)}: a {type(value).__name__} is not an int, float, bool or str")
        old = kv.get(key)
        if isinstance(old, float) and type(value) is int:
            new = float(value)
        elif isinstance(old, list | np.ndarray):
            raise GGUFError(f"override of {_clip(key)}: the file has an array here; only single values can be replaced")
        elif old is not None and type(old) is not type(value):
            raise GGUFError(f"override of {_clip(key)}: a {type(value).__name__} for a {type(old).__name__}")
        out[key] = new
    return out


def says(kv: Mapping[str, object], key: str, *values: KVValue) -> bool:
    """Whether the value of a key is one of these single values. (NumPy would compare the elements of an array.)"""
    value = kv.get(key)
    return not isinstance(value, np.ndarray) and value in values


def lock_memory(array: npt.NDArray[Any]) -> bool:
    """Keep an array's pages in RAM (mlock). Failure is a RuntimeWarning and False: the model runs without it."""
    reason = lock_pages(array.ctypes.data, array.nbytes)
    if reason is not None:
        warnings.warn(f"cannot lock {array.nbytes} bytes of memory: {reason}", RuntimeWarning, stacklevel=2)
    return reason is None


def _aligned_copy(data: Bytes) -> Bytes:
    copy = Buffer.allocate(data.size).memory
    copy[:] = data
    copy.flags.writeable = False
    return copy


def _clip(text: str) -> str:
    """A name from the file, quoted and short enough for a message."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


class _Parser:
    """One walk over a file. `pos` is the next byte; every read is checked against the file's size first."""

    def __init__(self, path: str, data: Bytes) -> None:
        self.path = path
        self.data = data
        self.buf = data.data
        self.size = len(data)
        self.pos = 0
        self.kv_spans: dict[str, tuple[int, int]] = {}

    def parse(self) -> GGUFFile:
        version, n_tensors, n_kv = self.header()
        values = self.walk_kv(n_kv)
        infos = self.walk_tensors(n_tensors)
        alignment = self.find_alignment(values)
        tensors = self.place_tensors(infos, alignment)
        kv = {key: self.decode(vtype, pos, self.kv_spans[key][1]) for key, (vtype, pos) in values.items()}
        return GGUFFile(self.path, self.size, version, alignment, kv, tensors, self.data, self.kv_spans)

    def fail(self, what: str, at: int) -> NoReturn:
        raise GGUFError(f"{self.path}: {what} (at byte {at})")

    def take(self, n: int, what: str) -> int:
        """Step over `n` bytes and return where they begin."""
        at = self.pos
        if n > self.size - at:
            self.fail(f"{what} needs {n} bytes, and only {self.size - at} are left", at)
        self.pos = at + n
        return at

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buf, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buf, self.take(8, what))[0])

    def header(self) -> tuple[int, int, int]:
        if self.u32("the magic") != GGUF_MAGIC:
            from pyggml.foreign import HEAD, foreign  # for the error alone

            head = bytes(self.buf[:HEAD])
            self.fail(f"not a GGUF file: it begins with {head[:4]!r}{foreign(head)}", 0)
        version = self.u32("the version")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0 and version:
                self.fail("a big-endian file; only little-endian ones are read", 4)
            self.fail(f"GGUF version {version} is not read; versions 2 and 3 are", 4)
        n_tensors = self.u64("the tensor count")
        n_kv = self.u64("the key count")
        left = self.size - self.pos
        if n_kv * _MIN_KV_SIZE > left:
            self.fail(f"{n_kv} keys cannot fit in the {left} bytes left", 16)
        if n_tensors * _MIN_TENSOR_SIZE > left:
            self.fail(f"{n_tensors} tensors cannot fit in the {left} bytes left", 8)
        return version, n_tensors, n_kv

    def name(self, what: str, limit: int) -> str:
        n = self.u64(f"the length of {what}")
        if not 0 < n <= limit:
            self.fail(f"{what} has {n} bytes; 1 to {limit} are allowed", self.pos - 8)
        at = self.take(n, what)
        try:
            return str(self.buf[at : at + n], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8", at)

    def walk_kv(self, n_kv: int) -> dict[str, tuple[GGUFValueType, int]]:
        """Type and position of each value."""
        values: dict[str, tuple[GGUFValueType, int]] = {}
        for i in range(n_kv):
            start = self.pos
            key = self.name(f"key {i}", _MAX_KEY)
            if key in values:
                self.fail(f"the key {_clip(key)} occurs twice", start)
            what = f"the value of {_clip(key)}"
            vtype = self.value_type(what)
            values[key] = (vtype, self.pos)
            if vtype == GGUFValueType.ARRAY:
                self.skip_array(what)
            else:
                self.skip_values(vtype, 1, what)
            self.kv_spans[key] = (start, self.pos)
        return values

    def value_type(self, what: str) -> GGUFValueType:
        vtype = self.u32(f"the type of {what}")
        try:
            return GGUFValueType(vtype)
        except ValueError:
            self.fail(f"{what} has the unknown type {vtype}", self.pos - 4)

    def skip_array(self, what: str) -> None:
        vtype = self.value_type(f"an element of {what}")
        if vtype == GGUFValueType.ARRAY:
            self.fail(f"{what} is an array of arrays, which is not supported", self.pos - 4)
        self.skip_values(vtype, self.u64(f"the array length of {what}"), what)

    def skip_values(self, vtype: GGUFValueType, n: int, what: str) -> None:
        if vtype == GGUFValueType.STRING:
            self.skip_strings(n, what)
            return
        dtype = SCALARS[vtype]
        at = self.take(n * dtype.itemsize, what)
        if vtype == GGUFValueType.BOOL and n and self.data[at : at + n].max() > 1:
            self.fail(f"{what}: a bool is neither 0 nor 1", at)

    def skip_strings(self, n: int, what: str) -> None:
        if n * 8 > self.size - self.pos:
            self.fail(f"{what}: {n} strings cannot fit in the {self.size - self.pos} bytes left", self.pos)
        found, self.pos = walk_strings(self.data, self.pos, n)
        if found < n:
            self.fail(f"{what}: string {found} of {n} runs past the end of the file", self.pos)

    def walk_tensors(self, n_tensors: int) -> dict[str, tuple[int, DType, list[int], int]]:
        """Read the records of all tensors. Gives for each: where its record begins, type, dims, offset in the data
        section."""
        infos: dict[str, tuple[int, DType, list[int], int]] = {}
        for i in range(n_tensors):
            start = self.pos
            name = self.name(f"the name of tensor {i}", MAX_NAME)
            what = f"tensor {_clip(name)}"
            if name in infos:
                self.fail(f"{what} occurs twice", start)
            n_dims = self.u32(f"the number of dims of {what}")
            if n_dims > _MAX_DIMS:
                self.fail(f"{what} has {n_dims} dims; at most {_MAX_DIMS} are allowed", start)
            ne = [self.u64(f"dim {d} of {what}") for d in range(n_dims)]
            type_id = self.u32(f"the type of {what}")
            try:
                dtype = DType.from_gguf(type_id)
            except ValueError:
                self.fail(f"{what} has the unknown type {type_id}", self.pos - 4)
            infos[name] = (start, dtype, ne, self.u64(f"the offset of {what}"))
        return infos

    def find_alignment(self, values: Mapping[str, tuple[GGUFValueType, int]]) -> int:
        if ALIGNMENT_KEY not in values:
            return GGUF_DEFAULT_ALIGNMENT
        vtype, at = values[ALIGNMENT_KEY]
        if vtype != GGUFValueType.UINT32:
            self.fail(f"{ALIGNMENT_KEY} is a {vtype.name}, not a UINT32", at)
        alignment = int(_U32.unpack_from(self.buf, at)[0])
        if alignment == 0 or alignment & (alignment - 1):
            self.fail(f"the alignment {alignment} is not a power of two", at)
        if alignment > _MAX_ALIGNMENT:  # who writes the model again fills up as much, though the file be of 100 bytes
            self.fail(f"the alignment {alignment} is not supported: up to {_MAX_ALIGNMENT} are", at)
        return alignment

    def place_tensors(
        self, infos: Mapping[str, tuple[int, DType, list[int], int]], alignment: int
    ) -> dict[str, GGUFTensor]:
        base = self.pos + -self.pos % alignment  # the data section follows the metadata
        tensors: dict[str, GGUFTensor] = {}
        for name, (start, dtype, dims, rel) in infos.items():
            what = f"tensor {_clip(name)}"
            if 0 in dims:
                self.fail(f"{what} has a dim of 0: {dims}", start)
            ne0, ne1, ne2, ne3 = (*dims, *([1] * (_MAX_DIMS - len(dims))))
            try:
                nbytes = dtype.row_size(ne0) * ne1 * ne2 * ne3  # Python's ints: nothing overflows
            except ValueError as e:
                self.fail(f"{what}: {e}", start)
            if rel % alignment:
                self.fail(f"{what}: its offset {rel} is not a multiple of the alignment {alignment}", start)
            if base + rel + nbytes > self.size:
                self.fail(
                    f"{what}, {dtype.name} {dims}, needs bytes {base + rel} to {base + rel + nbytes} of a file of "
                    f"{self.size}: its download may have been broken off",
                    start,
                )
            tensors[name] = GGUFTensor(name, dtype, (ne0, ne1, ne2, ne3), base + rel, nbytes, len(dims))
        end, before = 0, ""
        for t in sorted(tensors.values(), key=lambda t: t.offset):
            if t.offset < end:
                self.fail(f"tensor {_clip(t.name)} overlaps tensor {_clip(before)}", infos[t.name][0])
            end, before = t.offset + t.nbytes, t.name
        return tensors

    def decode(self, vtype: GGUFValueType, at: int, end: int) -> KVValue:
        """Decode the value between `at` and `end`. The walk has checked that it lies within the file."""
        if vtype == GGUFValueType.STRING:
            return str(self.buf[at + 8 : end], "utf-8", "surrogateescape")
        if vtype != GGUFValueType.ARRAY:
            return cast(KVValue, np.frombuffer(self.buf, SCALARS[vtype], 1, at)[0].item())
        item = GGUFValueType(_U32.unpack_from(self.buf, at)[0])
        n = int(_U64.unpack_from(self.buf, at + 4)[0])
        if item == GGUFValueType.STRING:
            return read_strings(self.data, at + 12, end, n)
        array = np.array(np.frombuffer(self.data, SCALARS[item], n, at + 12))  # a copy is aligned
        array.flags.writeable = False
        return array
