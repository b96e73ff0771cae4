"""The graph that closes the holes of a KV cache: the cells in use are gathered, and stored side by side again."""

from __future__ import annotations

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.graph import Graph
from pyggml.tensor import Context, Tensor

from .kv_cache import KVCache


def build_defrag(kv: KVCache) -> tuple[Graph, Tensor]:
    """The graph, and its input `defrag_order`: I32 ne [used], the cells in the order they are to have.

    K and V move as the 16-bit numbers (32-bit ones for a transposed V in F32) that their bytes make up: no value
    changes. The cache must have memory, and a cell in use.
    """
    graph, n = Graph(), kv.used
    with Context() as ctx:
        order = ctx.new_tensor(DType.I32, (n,), "defrag_order").set_input()
        for i, (il, k) in enumerate(zip(kv.layers, kv.k_l, strict=True)):
            if k.buffer is None:  # another stage has it
                continue
            rows = _whole(ctx, k, DType.I16, k.nbytes // kv.size // 2, kv.size)
            moved = gg.get_rows(rows, order)
            graph.build_forward_expand(gg.cpy(moved, _first(rows, n)).set_name(f"k_defrag-{il}"))
            if i >= len(kv.v_l):
                continue
            v = kv.v_l[i]
            if kv.v_trans:
                bits = DType.I16 if v.dtype.type_size == 2 else DType.I32
                columns = _whole(ctx, v, bits, kv.size, v.nbytes // kv.size // bits.type_size)
                moved = gg.get_rows(gg.cont(gg.transpose(columns)), order)
                to = gg.view_2d(columns, n, columns.ne[1], columns.nb[1], 0)
                graph.build_forward_expand(gg.cpy(gg.transpose(moved), to).set_name(f"v_defrag-{il}"))
            else:
                rows = _whole(ctx, v, DType.I16, v.nbytes // kv.size // 2, kv.size)
                moved = gg.get_rows(rows, order)
                graph.build_forward_expand(gg.cpy(moved, _first(rows, n)).set_name(f"v_defrag-{il}"))
    return graph, order


def _whole(ctx: Context, t: Tensor, dtype: DType, *ne: int) -> Tensor:
    """A leaf over the memory of `t`, taken as numbers of another type."""
    whole = ctx.new_tensor(dtype, ne, t.name)
    whole.buffer, whole.offset = t.buffer, t.offset
    return whole


def _first(rows: Tensor, n: int) -> Tensor:
    return gg.view_2d(rows, rows.ne[0], n, rows.nb[1], 0)
