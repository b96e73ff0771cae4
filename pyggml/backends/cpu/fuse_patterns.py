"""What fusions look for: a node that ends a pattern, and the tensors of it. Nothing here knows who else reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...dtypes import DType
from ...tensor import Tensor

UNITS = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}  # activation -> the gated unit that has it
FLOATS = (DType.F32, DType.F16, DType.BF16)
SCANS = {"ssm_scan": 0, "rwkv_wkv6": 5, "rwkv_wkv7": 6, "gated_linear_attn": 4, "gated_delta_net": 5}  # op -> its state
_MAX_TAPS = 8  # of csrc/kernels/short_conv.c
_VIEWS = ("view", "reshape")


def is_f32_rows(t: Tensor | None) -> bool:
    """Whether its rows are dense f32."""
    return t is not None and t.dtype is DType.F32 and t.nb[0] == 4


def other_source(t: Tensor, s: Tensor) -> Tensor | None:
    """Of a node with two sources the one that is not `s`."""
    return t.src[1] if t.src[0] is s else t.src[0]


def norm_of(t: Tensor) -> tuple[Tensor, Tensor] | None:
    """(norm or rms_norm node, weight) where `t` is the product of a norm's rows and one row, all dense f32."""
    if t.op != "mul" or t.view_src is not None:
        return None
    norm, weight = t.src
    if norm is None or weight is None or norm.op not in ("norm", "rms_norm") or norm.src[0] is None:
        return None
    dense = all(is_f32_rows(s) for s in (norm.src[0], norm, weight, t))
    return (norm, weight) if dense and weight.ne == (t.ne[0], 1, 1, 1) else None


class Gate(NamedTuple):
    """A gated unit: `unit` (the op of that name) of `gate` and `up`, or of the halves of each row of `gate`, where `up`
    is None. `act`: the node of the activation, where that is not in the unit's own."""

    unit: str
    gate: Tensor
    up: Tensor | None
    act: Tensor | None = None


def gate_of(t: Tensor) -> Gate | None:
    """The unit that `t` is the result of: a node of that op, or the product of an activation and a value."""
    if t.view_src is not None or not is_f32_rows(t):
        return None
    if t.op in (*UNITS.values(), "swiglu_oai"):
        gate, up = t.src
        if gate is None or not is_f32_rows(gate) or gate is up or t.op_params["swapped"]:
            return None
        return Gate(t.op, gate, up) if up is None or is_f32_rows(up) else None
    for act, up in (t.src, t.src[::-1]) if t.op == "mul" else ():
        if act is not None and up is not None and act.op in UNITS and act.ne == up.ne and act is not up:
            gate = act.src[0]
            whole = gate is not None and all(map(is_f32_rows, (gate, act, up)))
            return Gate(UNITS[act.op], gate, up, act) if gate is not None and whole else None
    return None


def bias_of(t: Tensor) -> tuple[Tensor, Tensor] | None:
    """(product of matrices, leaf of one row) where `t` is their sum; of products by expert, a leaf of a row of each."""
    if t.op not in ("add", "add_id") or t.view_src is not None:
        return None
    product, bias, *ids = t.src
    if product is None or bias is None or bias.op != "none" or bias.view_src is not None or not is_f32_rows(bias):
        return None
    if ids:
        fits = product.op == "mul_mat_id" and product.src[2] is ids[0] and bias.ne[0] == t.ne[0]
    else:
        fits = product.op == "mul_mat" and bias.ne == (t.ne[0], 1, 1, 1)
    return (product, bias) if fits and product.nb == t.nb else None


def views_of_rows(t: Tensor, readers: Sequence[Tensor]) -> bool:
    """Whether the readers of `t`, ne [n, n_rows, n_columns], are one view for each row of all columns, in order."""
    if t.view_src is not None or not is_f32_rows(t) or t.ne[3] != 1 or not len(readers) == t.ne[1] > 1:
        return False
    same = (t.ne[0], t.ne[2], 1, 1), (4, t.nb[2])
    return all(
        v.op == "view" and (v.ne, v.nb[:2]) == same and v.view_offs == i * t.nb[1] for i, v in enumerate(readers)
    )


def weighted_of(t: Tensor) -> tuple[Tensor, Tensor] | None:
    """(rows, weights) where `t`, ne [n, n_rows, n_columns], is rows times a number for each."""
    if t.op != "mul" or t.view_src is not None:
        return None
    rows, weights = t.src
    fits = weights is not None and weights.ne == (1, *t.ne[1:]) and weights.dtype is DType.F32
    return (rows, weights) if rows is not None and weights is not None and fits and is_f32_rows(rows) else None


def _uncapped(scores: Tensor) -> tuple[Tensor, ...]:
    """(x, its scale node, `scores`) where scores are tanh(x times a number), else just those."""
    scaled = scores.src[0] if scores.op == "tanh" else None
    x = scaled.src[0] if scaled is not None and scaled.op == "scale" else None
    if scaled is None or x is None or scaled.op_params["b"] or not scaled.op_params["s"]:
        return (scores,)
    return (x, scaled, scores)


def turned_of(v: Tensor) -> tuple[Tensor, ...]:
    """(rows, [the cast of them to floats], their transpose, `v`) where that is the dense copy of transposed rows."""
    view = v.src[0] if v.op == "cont" else None
    last = view.src[0] if view is not None and view.op == "transpose" else None
    if view is None or last is None or v.ne != view.ne:
        return ()
    rows = last.src[0] if last.op == "cast" else None
    nodes = (last, view, v) if rows is None else (rows, last, view, v)
    return nodes if nodes[0].nb[0] == nodes[0].dtype.type_size else ()


class Attention(NamedTuple):
    """What a product of v and weights, soft_max of that of k and q, is made of.

    v       ne [n_kv, n_embd_head_v, ..]; or its rows, ne [n_embd_head_v, n_kv, ..], of which only a copy is read
    cap     what scores are multiplied with before tanh, or 0
    inner   the nodes on the way
    """

    kq: Tensor
    weights: Tensor
    v: Tensor
    cap: float
    inner: tuple[Tensor, ...]
    in_rows: bool


def attention_of(t: Tensor) -> Attention | None:
    """Attention, where `t` is v times the weights of it, v and k of the same heads. In between are scale and tanh where
    these cap the scores; v may be a transposed copy."""
    if t.op != "mul_mat" or t.view_src is not None:
        return None
    v, weights = t.src
    scores = weights.src[0] if weights is not None and weights.op == "soft_max" else None
    if v is None or weights is None or scores is None or weights.view_src is not None:
        return None
    kq, *cap = _uncapped(scores)
    if kq.op != "mul_mat" or (cap and weights.op_params["scale"] <= 0):
        return None
    k, q = kq.src
    if k is None or q is None or not is_f32_rows(q) or v.dtype not in FLOATS or v.nb[0] != v.dtype.type_size:
        return None
    if k.nb[0] != k.dtype.type_size or k.ne[1:] != (v.ne[0], *v.ne[2:]) or not k.ne[3] == q.ne[3] == t.ne[3]:
        return None
    rows, *copy = turned_of(v) or (v,)
    return Attention(kq, weights, rows, cap[0].op_params["s"] if cap else 0.0, (*copy, kq, *cap, weights), bool(copy))


# -- states in cells: recurrent layers go on from them, and store those that follow -----------------------------------


class Scan(NamedTuple):
    """A scan that goes on from the states `read` names, of `cells`, ne [floats, n_cells]. inner: the nodes before it
    and behind it, up to the one that stores."""

    scan: Tensor
    cells: Tensor
    read: Tensor
    inner: tuple[Tensor, ...]


class Window(NamedTuple):
    """What a convolution reads: d_conv - 1 tokens of each of the `cells` that `read` names, then `x`, ne [channels,
    n_seq_tokens, n_seqs]. inner: the nodes on the way to what is stored."""

    window: Tensor
    x: Tensor
    cells: Tensor
    read: Tensor
    inner: tuple[Tensor, ...]


def states_bytes(scan: Scan, store: Tensor) -> int:
    """What the states take of the end of the scan's result."""
    rows = store.src[1]
    assert rows is not None, store
    return rows.nbytes


def scan_of(store: Tensor) -> Scan | None:
    """The scan whose last states `store`, a node, puts into the cells that it went on from."""
    if (found := _stored(store)) is None:
        return None
    cells, rows, ids = found
    behind, out = _views_up(rows)
    if out.op not in SCANS or out.op_params.get("K", 1) != 1 or rows.view_offs != out.nbytes - rows.nbytes:
        return None
    before = out.src[SCANS[out.op]]
    if before is None or not rows.is_contiguous:
        return None
    if out.op == "ssm_scan":
        n, read = before.ne[0] * before.ne[1] * before.ne[2], out.src[6]
        if read is None or not _is_all(before, cells) or (n, read.ne[0]) != rows.ne[:2]:
            return None
        return Scan(out, before, read, (*behind,))
    gathered = _gathered(before, cells, ids)
    if gathered is None or before.n_elements != rows.n_elements:
        return None
    return Scan(out, *gathered[:2], (*gathered[2], *behind))


def window_of(store: Tensor) -> Window | None:
    """The window of a convolution whose end `store`, a node, puts into the cells that its beginning came from."""
    if (found := _stored(store)) is None:
        return None
    cells, rows, ids = found
    behind = [rows]
    while rows.op in ("reshape", "cont") and (source := rows.src[0]) is not None:
        behind.append(rows := source)
    window = rows.src[0] if rows.op == "view" else None
    if window is None or window.op != "concat" or window.op_params["dim"] != 0 or window.dtype is not DType.F32:
        return None
    before, turned = window.src
    x = turned.src[0] if turned is not None and turned.op == "transpose" else None
    if before is None or turned is None or x is None or x.nb[0] != 4 or before.op != "reshape":
        return None
    n, channels, n_seqs, _ = before.ne
    kept = rows.ne == before.ne and rows.nb[:3] == window.nb[:3] and rows.view_offs == x.ne[1] * 4
    if not kept or window.ne[3] != 1 or n >= _MAX_TAPS or cells.ne[0] != n * channels or ids.ne[0] != n_seqs:
        return None
    if (gathered := _gathered(before, cells, ids)) is None:
        return None
    return Window(window, x, *gathered[:2], (*gathered[2], turned, window, *behind))


def _stored(store: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """(cells, rows, ids) where the node puts whole rows of cells, dense f32."""
    if store.op != "set_rows":
        return None
    cells, rows, ids = store.src
    if cells is None or rows is None or ids is None or rows.op not in _VIEWS:
        return None
    fits = _is_matrix(cells) and ids.dtype is DType.I32 and ids.ne[1:] == (1, 1, 1)
    return (cells, rows, ids) if fits else None


def _is_matrix(t: Tensor) -> bool:
    return t.dtype is DType.F32 and t.is_contiguous and t.ne[2:] == (1, 1)


def _is_all(t: Tensor, cells: Tensor) -> bool:
    """Whether `t` is the bytes of `cells`, all of them."""
    return t.root is cells.root and t.view_offs == cells.view_offs and t.nbytes == cells.nbytes and t.is_contiguous


def _views_up(t: Tensor) -> tuple[list[Tensor], Tensor]:
    """The views that `t` is the last of, and what they are views of."""
    views: list[Tensor] = []
    while t.op in _VIEWS and (source := t.src[0]) is not None:
        views.append(t)
        t = source
    return views, t


def _gathered(t: Tensor, cells: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]] | None:
    """(cells, which of them, the nodes on the way) where `t` is rows of those cells, as many as `ids` names."""
    views, rows = _views_up(t)
    if rows.op != "get_rows" or any(v.op != "reshape" for v in views):
        return None
    source, read = rows.src
    if source is None or read is None or not _is_matrix(source) or not _is_all(source, cells):
        return None
    fits = source.ne == cells.ne and read.dtype is DType.I32 and read.ne == ids.ne
    return (source, read, (rows, *views)) if fits else None
