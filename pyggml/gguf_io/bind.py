"""The tensors of a GGUF file, in the memory that the file is."""

from __future__ import annotations

from collections.abc import Iterable

from pyggml.buffers.buffer import Buffer, Bytes, MappedFile
from pyggml.dtypes import DType
from pyggml.tensor import Context, Ne, Tensor, contiguous_nb, rank_of

from .read import GGUFFile


def bind(file: GGUFFile) -> dict[str, Tensor]:
    """A tensor for each of the file's (of all its parts), by name, with the file as its memory: graphs read it, and
    never write."""
    buffers = [read_only(part.data, part.mapped) for part in file.parts]
    return bound((t.name, t.dtype, t.ne, buffers[t.part], t.offset) for t in file.tensors.values())


def read_only(data: Bytes, mapped: MappedFile | None) -> Buffer:
    """What a file holds as memory that no graph writes into, mapped or not."""
    view = data[:]
    view.flags.writeable = False
    return Buffer(view, "CPU" if mapped is None else "CPU_MMAP", mapped)


def bound(where: Iterable[tuple[str, DType, Ne, Buffer, int]]) -> dict[str, Tensor]:
    """Tensors by name, of (name, type, ne, memory, offset in it)."""
    ctx = Context()
    tensors: dict[str, Tensor] = {}
    for name, dtype, ne, buffer, offset in where:
        tensor = Tensor(ctx, dtype, ne, contiguous_nb(dtype, ne), rank_of(ne))
        tensor.name, tensor.buffer, tensor.offset = name, buffer, offset
        tensors[name] = ctx.adopt(tensor)
    return tensors
