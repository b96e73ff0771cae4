"""Draw a graph: as DOT text, always the same bytes for the same graph, and as pictures if `dot` is installed."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import graphviz

from ..buffers.alloc import Plan
from ..errors import GraphError
from ..graph import Graph
from ..opdef import OPS
from ..sched import Scheduler, Split
from ..scope import common
from ..signature import hands_on, keywords_of
from ..tensor import Tensor
from .layers import layers_of
from .legend import COLOURS, STATUS_COLOURS, add_legend
from .picture import (
    Fold,
    Kind,
    Place,
    Status,
    compare,
    folds,
    is_store,
    kind_of,
    parameters,
    place_of,
    read_later,
    select,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .record import Run

_SHORT = 32  # characters of parameters in a label; the tooltip has all of them
_AT_A_GLANCE = 200  # a notebook draws graphs of up to this many tensors
_MANY = 500  # tensors, for which `dot` would take long to align boxes
_DEEP = 32  # boxes of scopes inside one another; the innermost has the names of all further ones
_SECONDS = 60.0  # for `dot`
_SECONDS_IN_A_NOTEBOOK = 5.0


class Drawing(TypedDict, total=False):
    """Which tensors of a graph are drawn, and what is shown of them.

    layers     (first, end): only tensors of these layers of a model, and their neighbours
    nodes      only tensors whose names match one of these patterns (as of the shell), and their neighbours
    around     ... and all tensors up to this many edges from them
    fold       draw layers that repeat as one box with a count, unless the box would read what is computed from it
    scheduler  show the backend of each node, the place of each tensor in its buffer, and the borders of splits, as
               this scheduler would have them
    run        show what was recorded: times, bytes moved, backends and buffers, least, greatest and mean value, NaN;
               nodes that one fused step computes stand in a box
    against    an earlier graph to compare with: added tensors are green, changed ones orange with what differs
               (`Q8_0 -> Q4_0`), missing ones red
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

    def __init__(self, graph: Graph, scheduler: Scheduler | None, run: Run | None, old: Graph | None) -> None:
        self.layers = layers_of(graph)
        self.backend: dict[Tensor, str] = {}
        self.place: dict[Tensor, Place] = {}
        self.split: dict[Tensor, int] = {}
        self.splits: list[Split] = []
        self.status: dict[Tensor, Status] = {}
        self.changes: dict[Tensor, list[str]] = {}
        self.removed: list[Tensor] = []
        self.steps, self.values = ({}, {}) if run is None else run.on(graph)
        if run is not None and run.graph.nodes[-1] in graph:
            self._placed(graph, run.schedule.splits, run.schedule.plan)
        elif scheduler is not None:
            self._placed(graph, *scheduler.plan(graph))
        if old is not None:
            self.status, self.changes, self.removed = compare(graph, old)
            self.status |= dict.fromkeys(self.removed, "removed")
            before, removed = layers_of(old), set(self.removed)
            self.layers |= {t: il for t, il in before.items() if t in removed}
            self.layers.names = before.names | self.layers.names
            self.layers.inside |= before.inside

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
        lines = [*self.changes.get(t, ())]
        lines.append(": ".join([*on, *([str(self.place[t])] if t in self.place else [])]))
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
    return _escape("\n".join([*lines, *facts.lines(t)]))


def _tooltip(t: Tensor) -> str:
    parts = ["leaf"] if t.op == "none" else [OPS[t.op].label, parameters(t)]
    if t.view_src is not None:
        parts.append(f"at byte {t.view_offs} of {t.view_src.name}")
    return _escape("; ".join(part for part in parts if part))


def _escape(text: str) -> str:
    """A text as the value of an attribute. Graphviz ends it at a NUL, and would read `<name>` as HTML."""
    return graphviz.nohtml(text.replace("\\", "\\\\").replace("\n", "\\n").replace("\0", "\N{SYMBOL FOR NULL}"))


def _fill(t: Tensor, facts: _Facts, outside: bool) -> str:
    status = facts.status.get(t)
    return COLOURS["outside"] if outside else STATUS_COLOURS[status] if status else COLOURS[kind_of(t)]


def _add(into: graphviz.Digraph, ident: str, t: Tensor, facts: _Facts, outside: bool = False) -> None:
    kind, status = kind_of(t), facts.status.get(t)
    style = "filled,dashed" if outside or kind == "view" or status == "removed" else "filled"
    more = {"peripheries": "2"} if is_store(t) else {}
    if t in facts.values and facts.values[t].n_nan:
        more |= {"color": "#d00000", "penwidth": "3"}
    shape, fill = "ellipse" if t.op == "none" else "box", _fill(t, facts, outside)
    into.node(ident, _label(t, facts), shape=shape, style=style, fillcolor=fill, tooltip=_tooltip(t), **more)


def _add_again(into: graphviz.Digraph, ident: str, t: Tensor, facts: _Facts, outside: bool) -> None:
    """Draw a tensor once more, beside others of its readers."""
    text = _escape(f"{t.name}\n{t.dtype.name} [{', '.join(map(str, t.ne))}]")
    style, fill = "rounded,filled,dotted", _fill(t, facts, outside)
    into.node(ident, text, shape="rect", style=style, fillcolor=fill, tooltip=f"{_tooltip(t)}, drawn again")


def _add_fold(into: graphviz.Digraph, ident: str, fold: Fold, members: Sequence[Tensor], facts: _Facts) -> None:
    nodes = [t for t in members if t.op != "none"]
    each = f"{len(nodes) // fold.times} nodes, {(len(members) - len(nodes)) // fold.times} leafs each time"
    ops = Counter(t.op for t in nodes if OPS[t.op].kernel is not None)
    title = f"{facts.layers.title(fold.first, fold.end)}: {fold.times} x"
    lines = [title if fold.period == 1 else f"{title} {fold.period}", each]
    lines += [f"{op} x {n // fold.times}" for op, n in ops.most_common(4)]
    outputs = [t.name for t in nodes if kind_of(t) == "output"]
    lines += [f"output: {', '.join(outputs[:3])}{' ..' * (len(outputs) > 3)}"] if outputs else []
    ns = sum(facts.steps[t].ns for t in nodes if t in facts.steps and facts.steps[t].nodes[-1].name == t.name)
    lines += [f"{ns / 1e3:.1f} us in all"] if ns else []
    n_nan = sum(facts.values[t].n_nan for t in members if t in facts.values)
    more = {"color": "#d00000", "penwidth": "3"} if n_nan else {}
    lines += [f"{n_nan} NaN"] if n_nan else []
    status = Counter(facts.status[t] for t in members if facts.status.get(t, "same") != "same")
    lines += [f"{n} {what}" for what, n in sorted(status.items())]
    changes = Counter(text for t in members for text in facts.changes.get(t, ()) if not text.startswith("reads "))
    lines += [f"{text} x {n}" for text, n in changes.most_common(4)]
    fill = STATUS_COLOURS["changed"] if status else COLOURS["fold"]
    label = _escape("\n".join(lines))
    into.node(ident, label, shape="box3d", style="filled", fillcolor=fill, tooltip="layers that repeat", **more)


def to_digraph(
    graph: Graph,
    *,
    layers: tuple[int, int] | None = None,
    nodes: Sequence[str] = (),
    around: int = 0,
    fold: bool = False,
    scheduler: Scheduler | None = None,
    run: Run | None = None,
    against: Graph | None = None,
    legend: bool = False,
) -> graphviz.Digraph:
    """The drawing of `graph` as a graphviz.Digraph, see `Drawing`.

    The nodes of one layer of a model stand in a cluster; so do those of a scope, and those of a split when there are
    several. A node that writes over memory of another has two borders, and a dotted edge leads from it to the node that
    reads the memory later. Raises GraphError when nothing is left to draw.
    """
    if not isinstance(graph, Graph):  # pyright: ignore[reportUnnecessaryIsInstance]
        how = {Tensor: ": Graph().build_forward_expand(t) makes one", str: ": the graph comes before the path"}
        raise GraphError(f"only a Graph can be drawn, not {type(graph).__name__}{how.get(type(graph), '')}")
    if not (scheduler is None or isinstance(scheduler, Scheduler)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"scheduler must be a Scheduler, not {type(scheduler).__name__}")
    if not (run is None or hasattr(run, "step_of")):
        raise GraphError(f"run must be what pyggml.inspect.record gives, not {type(run).__name__}")
    shown = select(graph, layers, nodes, around)
    facts = _Facts(graph, scheduler, run, against)
    ids = {t: f"leaf{i}" for i, t in enumerate(graph.leafs)} | {t: f"node{i}" for i, t in enumerate(graph.nodes)}
    if len(shown) == len(ids):  # the whole graph is drawn
        shown += facts.removed
    ids |= {t: f"old{i}" for i, t in enumerate(facts.removed)}
    drawing = _Drawing(graph, shown, facts, ids, bool(fold))
    drawing.add_boxes()
    drawing.add_edges()
    if legend:
        drawing.add_legend()
    return drawing.dot


_Region = tuple[int | None, int | Fold | None]  # a split; a layer, a fold, or none
_BEHIND = -1  # in place of a layer: what follows the last one


class _Drawing:
    """The drawing of the tensors `shown`, as it is made: boxes, then edges.

    A region is the part of the drawing where a tensor stands: its layer or fold, within its split. When an edge would
    run along a whole layer, from a tensor that belongs to none (an input, a mask), that tensor is drawn again in each
    region that reads it. A leaf that one layer alone reads stands in that layer, unless it is the first one.
    """

    def __init__(
        self, graph: Graph, shown: Sequence[Tensor], facts: _Facts, ids: dict[Tensor, str], fold: bool
    ) -> None:
        self.dot, self.graph, self.shown, self.facts, self.ids = _empty(), graph, shown, facts, ids
        if len(shown) > _MANY:
            self.dot.attr("graph", nslimit="1")  # `dot` aligns boxes for a shorter time
        self.boxes = dict(ids)  # the box of each tensor: its own, or the box of its fold
        note = {t: (facts.status.get(t), tuple(facts.changes.get(t, ())), facts.backend.get(t)) for t in shown}
        found = folds(shown, facts.layers, note) if fold else []
        self._fold_of = {il: f for f in found for il in range(f.first, f.end)}
        self._several = len(facts.splits) > 1
        self._inside, self._outside = set(shown), set[Tensor]()
        self._again: dict[tuple[Tensor, _Region], str] = {}  # the boxes of tensors that are drawn again
        self._fused, self._n_scopes = False, 0
        last = max((i for i, t in enumerate(graph.nodes) if t in facts.layers), default=graph.n_nodes)
        self._behind = set(graph.nodes[last + 1 :])

    def _region(self, t: Tensor) -> _Region:
        il = self.facts.layers.get(t)
        layer = self._fold_of.get(il, il) if il is not None else _BEHIND if t in self._behind else None
        return (self.facts.split.get(t) if self._several else None), layer

    def _regions(self) -> dict[_Region, list[Tensor]]:
        """The tensors that stand in each region. Enters in `_again` those that are drawn again."""
        readers: dict[Tensor, dict[_Region, None]] = {}
        for t in self.shown:
            for s in t.src:
                if s is not None and s in self.ids and s not in self.facts.layers:
                    readers.setdefault(s, {})[self._region(t)] = None
        place: dict[int | Fold | None, int] = {}  # of what stands above one another; a fold is as long as its layers
        end = 0
        for layer in dict.fromkeys(self._region(t)[1] for t in self.graph.nodes):
            place[layer], end = end, end + (layer.end - layer.first if isinstance(layer, Fold) else 1)
        home: dict[Tensor, _Region] = {}
        for s, found in readers.items():
            at = [place[layer] for _, layer in found if layer in place]
            if len(found) == 1 and s.op == "none" and max(at, default=0) > 1:
                home[s] = next(iter(found))
            if max(at, default=0) - min(at, default=0) < 2:
                continue
            others = [region for region in found if s.op == "none" or region != self._region(s)]
            if s.op == "none":  # a leaf stands where it is read first
                home[s] = others[0]
            for region in others[1:]:
                self._again[s, region] = f"again{len(self._again)}"
        regions: dict[_Region, list[Tensor]] = {}
        for t in self.shown:
            regions.setdefault(home.get(t, self._region(t)), []).append(t)
        for _, region in self._again:
            regions.setdefault(region, [])
        return regions

    def add_boxes(self) -> None:
        """Draw the tensors: a cluster for each split when there are several, for each layer, and for nodes that are
        computed as one step."""
        regions = self._regions()
        again: dict[_Region, list[Tensor]] = {}
        for s, region in self._again:
            again.setdefault(region, []).append(s)
        splits = self._splits()
        for region, members in regions.items():
            split, layer = region
            into = splits[split]
            if isinstance(layer, Fold):
                mine = [t for t in members if t in self.facts.layers]
                self._add_fold(splits, layer, mine)
                members = [t for t in members if t not in self.facts.layers]
            elif layer is not None and layer >= 0:
                into = graphviz.Digraph(f"cluster_{layer}" if split is None else f"cluster_{layer}_split{split}")
                label = _escape(self.facts.layers.names[layer])
                into.attr(label=label, color="#999999", fontname="Helvetica", style="solid", penwidth="1")
            self._add_members(into, members)
            for s in again.get(region, ()):
                _add_again(into, self._again[s, region], s, self.facts, s not in self._inside)
            if into is not splits[split]:
                splits[split].subgraph(into)
        for split, cluster in splits.items():
            if split is not None:
                self.dot.subgraph(cluster)

    def _splits(self) -> dict[int | None, graphviz.Digraph]:
        made: dict[int | None, graphviz.Digraph] = {None: self.dot}
        for i, split in enumerate(self.facts.splits if self._several else ()):
            made[i] = graphviz.Digraph(f"cluster_split{i}")
            copies = ", ".join(t.name for t in split.inputs)
            label = _escape(f"split {i} on {split.backend}" + (f"\ncopies {copies}" if copies else ""))
            made[i].attr(label=label, color="#c05000", style="dashed", penwidth="2", fontname="Helvetica")
        return made

    def _add_fold(self, splits: dict[int | None, graphviz.Digraph], fold: Fold, mine: Sequence[Tensor]) -> None:
        ident = f"fold{fold.first}"
        if any(self.boxes[t] == ident for t in mine):  # drawn in the first split that has a part of it
            return
        members = [t for t in self.shown if self.facts.layers.get(t) in range(fold.first, fold.end)]
        self.boxes |= dict.fromkeys(members, ident)
        _add_fold(splits[self._region(members[0])[0]], ident, fold, members, self.facts)

    def _add_members(self, into: graphviz.Digraph, members: Sequence[Tensor]) -> None:
        """Draw tensors, with a box around those of a scope within their layer, and around those that one step
        computes."""
        together: dict[int, list[Tensor]] = {}
        for t in members:
            if t in self.facts.steps and t.op != "none":
                together.setdefault(id(self.facts.steps[t]), []).append(t)
        groups = {group[0]: group for t in members for group in [together.get(id(self.facts.steps.get(t)), [t])]}
        scopes = {t: common([self.facts.layers.inside.get(u, ()) for u in group]) for t, group in groups.items()}
        inside = {t: (*s[: _DEEP - 1], "/".join(s[_DEEP - 1 :])) if len(s) > _DEEP else s for t, s in scopes.items()}
        self._add_groups(into, [*groups.values()], inside)

    def _add_groups(
        self, into: graphviz.Digraph, groups: Sequence[Sequence[Tensor]], inside: Mapping[Tensor, tuple[str, ...]]
    ) -> None:
        """Draw tensors that stand together. `inside`: the scopes of each group, by its first tensor."""
        scopes: dict[str, list[Sequence[Tensor]]] = {}
        for group in groups:
            if inside[group[0]]:
                scopes.setdefault(inside[group[0]][0], []).append(group)
            elif len(group) == 1:
                _add(into, self.ids[group[0]], group[0], self.facts)
            else:
                self._fused = True
                step = self.facts.steps[group[0]]
                box = graphviz.Digraph(f"cluster_{self.ids[group[0]]}_fused")
                label = _escape(f"{step.op}: {step.ns / 1e3:.1f} us, {_bytes(step.n_bytes)} moved")
                box.attr(label=label, fontname="Helvetica", fontsize="10", labeljust="l", color="#3c8d5a")
                box.attr(style="rounded,filled", fillcolor=COLOURS["fused"], penwidth="1")
                for u in group:
                    _add(box, self.ids[u], u, self.facts)
                into.subgraph(box)
        for name, members in scopes.items():
            self._n_scopes += 1
            box = graphviz.Digraph(f"cluster_scope{self._n_scopes}")
            box.attr(label=_escape(name), color="#bbbbbb", fontname="Helvetica", fontsize="10", style="rounded,solid")
            self._add_groups(box, members, {group[0]: inside[group[0]][1:] for group in members})
            into.subgraph(box)

    def add_edges(self) -> None:
        """Draw an edge from each source to its reader, and dotted ones from stores to who reads there later."""
        facts, done = self.facts, set[tuple[str, str]]()
        left: set[Tensor] = set()  # the nodes that have been read in another region

        def draw(tail: str, t: Tensor, folded: bool, label: str | None, style: str, **more: str) -> None:
            ends = tail, self.boxes[t]
            if ends[0] != ends[1] and not (folded and ends in done):
                done.add(ends)
                self.dot.edge(*ends, label=None if folded else label, style=style, **more)

        for t in self.shown:
            for i, s in enumerate(t.src):
                if s is None:
                    continue
                if s not in self.ids:  # a removed tensor reads a tensor that is still there, under its name
                    s = next((u for u in self.ids if u.name == s.name and (u.op == "none") == (s.op == "none")), None)
                    if s is None:
                        continue
                if s not in self._inside and s not in self._outside:
                    self._outside.add(s)
                    _add(self.dot, self.ids[s], s, facts, outside=True)
                role = OPS[t.op].role(i) if len(t.src) > 1 else ""
                copied = t in facts.split and s in facts.splits[facts.split[t]].inputs
                style = "dashed" if OPS[t.op].kernel is None else "bold" if copied else "solid"
                tail = self._again.get((s, self._region(t)), self.boxes[s])
                folded = self.boxes[s] != self.ids[s] or self.boxes[t] != self.ids[t]
                more = {"color": "#c05000"} if copied else {}
                crosses = self._region(s) != self._region(t)
                if s.op != "none" and tail == self.boxes[s] and crosses:
                    more |= {"weight": "0"} if s in left else {}  # a residual does not pull layers sideways
                    left.add(s)
                draw(tail, t, folded, f"{role} (copied)" if copied else role, style, **more)
        for store, reader in read_later(self.graph):
            if store in self._inside and reader in self._inside:
                folded = self.boxes[store] != self.ids[store] or self.boxes[reader] != self.ids[reader]
                tooltip = _escape(f"stored in {store.root.name}")
                draw(self.boxes[store], reader, folded, None, "dotted", tooltip=tooltip)

    def add_legend(self) -> None:
        """Explain the shapes and colours of this drawing."""
        kinds: set[Kind] = {kind_of(t) for t in self.shown}
        folded = self.boxes != self.ids
        add_legend(self.dot, kinds, self.facts.status, folded, self._several, bool(self._again), self._fused)


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


_DRAWS = hands_on(*keywords_of(to_digraph))


@_DRAWS
def dump_dot(graph: Graph, path: str | PathLike[str] | None = None, **options: Unpack[Drawing]) -> str:
    """The DOT text of `graph`, which is also written to `path` when one is given. `options`: the fields of `Drawing`
    (layers, nodes, around, fold, scheduler, run, against, legend).

    Raises GraphError when nothing is left to draw, the file cannot be written, or has the suffix of a picture.
    """
    text = to_digraph(graph, **options).source
    if path is not None and _path(path).suffix in (".svg", ".png", ".pdf"):
        raise GraphError(f"dump_dot writes Graphviz's text: render(graph, {str(path)!r}) draws")
    if path is not None:
        _write(path, text.encode())
    return text


def _path(path: str | PathLike[str]) -> Path:
    if not isinstance(path, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"a drawing is written to a path, not {path!r:.60}")
    return Path(path)


def _write(path: str | PathLike[str], data: bytes) -> None:
    try:
        _path(path).write_bytes(data)
    except (OSError, ValueError) as e:  # ValueError: a name with a null byte
        raise GraphError(f"cannot write {path}: {e}") from None


@_DRAWS
def render(
    graph: Graph, path: str | PathLike[str], *, timeout: float | None = _SECONDS, **options: Unpack[Drawing]
) -> None:
    """Draw `graph` into an .svg, .png or .pdf file; `options` as of `dump_dot`. Graphviz's `dot` may take `timeout`
    seconds (None: as long as it needs).

    Raises GraphError when the `dot` program is missing, fails or takes longer, or the file cannot be written.
    """
    out = _path(path)
    try:
        drawn = _run_dot(to_digraph(graph, **options), out.suffix.lstrip(".") or "svg", timeout)
    except FileNotFoundError:
        raise GraphError("drawing needs Graphviz's `dot` program; dump_dot() writes the text without it") from None
    except subprocess.TimeoutExpired:
        size = f"{graph.n_nodes} nodes and {graph.n_leafs} leafs"
        raise GraphError(
            f"dot did not finish {out} ({size}) within {timeout} s: draw less of it (fold=True, layers=(0, 1), "
            "nodes=['kq-*']), let it take longer (timeout=), or write the text (dump_dot, a file named .dot)"
        ) from None
    except (ValueError, subprocess.CalledProcessError) as e:
        said = e.stderr.decode(errors="replace").strip() if isinstance(e, subprocess.CalledProcessError) else e
        raise GraphError(f"dot could not draw {out}: {said}") from None
    _write(out, drawn)


def _run_dot(drawing: graphviz.Digraph, form: str, timeout: float | None) -> bytes:
    """Have Graphviz's `dot` draw. Raises FileNotFoundError without that program, and what `subprocess.run` raises."""
    line = ["dot", f"-T{form}"]
    return subprocess.run(line, input=drawing.source.encode(), capture_output=True, check=True, timeout=timeout).stdout


def svg(graph: Graph) -> str | None:
    """The picture of a graph in a notebook, or a summary when the graph is large or takes `dot` too long; None when
    Graphviz's program is not installed."""
    small = graph.n_nodes + graph.n_leafs <= _AT_A_GLANCE
    drawn = to_digraph(graph, fold=not small)
    few = small or drawn.source.count(" [label=") <= _AT_A_GLANCE
    try:
        try:
            return _run_dot(drawn if few else _summary(graph), "svg", _SECONDS_IN_A_NOTEBOOK).decode()
        except subprocess.TimeoutExpired:
            return _run_dot(_summary(graph), "svg", None).decode()
    except FileNotFoundError:
        return None
