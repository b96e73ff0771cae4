"""The colours of drawings, and the legend that explains them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import graphviz

from ..tensor import Tensor
from .picture import Kind, Status

COLOURS: dict[Kind | str, str] = {
    "input": "#ffe08a",
    "weight": "#f6c6b5",
    "node": "#cfe2f3",
    "view": "#eeeeee",
    "output": "#b7e1a1",
    "outside": "#ffffff",
    "fold": "#d9d2e9",
    "fused": "#e8f3ec",
}
STATUS_COLOURS: dict[Status, str] = {
    "same": "#f5f5f5",
    "changed": "#ffc966",
    "added": "#8fd694",
    "removed": "#f4a6a6",
}
_KINDS: dict[Kind, str] = {
    "input": "input (ellipse)",
    "weight": "weight, constant or cache (ellipse)",
    "node": "computed; two borders: over memory of another",
    "view": "view, nothing is computed (dashed)",
    "output": "output, kept after the run",
}
_STATUSES: dict[Status, str] = {
    "same": "the same in both graphs",
    "changed": "changed: before -&gt; now",
    "added": "added: only in this graph",
    "removed": "removed: only in the graph compared with (dashed)",
}


def add_legend(
    dot: graphviz.Digraph,
    kinds: Collection[Kind],
    status: Mapping[Tensor, Status],
    folded: bool,
    split: bool,
    again: bool,
    fused: bool,
) -> None:
    """Add a legend of the shapes and colours that this drawing has."""
    rows = [(COLOURS[kind], text) for kind, text in _KINDS.items() if kind in kinds]
    if status:
        rows = [(STATUS_COLOURS[s], text) for s, text in _STATUSES.items() if s in status.values()]
    rows += [(COLOURS["fold"], "layers that repeat")] if folded else []
    rows += [(COLOURS["outside"], "dotted border: drawn again where another layer reads it")] if again else []
    rows += [(COLOURS["fused"], "box: nodes that one step computes (fused)")] if fused else []
    rows.append((COLOURS["outside"], "edges: dashed to a view, dotted from a store to who reads there later"))
    rows += [(COLOURS["outside"], "bold: copied to another backend at the border of a split")] if split else []
    cells = [f'<tr><td bgcolor="{c}" width="24"></td><td align="left">{text}</td></tr>' for c, text in rows]
    head = '<table border="1" color="#bbbbbb" cellborder="0" cellspacing="3"><tr><td colspan="2">legend</td></tr>'
    dot.node("legend", f"<{head}{''.join(cells)}</table>>", shape="plain")
