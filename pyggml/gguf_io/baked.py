"""Files whose weights are repacked already, as the CPU's products read them (csrc/products/r16/r16.h).

`pyggml quantize --layout r16` writes them. A weight NAME lies in such a file as NAME.r16: I8, ne [bytes of a group of
16 rows, groups, matrices]. Other readers do not find NAME, and refuse the file. When rows of the weight are also
looked up, as with embeddings, the file has NAME itself too. Keys:

  pyggml.layout           "r16"
  pyggml.layout.version   1: the version of the arrangement of bytes
  pyggml.layout.names     the names of the weights
  pyggml.layout.types     their GGUF types
  pyggml.layout.ne        their ne, four numbers each
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import GGUFError
from pyggml.native.packing import GROUP, can_unpack, matrix_size
from pyggml.tensor import Ne, rank_of

from .read import MAX_NAME, GGUFFile, GGUFTensor, says
from .write import kv_record

LAYOUT = "r16"
_VERSION = 1
_LAYOUT, _LAYOUT_VERSION, _NAMES, _TYPES, _NE = KEYS = (
    "pyggml.layout",
    *(f"pyggml.layout.{end}" for end in ("version", "names", "types", "ne")),
)
_END = f".{LAYOUT}"


def can_bake(name: str, dtype: DType, ne: Ne) -> bool:
    """Whether a file may have such a weight repacked: no bit is lost, and the weight grows by no more than 4 %."""
    return ne[3] == 1 and rank_of(ne) > 1 and len(name) + len(_END) <= MAX_NAME and can_unpack(dtype, ne[0])


def baked_info(name: str, dtype: DType, ne: Ne) -> tuple[str, DType, tuple[int, ...]]:
    """Name, type and ne of the tensor that a repacked weight is in a file."""
    groups = -(-ne[1] // GROUP)
    dims = (matrix_size(dtype, ne) // groups, groups, ne[2])
    return name + _END, DType.I8, dims if ne[2] > 1 else dims[:2]


def layout_records(weights: Sequence[tuple[str, DType, Ne]]) -> list[bytes]:
    """The keys of a file that has these weights repacked."""
    names, types, shapes = zip(*weights, strict=True)
    values: tuple[Any, ...] = (
        LAYOUT,
        np.uint32(_VERSION),
        list(names),
        np.array([t.gguf_id for t in types], np.int32),
        np.array(shapes, np.int64).reshape(-1),
    )
    return [kv_record(key, value) for key, value in zip(KEYS, values, strict=True)]


def with_layout(file: GGUFFile) -> GGUFFile:
    """The file as if its weights were not repacked: with the weights instead of their copies, and without the keys of
    the layout. A file without a layout is returned as it is. Raises GGUFError for an unknown layout, and for keys that
    do not match the tensors."""
    if _LAYOUT not in file.kv:
        return file
    if not (says(file.kv, _LAYOUT, LAYOUT) and says(file.kv, _LAYOUT_VERSION, _VERSION)):
        layout, version = file.kv[_LAYOUT], file.kv.get(_LAYOUT_VERSION)
        raise GGUFError(
            f"{file.path}: its weights are repacked in the layout {layout!r:.40}, version {version!r:.40}; this pyggml "
            f"reads {LAYOUT!r}, version {_VERSION}: it takes the file that it was made of"
        )
    baked = {t.name: t for t in _weights(file)}
    raw = {name + _END: name for name in baked}
    tensors: dict[str, GGUFTensor] = {}
    for t in file.tensors.values():
        found = baked[t.name] if t.name in baked else baked[raw[t.name]] if t.name in raw else t
        tensors[found.name] = found
    kv = {key: value for key, value in file.kv.items() if key not in KEYS}
    spans = {key: span for key, span in file.kv_spans.items() if key not in KEYS}
    return replace(file, kv=kv, kv_spans=spans, tensors=tensors, layout=LAYOUT)


def _weights(file: GGUFFile) -> Iterator[GGUFTensor]:
    """The weights that the keys name."""
    names, types, shapes = _listed(file)
    for i, (name, type_id) in enumerate(zip(names, types, strict=True)):
        ne: Ne = (shapes[4 * i], shapes[4 * i + 1], shapes[4 * i + 2], shapes[4 * i + 3])
        t = file.tensors.get(name + _END)
        try:
            if t is None:
                raise ValueError(f"there is no {name}{_END}")
            dtype = DType.from_gguf(type_id)
            if not min(ne) > 0 or math.prod(ne) > 8 * t.nbytes or not can_bake(name, dtype, ne):
                raise ValueError(f"{dtype.name} {list(ne)} cannot be")
            if t.dtype is not DType.I8 or t.nbytes != matrix_size(dtype, ne) * ne[2]:
                raise ValueError(f"{t.dtype.name} {list(t.ne)} does not hold {dtype.name} {list(ne)}")
        except ValueError as e:
            raise GGUFError(f"{file.path}: repacked weight {name!r:.80}: {e}") from None
        nbytes = dtype.row_size(ne[0]) * ne[1] * ne[2]
        stored = file.tensors.get(name)
        if stored is None:
            yield GGUFTensor(name, dtype, ne, -1, nbytes, rank_of(ne), t.part, t)
        elif (stored.dtype, stored.ne) == (dtype, ne):
            yield replace(stored, packed=t)
        else:
            raise GGUFError(f"{file.path}: {name!r:.80} is {stored.dtype.name} {list(stored.ne)}, and repacked another")


def _listed(file: GGUFFile) -> tuple[list[str], list[int], list[int]]:
    """The name, type and ne (four numbers) of each weight."""
    names, types, shapes = (file.kv.get(key) for key in (_NAMES, _TYPES, _NE))
    if isinstance(names, list) and isinstance(types, np.ndarray) and isinstance(shapes, np.ndarray):
        numbers = types.dtype.kind in "iu" and shapes.dtype.kind in "iu"
        if numbers and (types.size, shapes.size) == (len(names), 4 * len(names)) and len(set(names)) == len(names):
            return names, types.tolist(), shapes.tolist()
    raise GGUFError(f"{file.path}: {_NAMES}, {_TYPES} and {_NE} do not say what its repacked weights are")
