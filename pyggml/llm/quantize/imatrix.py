"""Importance matrices: how much each column of a weight matrix matters, as llama.cpp's imatrix tool measures it."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import GGUFError, ShapeError
from pyggml.gguf_io.atomic_file import AtomicFile
from pyggml.gguf_io.read import GGUFFile, open_gguf
from pyggml.gguf_io.write import GGUFOut, TensorInfo, kv_record
from pyggml.small_file import open_regular

Floats = np.ndarray[Any, np.dtype[np.float32]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]
Imatrix = Mapping[str, Floats]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNK_COUNT, _CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
_ALIGNMENT = 32


@dataclass
class ImatrixSums:
    """What was measured so far. Files are merged by adding up.

    sums        tensor name -> sums of squared inputs [matrices, columns]. When tokens do not choose among the tensor's
                matrices (experts), [1, columns of all matrices]
    counts      tensor name -> how many inputs each matrix got
    datasets    names of the texts
    chunk_size  tokens of a chunk
    """

    chunk_size: int
    sums: dict[str, Doubles] = field(default_factory=dict[str, Doubles])
    counts: dict[str, Doubles] = field(default_factory=dict[str, Doubles])
    datasets: list[str] = field(default_factory=list[str])

    def add(self, name: str, sums: Doubles, counts: Doubles) -> None:
        """Add the sums and counts of further inputs of a tensor. Raises ShapeError when their shape differs from
        before."""
        old = self.sums.get(name)
        if old is None:
            self.sums[name], self.counts[name] = sums, counts
            return
        if old.size != sums.size:
            raise ShapeError(f"imatrix: {name} has {sums.size} columns, and had {old.size} before")
        if len(old) != len(sums):  # one of them does not tell the matrices apart
            n = max(len(old), len(sums))
            old, sums = old.reshape(n, -1), sums.reshape(n, -1)
            self.counts[name] = np.broadcast_to(self.counts[name], n)
        self.sums[name], self.counts[name] = old + sums, self.counts[name] + counts

    def merge(self, other: ImatrixSums) -> None:
        """Add the sums and counts of another file."""
        for name, sums in other.sums.items():
            self.add(name, sums, other.counts[name])
        self.datasets += other.datasets

    @property
    def n_chunks(self) -> int:
        """Chunks that were evaluated."""
        return int(max((c.max() for c in self.counts.values()), default=0.0) // max(self.chunk_size, 1))

    def partial(self) -> dict[str, float]:
        """For tensors some of whose matrices got no input: name -> the share of matrices that got input."""
        shares = {name: float((c > 0).mean()) for name, c in self.counts.items()}
        return {name: share for name, share in shares.items() if share < 1}

    def means(self) -> dict[str, Floats]:
        """Tensor name -> mean squares, float32 [matrices, columns]; 1 for a matrix without input."""
        found: dict[str, Floats] = {}
        for name, sums in self.sums.items():
            count = self.counts[name][:, None]
            found[name] = np.where(count > 0, sums / np.maximum(count, 1e-30), 1.0).astype(np.float32)
        return found


def load_imatrix(path: str | os.PathLike[str]) -> dict[str, Floats]:
    """Tensor name -> mean squares of its inputs, float32 [matrices of the tensor, columns].

    Reads llama.cpp's GGUF files (sums and counts per matrix) and the `.dat` files of its older versions. All columns of
    a matrix that got no input weigh the same. Raises GGUFError for a file of another kind, for values that are not
    finite, and for negative ones.
    """
    return load_sums(path).means()


def load_sums(path: str | os.PathLike[str], chunk_size: int = 512) -> ImatrixSums:
    """The sums and counts in a file. A `.dat` file counts in chunks, of `chunk_size` tokens. Raises the errors of
    `load_imatrix`."""
    name = os.fspath(path)
    try:
        with open_regular(name, GGUFError) as f:
            start = f.read(4)
            data = b"" if start == b"GGUF" else start + f.read()
    except OSError as e:
        raise GGUFError(f"{name}: cannot be read: {e.strerror}") from e
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are refused below
        found = _from_dat(name, data, chunk_size) if data else _from_gguf(open_gguf(path))
        means = found.means()
    if not found.sums:
        raise GGUFError(f"{name}: holds no importance matrix")
    for tensor, values in means.items():
        if not np.isfinite(values).all():
            raise GGUFError(f"{name}: the importance matrix of {tensor} holds values that are not finite")
        counts = found.counts[tensor]
        if not (np.isfinite(counts).all() and counts.min() >= 0 and found.sums[tensor].min() >= 0):
            raise GGUFError(f"{name}: the importance matrix of {tensor} has a sum below 0, or a count that is none")
    return found


def save_sums(path: str | os.PathLike[str], found: ImatrixSums) -> None:
    """Write a GGUF file like llama.cpp's; it appears when it is complete."""
    kv = [
        kv_record("general.type", "imatrix"),
        kv_record(_DATASETS, found.datasets or [""]),
        kv_record(_CHUNK_COUNT, found.n_chunks),
        kv_record(_CHUNK_SIZE, found.chunk_size),
    ]
    infos: list[TensorInfo] = []
    arrays: list[Floats] = []
    for name in sorted(found.sums):
        sums = found.sums[name]
        infos += [(name + _SUMS, DType.F32, sums.shape[::-1]), (name + _COUNTS, DType.F32, (1, len(sums)))]
        arrays += [sums.astype(np.float32), found.counts[name].astype(np.float32)]
    with GGUFOut(path, kv, infos, _ALIGNMENT) as out:
        for array in arrays:
            out.write_tensor([np.ascontiguousarray(array).reshape(-1)])


def save_dat(path: str | os.PathLike[str], found: ImatrixSums) -> None:
    """Write a `.dat` file, which older versions of llama.cpp read: means, counted in chunks. Tensors without any input
    are left out."""
    means = found.means()
    names = sorted(name for name in means if found.counts[name].any())
    parts = [struct.pack("<i", len(names))]
    for name in names:
        text = name.encode()
        n_call = -int(-found.counts[name].max() // max(found.chunk_size, 1))
        parts += [struct.pack("<i", len(text)), text, struct.pack("<ii", n_call, means[name].size)]
        parts.append((means[name] * np.float32(n_call)).astype("<f4").tobytes())
    dataset = found.datasets[-1].encode() if found.datasets else b""
    parts += [struct.pack("<ii", found.n_chunks, len(dataset)), dataset]
    with AtomicFile(path) as out:
        out.file.write(b"".join(parts))


def _from_gguf(file: GGUFFile) -> ImatrixSums:
    chunk_size, datasets = file.kv.get(_CHUNK_SIZE), file.kv.get(_DATASETS)
    out = ImatrixSums(chunk_size if isinstance(chunk_size, int) else 0)
    out.datasets = [str(x) for x in datasets] if isinstance(datasets, Sequence) else []
    for name, sums in file.tensors.items():
        if not name.endswith(_SUMS):
            continue
        tensor = name.removesuffix(_SUMS)
        counts = file.tensors.get(tensor + _COUNTS)
        if counts is None or sums.dtype is not DType.F32 or counts.dtype is not DType.F32 or counts.ne[1] != sums.ne[1]:
            raise GGUFError(f"{file.path}: {name} has no matching {tensor}{_COUNTS} of F32")
        total = file.tensor_bytes(name).view(np.float32).reshape(sums.ne[1], sums.ne[0])
        count = file.tensor_bytes(counts.name).view(np.float32).reshape(counts.ne[1], counts.ne[0])[:, 0]
        out.sums[tensor], out.counts[tensor] = total.astype(np.float64), count.astype(np.float64)
    return out


def _from_dat(path: str, data: bytes, chunk_size: int) -> ImatrixSums:
    """The entries of a .dat file: number of entries, then length and name, number of calls, length and values."""
    found = ImatrixSums(chunk_size)
    pos = 0

    def i32() -> int:
        nonlocal pos
        (value,) = struct.unpack_from("<i", data, pos)
        pos += 4
        return int(value)

    try:
        for _ in range(i32()):
            n = i32()
            name = data[pos : pos + n].decode()
            pos += n
            n_call, n_values = i32(), i32()
            if n < 1 or n_values < 1:
                raise ValueError
            if name in found.sums:
                raise GGUFError(f"{path}: the importance matrix of {name:.80} occurs twice")
            values = np.frombuffer(data, "<f4", n_values, pos)
            pos += values.nbytes
            n_call = max(n_call, 1)
            found.sums[name] = values.astype(np.float64)[None] * chunk_size
            found.counts[name] = np.array([float(n_call * chunk_size)])
    except (struct.error, ValueError):
        raise GGUFError(f"{path}: neither a GGUF file nor an importance matrix of older llama.cpp versions") from None
    return found
