"""Draw a graph: as DOT text, always the same bytes for the same graph, and as pictures if `dot` is installed."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import graphviz

from ..buffers.alloc import Plan
from ..errors import GraphError
from ..graph import Graph
from ..opdef import OPS
from ..sched import Scheduler, Split
from ..tensor import Tensor
from .legend import COLOURS, STATUS_COLOURS, add_legend
from .picture import (
    Fold,
    Place,
    Status,
    folds,
    is_store,
    kind_of,
    layers_of,
    parameters,
    place_of,
    read_later,
    select,
    statuses,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .record import Run

_SHORT = 32  # characters of parameters in a label; the tooltip has all of them
_AT_A_GLANCE = 200  # a notebook draws graphs of up to this many tensors


class Drawing(TypedDict, total=False):
    """Which tensors of a graph are drawn, and what is shown of them.

    layers     (first, end): only tensors of these layers of a model, and their neighbours
    nodes      only tensors whose names match one of these patterns (as of the shell), and their neighbours
    around     ... and all tensors up to this many edges from them
    fold       draw layers that repeat as one box with a count
    scheduler  show the backend of each node, the place of each tensor in its buffer, and the borders of splits, as
               this scheduler would have them
    run        show what was recorded: times, bytes moved, backends and buffers, least, greatest and mean value, NaN
    against    another graph to compare with: added tensors are green, changed ones orange, missing ones red
    legend     explain shapes and colours
    """

    layers: tuple[int, int] | None
    nodes: Sequence[str]
    around: int
    fold: bool
    scheduler: Scheduler | None
    run: Run | None
    against: Graph | None
    legend: bool


class _Facts:
    """What a drawing shows of tensors besides their op and shape."""

    def __init__(self, graph: Graph, options: Drawing) -> None:
        self.layers = layers_of(graph)
        self.backend: dict[Tensor, str] = {}
        self.place: dict[Tensor, Place] = {}
        self.split: dict[Tensor, int] = {}
        self.splits: list[Split] = []
        self.status: dict[Tensor, Status] = {}
        self.removed: list[Tensor] = []
        run, scheduler, old = options.get("run"), options.get("scheduler"), options.get("against")
        self.steps, self.values = ({}, {}) if run is None else run.on(graph)
        if run is not None and run.graph.nodes[-1] in graph:
            self._placed(graph, run.schedule.splits, run.schedule.plan)
        elif scheduler is not None:
            self._placed(graph, *scheduler.plan(graph))
        if old is not None:
            self.status, self.removed = statuses(graph, old)
            self.status |= dict.fromkeys(self.removed, "removed")
            self.layers |= {t: il for t, il in layers_of(old).items() if t in set(self.removed)}

    def _placed(self, graph: Graph, splits: list[Split], plan: Plan) -> None:
        self.splits = splits
        for i, split in enumerate(splits):
            for t in split.nodes:
                self.split[t], self.backend[t] = i, split.backend
                for s in t.src:
                    if s is not None and s.op == "none":
                        self.split.setdefault(s, i)
        found = {t: place_of(t, plan) for t in (*graph.leafs, *graph.nodes)}
        self.place = {t: place for t, place in found.items() if place is not None}

    def lines(self, t: Tensor) -> list[str]:
        """The lines of a label below op and shape."""
        on = [f"on {self.backend[t]}"] if t in self.backend else []
        lines = [": ".join([*on, *([str(self.place[t])] if t in self.place else [])])]
        step = self.steps.get(t)
        if step is not None and step.nodes[-1] is not t and step.name != t.name:
            lines.append(f"in {step.op} of {step.name}")
        elif step is not None:
            fused = f"{step.op} " if len(step.nodes) > 1 else ""
            lines.append(f"{fused}{step.ns / 1e3:.1f} us, {_bytes(step.n_bytes)} moved")
        if t in self.values:
            v = self.values[t]
            lines += [str(v), *([f"{v.n_nan} NaN"] * bool(v.n_nan)), *([f"{v.n_inf} infinite"] * bool(v.n_inf))]
        return [line for line in lines if line]


def _bytes(n: int) -> str:
    return f"{n} B" if n < 10_000 else f"{n / 1e3:.0f} kB" if n < 10_000_000 else f"{n / 1e6:.0f} MB"


def _label(t: Tensor, facts: _Facts) -> str:
    lines = [t.name]
    if t.op != "none":
        given = parameters(t)
        lines.append(f"{t.op} {given}" if 0 < len(given) <= _SHORT else t.op)
    if is_store(t):
        lines.append(f"in place: {t.root.name}")
    lines.append(f"{t.dtype.name} [{', '.join(map(str, t.ne))}]")
    return _escape("\n".join([*lines, *facts.lines(t)])).replace("\n", "\\n")


def _tooltip(t: Tensor) -> str:
    parts = ["leaf"] if t.op == "none" else [OPS[t.op].label, parameters(t)]
    if t.view_src is not None:
        parts.append(f"at byte {t.view_offs} of {t.view_src.name}")
    return _escape("; ".join(part for part in parts if part))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\")


def _add(into: graphviz.Digraph, ident: str, t: Tensor, facts: _Facts, outside: bool = False) -> None:
    kind, status = kind_of(t), facts.status.get(t)
    style = "filled,dashed" if outside or kind == "view" or status == "removed" else "filled"
    more = {"peripheries": "2"} if is_store(t) else {}
    if t in facts.values and facts.values[t].n_nan:
        more |= {"color": "#d00000", "penwidth": "3"}
    fill = COLOURS["outside"] if outside else STATUS_COLOURS[status] if status else COLOURS[kind]
    shape = "ellipse" if t.op == "none" else "box"
    into.node(ident, _label(t, facts), shape=shape, style=style, fillcolor=fill, tooltip=_tooltip(t), **more)


def _add_fold(into: graphviz.Digraph, ident: str, fold: Fold, members: Sequence[Tensor], facts: _Facts) -> None:
    nodes = [t for t in members if t.op != "none"]
    each = f"{len(nodes) // fold.times} nodes, {(len(members) - len(nodes)) // fold.times} leafs each time"
    ops = Counter(t.op for t in nodes if OPS[t.op].kernel is not None)
    lines = [str(fold), each, *(f"{op} x {n // fold.times}" for op, n in ops.most_common(4))]
    ns = sum(facts.steps[t].ns for t in nodes if t in facts.steps and facts.steps[t].nodes[-1].name == t.name)
    lines += [f"{ns / 1e3:.1f} us in all"] if ns else []
    n_nan = sum(facts.values[t].n_nan for t in members if t in facts.values)
    more = {"color": "#d00000", "penwidth": "3"} if n_nan else {}
    lines += [f"{n_nan} NaN"] if n_nan else []
    status = Counter(facts.status[t] for t in members if facts.status.get(t, "same") != "same")
    lines += [f"{n // fold.times} {what}" for what, n in sorted(status.items())]
    fill = STATUS_COLOURS["changed"] if status else COLOURS["fold"]
    label = _escape("\n".join(lines)).replace("\n", "\\n")
    into.node(ident, label, shape="box3d", style="filled", fillcolor=fill, tooltip="layers that repeat", **more)


def to_digraph(graph: Graph, **options: Unpack[Drawing]) -> graphviz.Digraph:
    """The drawing of `graph` as a graphviz.Digraph, see `Drawing`.

    The nodes of one layer of a model stand in a cluster; so do the nodes of a split when there are several splits. A
    node that writes over memory of another has two borders, and a dotted edge leads from it to the node that reads the
    memory later. Raises GraphError when nothing is left to draw.
    """
    if not isinstance(graph, Graph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"only a Graph can be drawn, not {type(graph).__name__}")
    _check(options)
    shown = select(graph, options.get("layers"), options.get("nodes", ()), options.get("around", 0))
    facts = _Facts(graph, options)
    ids = {t: f"leaf{i}" for i, t in enumerate(graph.leafs)} | {t: f"node{i}" for i, t in enumerate(graph.nodes)}
    if len(shown) == len(ids):  # the whole graph is drawn
        shown += facts.removed
    ids |= {t: f"old{i}" for i, t in enumerate(facts.removed)}
    dot = _empty()
    boxes = _boxes(dot, shown, facts, ids, bool(options.get("fold")))
    if options.get("legend"):
        add_legend(dot, {kind_of(t) for t in shown}, facts.status, boxes != ids, len(facts.splits) > 1)
    _edges(dot, graph, shown, facts, ids, boxes)
    return dot


def _check(options: Drawing) -> None:
    unknown = [name for name in options if name not in Drawing.__annotations__]
    if unknown:
        raise TypeError(f"drawings have no option {unknown[0]!r}; there are {', '.join(Drawing.__annotations__)}")
    scheduler, run = options.get("scheduler"), options.get("run")
    if not (scheduler is None or isinstance(scheduler, Scheduler)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"scheduler must be a Scheduler, not {type(scheduler).__name__}")
    if not (run is None or hasattr(run, "step_of")):
        raise GraphError(f"run must be what pyggml.inspect.record gives, not {type(run).__name__}")


def _boxes(
    dot: graphviz.Digraph, shown: list[Tensor], facts: _Facts, ids: dict[Tensor, str], fold: bool
) -> dict[Tensor, str]:
    """Draw the tensors in clusters. Returns the box of each tensor: its own, or the box of its fold."""
    note = {t: (facts.status.get(t), facts.backend.get(t)) for t in shown}
    found = folds(shown, facts.layers, note) if fold else []
    fold_of = {il: f for f in found for il in range(f.first, f.end)}
    several = len(facts.splits) > 1
    groups: dict[tuple[int | None, int | None], list[Tensor]] = {}
    for t in shown:
        groups.setdefault((facts.split.get(t) if several else None, facts.layers.get(t)), []).append(t)
    boxes = dict(ids)
    inside: dict[int | None, graphviz.Digraph] = {None: dot}
    for i, split in enumerate(facts.splits if several else ()):
        inside[i] = graphviz.Digraph(f"cluster_split{i}")
        copies = ", ".join(t.name for t in split.inputs)
        label = _escape(f"split {i} on {split.backend}") + (f"\\ncopies {_escape(copies)}" if copies else "")
        inside[i].attr(label=label, color="#c05000", style="dashed", penwidth="2", fontname="Helvetica")
    drawn: set[Fold] = set()
    for (at, il), members in groups.items():
        into = inside[at]
        if il in fold_of:
            f = fold_of[il]
            if f not in drawn:
                drawn.add(f)
                members = [t for t in shown if facts.layers.get(t) in range(f.first, f.end)]
                boxes |= dict.fromkeys(members, f"fold{f.first}")
                _add_fold(into, f"fold{f.first}", f, members, facts)
            continue
        if il is not None:
            into = graphviz.Digraph(f"cluster_{il}" if at is None else f"cluster_{il}_split{at}")
            into.attr(label=f"layer {il}", color="#999999", fontname="Helvetica", style="solid", penwidth="1")
        for t in members:
            _add(into, ids[t], t, facts)
        if il is not None:
            inside[at].subgraph(into)
    for i in range(len(inside) - 1):
        dot.subgraph(inside[i])
    return boxes


def _edges(
    dot: graphviz.Digraph,
    graph: Graph,
    shown: Sequence[Tensor],
    facts: _Facts,
    ids: dict[Tensor, str],
    boxes: dict[Tensor, str],
) -> None:
    inside, outside, done = set(shown), set[Tensor](), set[tuple[str, str]]()

    def draw(s: Tensor, t: Tensor, label: str | None, style: str, **more: str) -> None:
        ends = boxes.get(s, ids.get(s, "")), boxes[t]
        folded = boxes.get(s) != ids.get(s) or boxes[t] != ids[t]
        if ends[0] != ends[1] and not (folded and ends in done):
            done.add(ends)
            dot.edge(*ends, label=None if folded else label, style=style, **more)

    for t in shown:
        for i, s in enumerate(t.src):
            if s is None:
                continue
            if s not in ids:  # a removed tensor reads a tensor that is still there, under its name
                s = next((u for u in ids if u.name == s.name and (u.op == "none") == (s.op == "none")), None)
                if s is None:
                    continue
            if s not in inside and s not in outside:
                outside.add(s)
                _add(dot, ids[s], s, facts, outside=True)
            role = OPS[t.op].role(i) if len(t.src) > 1 else ""
            copied = t in facts.split and s in facts.splits[facts.split[t]].inputs
            style = "dashed" if OPS[t.op].kernel is None else "bold" if copied else "solid"
            draw(s, t, f"{role} (copied)" if copied else role, style, **({"color": "#c05000"} if copied else {}))
    for store, reader in read_later(graph):
        if store in inside and reader in inside:
            draw(store, reader, None, "dotted", tooltip=f"stored in {_escape(store.root.name)}")


def _empty() -> graphviz.Digraph:
    dot = graphviz.Digraph("cgraph", graph_attr={"rankdir": "TB", "newrank": "true"})
    dot.attr("node", fontname="Helvetica", fontsize="10")
    dot.attr("edge", fontname="Helvetica", fontsize="8", arrowsize="0.6")
    return dot


def _summary(graph: Graph) -> graphviz.Digraph:
    """The picture of a graph that is too large to be drawn in a notebook, even folded: how often it has each op."""
    lines = [f"{graph.n_nodes} nodes, {graph.n_leafs} leafs"]
    layers = set(layers_of(graph).values())
    lines += [f"{len(layers)} layers: dump_dot(g, path, layers=(0, 1)) draws the first"] if layers else []
    lines += [f"{op} x {n}" for op, n in Counter(t.op for t in graph.nodes).most_common()]
    lines += [f"{what}: {t.describe()}" for what, t in (("first", graph.nodes[0]), ("last", graph.nodes[-1]))]
    lines.append("render(g, path) draws them all")
    dot = _empty()
    dot.node("graph", "".join(f"{_escape(line)}\\l" for line in lines), shape="box")
    return dot


def dump_dot(graph: Graph, path: str | PathLike[str] | None = None, **options: Unpack[Drawing]) -> str:
    """The DOT text of `graph`, which is also written to `path` when one is given. `options`: the fields of `Drawing`
    (layers, nodes, around, fold, scheduler, run, against, legend).

    Raises GraphError when nothing is left to draw, or the file cannot be written.
    """
    text = to_digraph(graph, **options).source
    if path is not None:
        _write(path, text.encode())
    return text


def _path(path: str | PathLike[str]) -> Path:
    if not isinstance(path, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"a drawing is written to a path, not {path!r}")
    return Path(path)


def _write(path: str | PathLike[str], data: bytes) -> None:
    try:
        _path(path).write_bytes(data)
    except (OSError, ValueError) as e:  # ValueError: a name with a null byte
        raise GraphError(f"cannot write {path}: {e}") from None


def render(graph: Graph, path: str | PathLike[str], **options: Unpack[Drawing]) -> None:
    """Draw `graph` into an .svg, .png or .pdf file; `options` as of `dump_dot`.

    Raises GraphError when the `dot` program is missing or fails, or the file cannot be written.
    """
    out = _path(path)
    try:
        drawn = to_digraph(graph, **options).pipe(format=out.suffix.lstrip(".") or "svg")
    except graphviz.ExecutableNotFound:
        raise GraphError("drawing needs Graphviz's `dot` program; dump_dot() writes the text without it") from None
    except (ValueError, subprocess.CalledProcessError) as e:
        raise GraphError(f"dot could not draw {out}: {e}") from None
    _write(out, drawn)


def svg(graph: Graph) -> str | None:
    """The picture of a graph in a notebook; None when Graphviz's program is not installed."""
    try:
        small = graph.n_nodes + graph.n_leafs <= _AT_A_GLANCE
        drawn = to_digraph(graph, fold=not small)
        few = small or drawn.source.count(" [label=") <= _AT_A_GLANCE
        return (drawn if few else _summary(graph)).pipe(format="svg", encoding="utf-8")
    except graphviz.ExecutableNotFound:
        return None
