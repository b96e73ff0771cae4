"""Write one HTML file that shows a run: its graph, time line, memory and values. The file needs no network."""

from __future__ import annotations

import base64
import json
from html import escape
from pathlib import Path
from typing import Any

from pyggml.opdef import OPS
from pyggml.tensor import FLAG_INPUT, Tensor

from ..layers import layers_of
from ..picture import is_store, kind_of, parameters, place_of, read_later
from ..profile import StepTime
from ..record import Run
from ..values import Values

_HERE = Path(__file__).parent
_SCRIPTS = ("layout.js", "graph.js", "charts.js", "table.js", "details.js", "main.js")


def page(run: Run, title: str, about: dict[str, str] | None = None) -> str:
    """The HTML of a run; `about` has names and texts to show beside the title."""
    data = json.dumps(_data(run, title, about or {}), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    text = (_HERE / "page.html").read_text(encoding="utf-8")
    parts = {
        "TITLE": escape(title),
        "STYLE": (_HERE / "style.css").read_text(encoding="utf-8"),
        "SCRIPT": "\n".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        "DATA": data,
    }
    before, *pieces = text.split("@@")  # text, name, text, name ..
    return before + "".join(parts[x] if i % 2 == 0 else x for i, x in enumerate(pieces))


def _data(run: Run, title: str, about: dict[str, str]) -> dict[str, Any]:
    tensors = [*run.graph.leafs, *run.graph.nodes]
    index = {t: i for i, t in enumerate(tensors)}
    layers, plan = _whole_layers(run), run.schedule.plan
    backend = {t: split.backend for split in run.schedule.splits for t in split.nodes}
    start = min((begin for s in run.steps for begin, _ in s.spans.values()), default=0)
    pools = [
        {
            "name": pool,
            "size": size,
            "blocks": [
                [index[t], plan.offsets[t][1], t.nbytes, *plan.lives[t]]
                for t in plan.offsets
                if plan.offsets[t][0] == pool and t in index and t in plan.lives
            ],
        }
        for pool, size in plan.sizes.items()
    ]
    rows: list[dict[str, Any]] = []
    for t in tensors:
        place = place_of(t, plan)
        row: dict[str, Any] = {
            "name": t.name,
            "op": t.op,
            "kind": kind_of(t),
            "type": t.dtype.name,
            "ne": t.ne,
            "nb": t.nb,
            "shape": t.shape,
            "params": parameters(t),
            "src": [-1 if s is None else index[s] for s in t.src],
            "roles": [OPS[t.op].role(i) for i in range(len(t.src))] if t.op != "none" else [],
        }
        row |= {"layer": layers[t]} if t in layers else {}
        row |= {"place": str(place)} if place is not None else {}
        row |= {"backend": backend[t]} if t in backend else {}
        row |= {"store": t.root.name} if is_store(t) else {}
        row |= {"values": _values(run.values[t])} if t in run.values else {}
        rows.append(row)
    return {
        "title": title,
        "about": about,
        "tensors": rows,
        "steps": [_step(s, index, start) for s in run.steps],
        "stored": [[index[a], index[b]] for a, b in read_later(run.graph)],
        "pools": pools,
        "n_steps": plan.n_steps,
        "wall": run.wall_ns / 1e3,
        "n_threads": run.n_threads,
        "weights": sum(t.nbytes for t in run.graph.leafs if not t.flags & FLAG_INPUT),
    }


def _whole_layers(run: Run) -> dict[Tensor, int]:
    """The layer of each tensor. A node without a number in its name belongs to the layer around it."""
    layers = layers_of(run.graph)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, t in enumerate(run.graph.nodes):
        if t in layers:
            first.setdefault(layers[t], i)
            last[layers[t]] = i
    for il, begin in first.items():
        layers |= {t: il for t in run.graph.nodes[begin : last[il]] if t not in layers}
    return layers


def _step(s: StepTime, index: dict[Tensor, int], start: int) -> dict[str, Any]:
    spans = [[thread, (begin - start) / 1e3, (end - start) / 1e3] for thread, (begin, end) in s.spans.items()]
    nodes = [index[t] for t in s.nodes if t in index]
    return {"nodes": nodes, "op": s.op, "spans": spans, "us": s.ns / 1e3, "flops": s.flops, "bytes": s.n_bytes}


def _number(x: float) -> float | str:
    """A number for JSON, with six digits; NaN and infinities as text."""
    return float(f"{x:.6g}") if abs(x) < float("inf") else str(x)


def _values(v: Values) -> dict[str, Any]:
    return {
        "n": v.n,
        "nan": v.n_nan,
        "inf": v.n_inf,
        "low": _number(v.low),
        "high": _number(v.high),
        "mean": _number(v.mean),
        "std": _number(v.std),
        "bins": v.histogram,
        "corner": [[_number(x) for x in row] for row in v.corner],
        "pixels": base64.b64encode(v.pixels.tobytes()).decode(),
        "columns": v.pixels.shape[1],
    }
