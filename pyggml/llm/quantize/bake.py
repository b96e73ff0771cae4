"""Choose the weights that a file stores repacked for the CPU (`pyggml.gguf_io.baked`), and make their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.gguf_io.baked import can_bake
from pyggml.models import get_architecture
from pyggml.models.weights import Weights
from pyggml.native.packing import GROUP, matrix_size, pack_groups
from pyggml.ops.matmul import weights_of
from pyggml.tensor import Context, Ne, Tensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def baked_weights(arch: str, kv: Mapping[str, Any], shapes: Mapping[str, tuple[DType, Ne]]) -> dict[str, bool]:
    """The tensors that only products and row lookups read, and for each whether rows are looked up. `shapes` has the
    types and ne of the model's tensors. Raises ModelError when the architecture cannot run them."""
    architecture = get_architecture(arch)
    ctx = Context()
    tensors = {name: ctx.new_tensor(dtype, ne, name) for name, (dtype, ne) in shapes.items()}
    weights, hp = Weights(tensors), architecture.hparams(arch, kv)
    try:
        architecture.declare(hp, weights)
    except ModelError as e:
        raise ModelError(f"a layout for the model needs one that can run: {e}") from None
    graph = architecture.least_graph(hp, weights)
    in_products: set[Tensor] = set()
    has_rows: set[Tensor] = set()
    others: set[Tensor] = set()
    for node in graph.nodes:
        for i, t in enumerate(node.src):
            if t is not None and i == 0 and t is weights_of(node):
                in_products.add(t)
            elif t is not None:
                (has_rows if node.op == "get_rows" and i == 0 else others).add(t)
    read = set(graph.leafs)
    baked: dict[str, bool] = {}
    for name, t in weights.items():
        is_product = t not in others and (t in in_products or t not in has_rows)
        if can_bake(name, t.dtype, t.ne) and is_product:
            baked[name] = t in has_rows or t not in read  # this graph does not read it: rows may be looked up elsewhere
    return baked


def packed_pieces(dtype: DType, ne: Ne, pieces: Iterable[tuple[int, Bytes]]) -> Iterator[tuple[int, Bytes]]:
    """Repack a tensor. `pieces` are its stored rows, uint8 [rows, bytes of a row], each piece within one matrix. Yields
    the bytes of each repacked piece with its number of elements."""
    row_size = dtype.row_size(ne[0])
    group_size = matrix_size(dtype, ne) // -(-ne[1] // GROUP)
    held, row, count = np.empty((0, row_size), np.uint8), 0, 0
    for n, piece in pieces:
        rows = piece.reshape(-1, row_size)
        row, count = row + len(rows), count + n
        held = np.concatenate([held, rows])
        n_rows = len(held) if row == ne[1] else len(held) // GROUP * GROUP
        if n_rows:
            groups = -(-n_rows // GROUP)
            out = np.empty(groups * group_size, np.uint8)
            pack_groups(dtype, (ne[0], n_rows, 1, 1), held.ctypes.data, out.ctypes.data, 0, groups)
            yield count, out
            held, count = held[n_rows:], 0
        row %= ne[1]
