"""The cgraph: nodes in the order they run, leafs apart, as ggml_build_forward_expand orders them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NoReturn, SupportsIndex

from .errors import GraphError, not_sent
from .hazards import note_built
from .lock import Lock
from .tensor import FLAG_STORE, Tensor, shown

DEFAULT_SIZE = 1 << 16


class Graph:
    """Nodes (tensors that an op computes) and leafs (weights, inputs, constants), each once.

    `size` bounds nodes and leafs alike. `gg.compute` holds `lock` while it runs the graph: see there.
    """

    # What records gradients (see `build_backward_expand`); pyggml installs it.
    gradients: ClassVar[Callable[[Graph, Tensor, Mapping[Tensor, Tensor] | None], dict[Tensor, Tensor]]]
    svg: ClassVar[Callable[[Graph], str | None] | None] = None  # how notebooks draw a graph; pyggml installs it

    def __init__(self, size: int = DEFAULT_SIZE) -> None:
        if not isinstance(size, int) or size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"the size of a graph must be a whole number from 1, not {size!r}")
        self.size, self.lock = size, Lock()
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self._seen: set[Tensor] = set()
        self._grads: dict[Tensor, Tensor] = {}

    @property
    def n_nodes(self) -> int:
        return len(self.nodes)

    @property
    def n_leafs(self) -> int:
        return len(self.leafs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        instead = "build it there from a function, and send the values of its inputs (t.numpy(), or pyggml.save)"
        raise not_sent(self, instead)

    def __contains__(self, t: Tensor) -> bool:
        return t in self._seen

    def build_forward_expand(self, tensor: Tensor) -> Graph:
        """Add `tensor` and all it depends on: post-order, sources left to right, each tensor once (ggml's order).

        Raises GraphError for a cycle, or beyond `size`; the graph is then as it was.
        """
        if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"build_forward_expand takes one Tensor at a time, not {type(tensor).__name__}")
        n_nodes, n_leafs = len(self.nodes), len(self.leafs)
        try:
            self._visit(tensor)
        except GraphError:
            self._seen.difference_update(self.nodes[n_nodes:], self.leafs[n_leafs:])
            del self.nodes[n_nodes:], self.leafs[n_leafs:]
            raise
        return self

    def build_backward_expand(self, loss: Tensor, grad_accs: Mapping[Tensor, Tensor] | None = None) -> Graph:
        """Add the nodes that compute the gradients of `loss`, one element that is in the graph, with respect to its
        parameters (`Tensor.set_param`). `grad(t)` gives them.

        grad_accs: leafs by parameter, F32 with its ne. Each run adds the gradient of that parameter to its accumulator;
        `grad(t)` is then a view of the accumulator, which the caller sets to 0 when a sum begins.

        Raises GraphError when the loss is not in the graph or depends on no parameter, and as `pyggml.grad`. Source:
        ggml_build_backward_expand.
        """
        self._grads |= Graph.gradients(self, loss, grad_accs)
        return self

    def grad(self, t: Tensor) -> Tensor:
        """The gradient of a parameter, of its shape, F32 (ggml_graph_get_grad). Raises GraphError when
        `build_backward_expand` has recorded none."""
        if t not in self._grads:
            what = t.describe() if isinstance(t, Tensor) else repr(t)  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"the graph has no gradient of {what}: set_param() and build_backward_expand() first")
        return self._grads[t]

    def repeat(self, nodes: range, to: dict[Tensor | None, Tensor], names: Sequence[str]) -> None:
        """Add a copy of each of `nodes` of this graph, replacing each source by `to[source]` when it has an entry. The
        copies are called `names` (for "" and `scope/` as the graph names nodes), and are entered in `to`. Leafs in `to`
        that are new to the graph are added in their order there.

        Raises GraphError for a range that is not in the graph, for names that are not as many, for a tensor of another
        type or layout than the one that it replaces, or beyond `size`; the graph is then as it was.
        """
        if nodes.step != 1 or not 0 <= nodes.start < nodes.stop <= self.n_nodes:
            raise GraphError(f"repeat: nodes {nodes} of a graph that has {self.n_nodes}")
        if len(names) != len(nodes):
            raise GraphError(f"repeat: {len(names)} names for {len(nodes)} nodes")
        for s, t in to.items():
            if s is not None and (s.dtype, s.ne, s.nb) != (t.dtype, t.ne, t.nb):
                raise GraphError(f"repeat: {t.describe()} cannot stand for {s.describe()}")
        more = [t for t in dict.fromkeys(to.values()) if t not in self._seen]
        if max(self.n_nodes + len(nodes), self.n_leafs) + len(more) > self.size:
            raise GraphError(f"the graph is full: {self.size} nodes; make it with Graph(size=...)")
        for t in more:
            self._add(t)
        ctx, own, new = self.nodes[nodes.start].ctx, self.nodes, list[Tensor]()
        for i, (like, name) in enumerate(zip(own[nodes.start : nodes.stop], names, strict=True), len(own)):
            to[like] = t = Tensor(ctx, like.dtype, like.ne, like.nb, like.rank, like.site)
            new.append(t)
            t.op, t.op_params, t.flags, t.like = like.op, like.op_params, like.flags, like
            t.src = tuple([to.get(s, s) for s in like.src])
            if like.view_src is not None:
                t.view_src, t.view_offs = to.get(like.view_src, like.view_src), like.view_offs
            t.name = name if name and name[-1] != "/" else f"{name}node_{i}"
        ctx.note_all(new)
        own.extend(new)
        self._seen.update(new)

    def _visit(self, tensor: Tensor) -> None:
        seen = self._seen
        if tensor in seen:
            return
        path = [(tensor, iter(tensor.src))]  # from `tensor` down
        open_ = {tensor}
        while path:
            t, sources = path[-1]
            for s in sources:
                if s is None or s in seen:
                    continue
                if s in open_:
                    raise GraphError(f"the graph has a cycle through {s.describe()}")
                if not s.src:
                    self._add(s)
                    continue
                open_.add(s)
                path.append((s, iter(s.src)))
                break
            else:
                path.pop()
                open_.discard(t)
                self._add(t)

    def _add(self, t: Tensor) -> None:
        kind, items = ("leaf", self.leafs) if t.op == "none" else ("node", self.nodes)
        if len(items) == self.size:
            raise GraphError(
                f"the graph is full: {self.size} {kind}s (at {t.describe()}); make it with Graph(size=...)"
            )
        name = t.name
        if not name or name[-1] == "/":
            t.name = f"{name}{kind}_{len(items)}"
        if t.flags & FLAG_STORE:
            note_built(t)
        items.append(t)
        self._seen.add(t)

    def get_tensor(self, name: str) -> Tensor | None:
        """The node or leaf of that name, or None."""
        return next((t for t in (*self.nodes, *self.leafs) if t.name == name), None)

    def __str__(self) -> str:
        lines = [f"{self.n_nodes} nodes"]
        for i, t in enumerate(self.nodes):
            sources = ", ".join("-" if s is None else shown(s.name) for s in t.src)
            lines.append(f"  {i:4d} {t.op:<14} {shown(t.name):<24} {t.dtype.name:<5} {list(t.ne)}  <- {sources}")
        lines.append(f"{self.n_leafs} leafs")
        lines += [f"  {i:4d} {shown(t.name):<39} {t.dtype.name:<5} {list(t.ne)}" for i, t in enumerate(self.leafs)]
        return "\n".join(lines)

    def _repr_svg_(self) -> str | None:
        return Graph.svg(self) if Graph.svg is not None else None

    def __repr__(self) -> str:
        return f"<Graph {self.n_nodes} nodes, {self.n_leafs} leafs>"
