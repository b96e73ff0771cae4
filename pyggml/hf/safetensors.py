"""Read safetensors: one file, or shards with an index. Source: the format's document (huggingface.co/docs/safetensors).

A file has the length of its JSON header (8 bytes), the header (name -> dtype, shape, data_offsets), and the data. It is
mapped, and a tensor is a view of the mapping. The `safetensors` package cannot give NumPy bfloat16, hence this reader.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from pyggml.buffers.buffer import MappedFile
from pyggml.errors import ModelError
from pyggml.foreign import HEAD, foreign
from pyggml.small_file import open_regular, parse_json, read_json
from pyggml.system.memory import forget

Array = npt.NDArray[Any]
_MAX_HEADER = 100_000_000  # the format's own limit
_MAX_DIMS = 32  # NumPy's
_MAX_SIZE = 1 << 63
_STORED = {  # dtype of the format -> NumPy type of the stored values
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a file: `dtype` is the format's name; `offset` is in bytes from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    file: MappedFile

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return math.prod(self.shape) * _STORED[self.dtype].itemsize

    def stored(self) -> Array:
        """The values as the file stores them, a view of the mapping: BF16 as uint16, F8 as uint8."""
        self.file.check()
        data = self.file.data[self.offset : self.offset + self.nbytes]
        return data.view(_STORED[self.dtype]).reshape(self.shape)

    def release(self) -> None:
        """Give the tensor's pages of the mapping back; the next read reads the file again."""
        start = self.offset // mmap.PAGESIZE * mmap.PAGESIZE
        forget(self.file.map, start, self.offset + self.nbytes - start)


def open_folder(folder: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """All tensors of a folder by name: from model.safetensors, from the shards that its index names, or from the one
    other *.safetensors file. Raises ModelError when there are no tensors, a shard is missing, or a file's header does
    not match its data."""
    path = Path(folder)
    index = path / INDEX
    if index.is_file():
        return _sharded(path, index)
    files = [path / SINGLE] if (path / SINGLE).is_file() else sorted(path.glob("*.safetensors"))
    if len(files) > 1:
        raise ModelError(f"{path}: {len(files)} *.safetensors files and no {INDEX}: which are the model's?")
    if not files:
        other = next((f.name for end in ("*.bin", "*.pth", "*.pt", "*.h5", "*.msgpack") for f in path.glob(end)), None)
        why = "" if other is None else f": weights are read from safetensors alone, not from {other}"
        raise ModelError(f"{path}: no *.safetensors file{why}")
    return open_file(files[0])


def _sharded(folder: Path, index: Path) -> dict[str, StoredTensor]:
    about = read_json(index, ModelError)
    weight_map = cast("dict[str, Any]", about).get("weight_map") if isinstance(about, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(n, str) for n in weight_map.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise ModelError(f"{index}: has no weight_map with the name of a file for each tensor")
    weight_map = cast("dict[str, str]", weight_map)
    shards: dict[str, dict[str, StoredTensor]] = {}
    for name in dict.fromkeys(weight_map.values()):
        if Path(name).name != name or "\0" in name:
            raise ModelError(f"{index}: the shard {name!r} is not in the folder")
        shards[name] = open_file(folder / name)
    found = {name: t for shard in shards.values() for name, t in shard.items()}
    for name, shard in weight_map.items():  # a tensor may be in two shards
        if name not in shards[shard]:
            raise ModelError(f"{index}: the tensor {name} is not in {shard}")
        found[name] = shards[shard][name]
    return found


def open_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name. Raises ModelError for a file that is unreadable or does not match its header."""

    def fail(why: str) -> NoReturn:
        raise ModelError(f"{path}: {why}")

    try:
        with open_regular(path, ModelError) as f:
            size = os.fstat(f.fileno()).st_size
            head = f.read(8)
            n = int.from_bytes(head, "little")
            if size < 8 or n > min(size - 8, _MAX_HEADER):
                known = foreign(head + f.read(HEAD - 8)) if n > _MAX_HEADER else ""
                what = f"it begins with {head[:4]!r}{known}" if known else "its header is longer than itself"
                fail(f"no safetensors file: {what}")
            header = parse_json(f"{path}: the header", f.read(n), ModelError)
            mapped = MappedFile(str(path), f.fileno())
    except OSError as e:
        fail(f"cannot be read: {e.strerror}")
    if not isinstance(header, dict):
        fail("no safetensors file: its header is no object")
    found: dict[str, StoredTensor] = {}
    for name, about in cast("dict[str, Any]", header).items():
        if name == "__metadata__":
            continue
        entry = cast("dict[str, Any]", about if isinstance(about, dict) else {})
        dtype, shape, offsets = entry.get("dtype"), _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
        if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
            fail(f"the header's entry of {name:.80} is damaged: {about!r:.120}")
        if dtype not in _STORED:
            fail(f"the tensor {name:.80} has the dtype {dtype:.20}; known are {', '.join(_STORED)}")
        start, end = offsets
        t = StoredTensor(name, dtype, shape, 8 + n + start, mapped)
        if not start <= end or end - start != t.nbytes or 8 + n + end > size:
            fail(f"the tensor {name:.80} of shape {list(shape)} is not where the header says")
        found[name] = t
    end = 8 + n
    for t in sorted(found.values(), key=lambda t: (t.offset, t.nbytes)):  # the format has neither holes nor overlaps
        if t.offset != end:
            fail(f"the tensor {t.name:.80} begins at byte {t.offset}, the one before it ends at {end}")
        end += t.nbytes
    if end != size:
        fail(f"its tensors end at byte {end} of {size}")
    return found


def _sizes(value: object) -> tuple[int, ...] | None:
    """A list of sizes or offsets, at most as many as an array can have dims; None for anything else."""
    if not isinstance(value, list):
        return None
    sizes = cast("list[Any]", value)
    if len(sizes) > _MAX_DIMS or not all(type(n) is int and 0 <= n < _MAX_SIZE for n in sizes):
        return None
    return tuple(sizes)


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """How a file begins that holds these tensors one after the other: name, the format's name of the dtype, shape."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        n = math.prod(shape) * _STORED[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + n]}
        end += n
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, arrays: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Write float32 arrays as one file."""
    with open(path, "wb") as f:
        f.write(header_of((name, "F32", a.shape) for name, a in arrays.items()))
        for a in arrays.values():
            f.write(np.ascontiguousarray(a, "<f4").data)
