"""Tensors whose memory is a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable

from pyggml.buffers.buffer import Buffer, Bytes, LazyBuffer, MappedFile
from pyggml.dtypes import DType
from pyggml.form import BUFT, repacked
from pyggml.tensor import Context, Ne, Tensor, contiguous_nb, rank_of

from .read import GGUFFile, GGUFTensor


def bind(file: GGUFFile, copies: bool = True) -> dict[str, Tensor]:
    """A tensor for each tensor of the file and its other parts, by name. Its memory is the file: graphs read it and
    never write to it. With `copies`, products read the repacked copies that the file has. The stored bytes of such a
    weight are made when anything else needs them."""
    buffers = [read_only(part.data, part.mapped) for part in file.parts]
    lazy = {t.name: _lazy(file, t) for t in file.tensors.values() if t.offset < 0}
    tensors = bound(
        (t.name, t.dtype, t.ne, lazy.get(t.name) or buffers[t.part], max(t.offset, 0)) for t in file.tensors.values()
    )
    for t in file.tensors.values():
        if copies and t.packed is not None:
            part, at = file.parts[t.packed.part], t.packed.offset
            copy = Buffer(part.data[at : at + t.packed.nbytes], BUFT, part.mapped)
            tensors[t.name].form = repacked(copy)
    return tensors


def _lazy(file: GGUFFile, t: GGUFTensor) -> Buffer:
    return LazyBuffer(None, lambda: file.tensor_bytes(t.name), file.parts[t.part].mapped)


def read_only(data: Bytes, mapped: MappedFile | None) -> Buffer:
    """Bytes of a file, mapped or not, as memory that no graph writes into."""
    view = data[:]
    view.flags.writeable = False
    return Buffer(view, "CPU" if mapped is None else "CPU_MMAP", mapped)


def bound(where: Iterable[tuple[str, DType, Ne, Buffer, int]]) -> dict[str, Tensor]:
    """Tensors by name, made of (name, type, ne, memory, offset in the memory)."""
    ctx = Context()
    tensors: dict[str, Tensor] = {}
    for name, dtype, ne, buffer, offset in where:
        tensor = Tensor(ctx, dtype, ne, contiguous_nb(dtype, ne), rank_of(ne))
        tensor.name, tensor.buffer, tensor.offset = name, buffer, offset
        tensors[name] = ctx.adopt(tensor)
    return tensors
