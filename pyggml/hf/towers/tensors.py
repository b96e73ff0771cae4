"""The tensors of a folder's tower: named as in an mmproj file, and mapped where the checkpoint has them unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pyggml.buffers.buffer import Buffer
from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.gguf_io.bind import bound, read_only
from pyggml.tensor import Ne, Tensor, full_ne

from ..safetensors import StoredTensor
from ..tensors import as_f32
from .family import Array, Name, TowerConfig, TowerFamily

_DTYPES = {"F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16}
_F32 = ("patch_embd", "position_embd", "conv1d", "deepstack.norm")  # roles whose matrices are F32
_BLOCK = re.compile(r"\.blk\.(\d+)\.")


def tower_tensors(
    family: TowerFamily, c: TowerConfig, kv: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, Tensor]:
    """The tower's tensors by their names in the file. Raises ModelError for a tensor of the tower that is not known."""
    n_layer = kv.get(f"clip.{family.side}.block_count", 0)
    rules = family.names(c)
    buffers: dict[str, Buffer] = {}

    def made() -> Iterator[tuple[str, DType, Ne, Buffer, int]]:
        for full, t in stored.items():
            short = full.removeprefix("model.")
            if not short.startswith(family.begin):
                continue
            found, names = _named(rules, short, t)
            block = _BLOCK.search(names[0]) if names else None
            if not names or (block is not None and int(block[1]) >= n_layer):
                continue
            yield from _tensors(found, names, t, buffers)

    return bound(made())


def _named(rules: Sequence[Name], short: str, t: StoredTensor) -> tuple[Name, tuple[str, ...]]:
    for rule in rules:
        match = re.fullmatch(rule.pattern, short)
        if match is not None:
            return rule, tuple(match.expand(to) for to in rule.to)
    raise ModelError(f"{t.file.path}: the tensor {t.name} of the tower is not known: it is not supported")


def _tensors(
    rule: Name, names: tuple[str, ...], t: StoredTensor, buffers: dict[str, Buffer]
) -> Iterator[tuple[str, DType, Ne, Buffer, int]]:
    if rule.split is None:
        dtype = _DTYPES.get(t.dtype)
        if dtype is not None and (dtype is DType.F32 or _keeps(names[0], t.stored())):
            if t.file.path not in buffers:
                buffers[t.file.path] = read_only(t.file.data, t.file)
            yield names[0], dtype, _ne(t.shape), buffers[t.file.path], t.offset
            return
    stored = as_f32(t.stored()) if rule.value else t.stored()
    arrays = [stored] if rule.split is None else rule.split(stored)
    for name, a in zip(names, arrays, strict=True):
        dtype = None if rule.value else _DTYPES.get(t.dtype)
        if dtype is None or not _keeps(name, a):
            a, dtype = as_f32(a), DType.F32
        memory = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
        buffer = Buffer.allocate(memory.size)
        buffer.memory[: memory.size] = memory
        yield name, dtype, _ne(a.shape), buffer, 0


def _ne(shape: tuple[int, ...]) -> Ne:
    return full_ne(shape[::-1] or (1,))


def _keeps(name: str, a: Array) -> bool:
    """Whether a tensor keeps the type in which it is stored: matrices do, which products read."""
    return a.ndim == 2 and not any(role in name for role in _F32)
