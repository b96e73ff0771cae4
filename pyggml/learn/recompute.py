"""Recomputation: values that are not kept for the gradients, but computed once more where these need them.

Of a layer that is computed again, only what goes on to the next layer is kept. The rest takes memory in the forward
pass while the layer runs, and again while its gradients are computed (arXiv 1604.06174). In other layers this is done
for values that follow from kept ones by a few operations for each element: the results of norms and activations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from pyggml.graph import Graph
from pyggml.inspect.layers import layers_of
from pyggml.opdef import OPS, written_by
from pyggml.tensor import FLAG_AFTER, FLAG_OUTPUT, FLAG_STORE, Tensor

_LEAST = 1 << 20  # bytes of a tensor for which computing it again is worth a node more
_FLOPS = 32  # for each element, at most, of what is computed again in layers that are kept


def layers_to_compute_again(graph: Graph) -> list[list[Tensor]]:
    """The layers of a forward pass: of each, in order, the nodes whose values need not be kept. Nodes that other nodes
    outside of the layer read are kept, and layers that write into the memory of others, whole."""
    layer = layers_of(graph)
    inside: dict[int, dict[Tensor, None]] = {}
    for t in graph.nodes:
        if t in layer:
            inside.setdefault(layer[t], {})[t] = None
    for t in graph.nodes:
        for s in t.src:
            if s is not None and s in layer and layer[s] != layer.get(t):
                inside.get(layer[s], {}).pop(s, None)
    nodes = [list(inside[il]) for il in sorted(inside)]
    return [ts for ts in nodes if not any(t.flags & (FLAG_STORE | FLAG_AFTER) for t in ts)]


def _cheap(forward: Sequence[Tensor], backward: Sequence[Tensor], kept: Collection[Tensor]) -> set[Tensor]:
    """Nodes of a forward pass, in order, that follow by few operations from leafs, from what the backward pass reads
    anyway, and from one another. `kept`: nodes that are not to be among them."""
    read = {s for t in backward for s in t.src if s is not None}
    written = {root for t in forward for root in written_by(t)}
    found: set[Tensor] = set()
    for t in forward:
        op = OPS[t.op]
        sources = [s for s in t.src if s is not None]
        known = all(s in found or s in read or s.op == "none" for s in sources)
        if not known or t in kept or t.flags & (FLAG_OUTPUT | FLAG_STORE | FLAG_AFTER) or t.root in written:
            continue
        if any(s.root in written for s in sources):
            continue
        if op.kernel is None and op.host is None:  # a view
            if any(s in found for s in sources):
                found.add(t)
        elif op.host is None and t.nbytes >= _LEAST and op.cost(t).flops <= _FLOPS * t.n_elements:
            found.add(t)
    return found


def computed_again(
    forward: Sequence[Tensor], backward: Iterable[Tensor], layers: Iterable[Collection[Tensor]]
) -> list[Tensor]:
    """The nodes of a backward pass, in order, that read copies of nodes of the forward pass: those of `layers`, and
    cheap ones. The copies of a layer are put before the first node that reads any of it: those that are read, and what
    they are computed from within the layer. Other copies are put before the first node that reads them."""
    layers, backward = list(layers), list(backward)
    layer = {t: i for i, ts in enumerate(layers) for t in ts}
    cheap = _cheap(forward, backward, layer)
    read: list[set[Tensor]] = [set() for _ in layers]
    for t in backward:
        for s in t.src:
            if s is not None and s in layer:
                read[layer[s]].add(s)
    nodes: list[Tensor] = []
    copies: dict[Tensor, Tensor] = {}
    done: set[int] = set()
    for t in backward:
        for i in {layer[s]: None for s in t.src if s is not None and s in layer}:
            if i not in done:
                done.add(i)
                nodes += _copy(list(layers[i]), read[i], copies)
        for s in t.src:
            if s is not None and s in cheap and s not in copies:
                nodes += _copy(_from(s, cheap, copies), {s}, copies)
        t.src, t.view_src = _sources(t, copies)
        nodes.append(t)
    return nodes


def _from(t: Tensor, cheap: Collection[Tensor], copies: Collection[Tensor]) -> list[Tensor]:
    """`t` and the cheap nodes that it is computed from, as far as they have no copies yet; sources come first."""
    found: dict[Tensor, None] = {}
    todo = [t]
    while todo:
        t = todo[-1]
        more = [s for s in t.src if s is not None and s in cheap and s not in copies and s not in found]
        todo += more
        if not more:
            found[todo.pop()] = None
    return [*found]


def _copy(nodes: Sequence[Tensor], wanted: Collection[Tensor], copies: dict[Tensor, Tensor]) -> list[Tensor]:
    """Copies of the `wanted` ones of `nodes`, and of those that they depend on; they are entered in `copies`."""
    needed = set(wanted)
    for t in reversed(nodes):
        if t in needed:
            needed.update(s for s in t.src if s is not None)
    made: list[Tensor] = []
    for t in nodes:
        if t in needed:
            again = copies[t] = Tensor(t.ctx, t.dtype, t.ne, t.nb, t.rank, t.site)
            again.op, again.op_params, again.flags, again.view_offs = t.op, t.op_params, 0, t.view_offs
            again.src, again.view_src = _sources(t, copies)
            again.name = f"{t.name} (again)"
            made.append(t.ctx.note(again))
    return made


def _sources(t: Tensor, copies: Mapping[Tensor, Tensor]) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """The sources of a node, with copies in place of those that have one, and the tensor that it is then a view of."""
    to = tuple(None if s is None else copies.get(s, s) for s in t.src)
    if t.view_src is None:
        return to, None
    new = next(new for s, new in zip(t.src, to, strict=True) if s is not None and s.root is t.view_src)
    assert new is not None, t
    return to, new.root
