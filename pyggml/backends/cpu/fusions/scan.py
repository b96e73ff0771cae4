"""scan: a recurrence that reads its states from their cells and stores them there (ssm.c, linear_attn.c)."""

from __future__ import annotations

from pyggml.native import lib

from ....buffers.alloc import Step
from ....opdef import OPS
from ....tensor import FLAG_OUTPUT, Size, Tensor
from ..isa import kernel_of
from .cells import alone, gathered, is_all, stored, views_up
from .nodes import Fusion, Nodes, fused

SCANS = ("ssm_scan", "rwkv_wkv6", "rwkv_wkv7", "gated_linear_attn", "gated_delta_net")


def _scan(g: Nodes, store: Tensor) -> Step | None:
    """`store` puts the last states of a scan into the cells that it went on from. The rest of its result is read later,
    through views."""
    if (to := stored(store)) is None:
        return None
    behind, out = views_up(to.rows)
    states = to.rows
    if out.op not in SCANS or out.op_params.get("K", 1) != 1 or states.view_offs != out.nbytes - states.nbytes:
        return None
    roles = OPS[out.op].srcs
    state = roles.index("s" if out.op == "ssm_scan" else "state")
    before = out.src[state]
    if before is None or not states.is_contiguous or out not in g.at or out.flags & FLAG_OUTPUT:
        return None
    srcs = dict(enumerate(out.src))
    if out.op == "ssm_scan":  # it reads all cells
        n, read = before.ne[0] * before.ne[1] * before.ne[2], out.src[roles.index("ids")]
        if read is None or not is_all(before, to.cells) or (n, read.ne[0]) != states.ne[:2]:
            return None
        nodes = (*behind, out, store)
    else:
        found = gathered(before, to)
        if found is None or before.n_elements != states.n_elements:
            return None
        nodes = (*found.nodes, *behind, out, store)
        srcs |= {state: found.cells, lib.PG_READ: found.read}
    own = {*nodes}
    if not _reads_results(g, out, own, out.nbytes - states.nbytes):
        return None
    between = g.nodes[g.at[out] + 1 : g.at[store]]
    if any(t not in own and OPS[t.op].kernel is not None for t in between):
        return None
    if (ordered := alone(g, store, nodes, (out, store))) is None:
        return None
    srcs |= {lib.PG_CELLS: store, lib.PG_WRITE: to.ids}
    params = dict(enumerate(out.op_params.values()))
    return fused("scan", ordered, (out, store), kernel_of(g.isa, out), srcs, params)


def _reads_results(g: Nodes, out: Tensor, nodes: set[Tensor], end: int) -> bool:
    """Whether all readers of a scan, except the nodes `own`, are views of its first `end` bytes."""
    readers = g.readers[out]
    for v in readers:
        reach = int(v.view_offs) + 4 + sum((n - 1) * nb for n, nb in zip(v.ne, v.nb, strict=True))
        plain = v.op == "view" and not isinstance(v.view_offs, Size) and not v.flags & FLAG_OUTPUT
        if v not in nodes and (not plain or reach > end):
            return False
    return g.uses[out] == len(readers)


SCAN = Fusion("scan", ("set_rows",), _scan)
