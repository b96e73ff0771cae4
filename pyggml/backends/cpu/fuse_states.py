"""What fusions look for where recurrent layers go on from states in cells and store those that follow. Nothing here
knows who else reads them."""

from __future__ import annotations

from typing import NamedTuple

from ...dtypes import DType
from ...tensor import Tensor

SCANS = {"ssm_scan": 0, "rwkv_wkv6": 5, "rwkv_wkv7": 6, "gated_linear_attn": 4, "gated_delta_net": 5}  # op -> its state
_MAX_TAPS = 8  # of csrc/kernels/short_conv.c
_VIEWS = ("view", "reshape")


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
