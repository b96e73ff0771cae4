"""Write one HTML file that shows a run: its graph, time line, memory and values. The file needs no network."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from pyggml.errors import GraphError
from pyggml.gguf_io.atomic_file import AtomicFile
from pyggml.graph import Graph
from pyggml.opdef import OPS
from pyggml.tensor import FLAG_INPUT, Tensor
from pyggml.var import largest

from ..layers import layers_of
from ..picture import folds, is_store, kind_of, parameters, place_of, read_later
from ..profile import StepTime
from ..record import Run, record
from ..values import Planes, Values

_HERE = Path(__file__).parent
_SCRIPTS = ("layout.js", "graph.js", "charts.js", "table.js", "details.js", "main.js")


def inspect(
    graph: Graph | Run,
    path: str | PathLike[str],
    inputs: Mapping[Tensor | str, Any] | None = None,
    n_threads: int | None = None,
    backends: Sequence[str] = ("cpu",),
) -> None:
    """Run `graph` as `pyggml.inspect.record.record` does, with `inputs` as for `compute`, and write one HTML page that
    shows the graph, the time of each step on each thread, memory, and the values of every node. The page needs no
    network. A run that was recorded before is shown as it is.

    Raises GraphError for what is neither a graph nor a run, and what recording raises; OSError when the file cannot be
    written.
    """
    if not isinstance(graph, (Graph, Run)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"gg.inspect shows a Graph, or a recorded Run, not {type(graph).__name__}")
    run = graph if isinstance(graph, Run) else record(graph, inputs, n_threads, backends)
    html = page(run, Path(fspath(path)).stem)
    with AtomicFile(Path(path)) as out:
        out.file.write(html.encode())


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
    layers, plan = layers_of(run.graph), run.schedule.plan
    backend = {t: split.backend for split in run.schedule.splits for t in split.nodes}
    scores = _scores(run.graph)
    pools = [
        {
            "name": pool,
            "size": size,
            "blocks": [
                [index[t], plan.offsets[t][1], largest(t.nbytes), *plan.lives[t]]
                for t in plan.offsets
                if plan.offsets[t][0] == pool and t in index and t in plan.lives
            ],
        }
        for pool, size in plan.sizes.items()
    ]
    rows: list[dict[str, Any]] = []
    for t in tensors:
        place, (ne, nb) = place_of(t, plan), t.layout
        row: dict[str, Any] = {
            "name": t.name,
            "op": t.op,
            "kind": kind_of(t),
            "type": t.dtype.name,
            "ne": ne,
            "nb": nb,
            "shape": ne[::-1][4 - t.rank :],
            "params": parameters(t),
            "src": [-1 if s is None else index[s] for s in t.src],
            "roles": [OPS[t.op].role(i) for i in range(len(t.src))] if t.op != "none" else [],
        }
        row |= {"layer": layers[t]} if t in layers else {}
        row |= {"place": str(place)} if place is not None else {}
        row |= {"backend": backend[t]} if t in backend else {}
        row |= {"store": t.root.name} if is_store(t) else {}
        row |= {"scores": True} if t in scores else {}
        row |= {"values": _values(run.values[t])} if t in run.values else {}
        rows.append(row)
    return {
        "title": title,
        "about": about,
        "tensors": rows,
        "layers": layers.names,
        "folds": folds(tensors, layers, {}),
        "tokens": run.tokens,
        "steps": [_step(s, index) for s in run.steps],
        "stored": [[index[a], index[b]] for a, b in read_later(run.graph)],
        "pools": pools,
        "n_steps": plan.n_steps,
        "wall": run.wall_ns / 1e3,
        "n_threads": run.n_threads,
        "weights": sum(int(t.nbytes) for t in run.graph.leafs if not t.flags & FLAG_INPUT),
    }


def _scores(graph: Graph) -> set[Tensor]:
    """Masks, and what attention computes from a mask: a row for each token, a column for each cell of the cache."""
    found: set[Tensor] = set()
    for t in graph.nodes:
        roles = [OPS[t.op].role(i) for i in range(len(t.src))]
        mask = t.src[roles.index("mask")] if "mask" in roles else None
        if mask is None:
            continue
        found |= {mask, mask.root}
        s: Tensor | None = t
        while t.op == "soft_max" and s is not None and s.ne == t.ne:  # down to the product of Q and K
            found.add(s)
            s = None if s.op == "mul_mat" else s.src[0]
    return found


def _step(s: StepTime, index: dict[Tensor, int]) -> dict[str, Any]:
    spans = [[thread, begin / 1e3, end / 1e3] for thread, (begin, end) in s.spans.items()]
    nodes = [index[t] for t in s.nodes if t in index]
    return {"nodes": nodes, "op": s.op, "spans": spans, "us": s.ns / 1e3, "flops": s.flops, "bytes": s.n_bytes}


def _number(x: float, digits: int = 6) -> float | str:
    """A number for JSON, with so many digits; NaN and infinities as text."""
    return float(f"{x:.{digits}g}") if abs(x) < float("inf") else str(x)


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
        **({} if v.planes is None else _planes(v.planes)),
    }


def _planes(p: Planes) -> dict[str, Any]:
    return {
        "planes": p.n,
        "rows": p.rows,
        "columns": p.columns,
        "corners": [[[_number(x, 5) for x in row] for row in corner] for corner in p.corners],
        "pixels": base64.b64encode(p.pixels.tobytes()).decode(),
        "size": p.pixels.shape[1:],
    }
