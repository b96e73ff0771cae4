"""conv: a convolution over time, the bias and silu of its result, and what cells keep of its window (short_conv.c)."""

from __future__ import annotations

from typing import NamedTuple

from pyggml.native import lib

from ....buffers.alloc import Step
from ....dtypes import DType
from ....tensor import Tensor
from .cells import Gathered, Stored, alone, gathered, stored
from .nodes import Fusion, Nodes, fused, is_f32_rows, other_source


class Window(NamedTuple):
    """The input of a convolution: d_conv - 1 tokens of each of the cells `before`, then `x`, ne [channels,
    n_seq_tokens, n_seqs]. nodes: the nodes that make the tokens which are stored."""

    node: Tensor
    x: Tensor
    before: Gathered
    nodes: tuple[Tensor, ...]


def _window(to: Stored) -> Window | None:
    """The window of a convolution whose end is stored in the cells that its beginning came from."""
    rows, behind = to.rows, [to.rows]
    while rows.op in ("reshape", "cont") and (source := rows.src[0]) is not None:
        behind.append(rows := source)
    node = rows.src[0] if rows.op == "view" else None
    if node is None or node.op != "concat" or node.op_params["dim"] != 0 or node.dtype is not DType.F32:
        return None
    before, turned = node.src
    x = turned.src[0] if turned is not None and turned.op == "transpose" else None
    if before is None or turned is None or x is None or x.nb[0] != 4 or before.op != "reshape":
        return None
    n, channels, n_seqs, _ = before.ne
    kept = rows.ne == before.ne and rows.nb[:3] == node.nb[:3] and rows.view_offs == x.ne[1] * 4
    if not kept or node.ne[3] != 1 or n >= lib.PG_CONV_MAX_TAPS:
        return None
    if to.cells.ne[0] != n * channels or to.ids.ne[0] != n_seqs or (found := gathered(before, to)) is None:
        return None
    return Window(node, x, found, (*found.nodes, turned, node, *behind))


def _conv(g: Nodes, store: Tensor) -> Step | None:
    """Find a convolution, the end of whose window `store` keeps."""
    to = stored(store)
    window = None if to is None else _window(to)
    conv = None if window is None else next((t for t in g.readers.get(window.node, ()) if t.op == "ssm_conv"), None)
    if to is None or window is None or conv is None or conv.src[0] is not window.node or g.at[store] > g.at[conv]:
        return None
    weights = conv.src[1]
    if weights is None or not weights.is_contiguous:
        return None
    way, nodes, bias = [conv], [conv], None  # reshapes are part of it when a bias or silu follows
    while (t := g.reader(way[-1])) is not None and t.ne[0] == conv.ne[0] and nodes[-1].op != "silu":
        added = other_source(t, way[-1]) if t.op == "add" and len(nodes) == 1 else None
        is_bias = added is not None and added.ne == (t.ne[0], 1, 1, 1) and is_f32_rows(added)
        way.append(t)
        if t.view_src is None and (is_bias or t.op == "silu"):
            nodes, bias = [*way], added if is_bias else bias
        elif t.op != "reshape":
            break
    last = nodes[-1]
    if (ordered := alone(g, store, (*window.nodes, store, *nodes), (store, last))) is None:
        return None
    srcs = {
        lib.PG_CONV_X: window.x,
        lib.PG_CONV_WEIGHTS: weights,
        lib.PG_CONV_BIAS: bias,
        lib.PG_CONV_FROM: window.before.cells,
        lib.PG_READ: window.before.read,
        lib.PG_CELLS: store,
        lib.PG_WRITE: to.ids,
    }
    params = {lib.PG_CONV_SILU: last.op == "silu"}
    return fused("conv", ordered, (last, store), g.kernel("conv_state"), srcs, params)


CONV = Fusion("conv", ("set_rows",), _conv)
