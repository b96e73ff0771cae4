"""Gradients of graphs: the nodes that compute them, recorded like any others (ggml_build_backward_expand).

From the result backwards, the gradient of each node is handed to its op (`OpDef.grad`), which records the gradients of
the sources. A tensor that several nodes read gets their sum.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import numpy as np

from .. import ops
from ..buffers.overlap import may_overlap, same_elements
from ..dtypes import DType
from ..errors import DTypeError, GraphError, OneSite, ShapeError, at_line, explain, user_site
from ..graph import Graph
from ..opdef import OPS, Part, Zero, written_by
from ..ops._gradients import as_f32, dense, zeros
from ..tensor import FLAG_PARAM, Context, Tensor


class NoGradient(GraphError):
    """An op on the way has no gradient, or none for the source that leads on."""


class Overwritten(GraphError):
    """A value that a gradient needs was written over in place."""


def grad(y: Tensor, wrt: Sequence[Tensor], gy: Tensor | None = None) -> list[Tensor]:
    """Record the gradients of `y` with respect to the tensors `wrt`: leafs, or nodes that `y` depends on.

    y      of one element, F32, F16, BF16 or F64; with `gy` of any shape
    gy     the gradient of something with respect to `y`, of y's ne and a float type; default: 1
    wrt    of float types

    Result: for each tensor of `wrt` the sum over y's elements of gy * (d y / d tensor), F32, dense, of its shape and
    called "NAME (grad)". They are nodes like any others: add them to a graph with `build_forward_expand`, use them in
    expressions, and take their own gradients as far as their ops have them.

    Functions of integers have no gradient (argmax, comparisons); that of steps (floor, round, sgn) is 0. At a kink the
    gradient is that of one side, and where several elements are the largest they share it.

    Raises GraphError for a tensor that `y` does not depend on, for an op on the way that has no gradient (with the line
    that recorded it), and when a value that a gradient needs was written over in place; ShapeError and DTypeError for a
    wrong y, gy or wrt. Source: ggml_build_backward_expand, reverse accumulation.
    """
    tensors = _tensors("grad", wrt)
    if not isinstance(y, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"grad: y must be a Tensor, not {type(y).__name__}")
    with OneSite():
        found = _walk("grad", _below(y), y, _seed("grad", y, gy), tensors)
        return [found[t] for t in tensors]


def gradients_of(
    y: Tensor, params: Sequence[Tensor], gy: Tensor | None = None, until: Tensor | None = None
) -> dict[Tensor, Tensor]:
    """Record the gradient of each of `params` that `y` depends on by ops that have gradients; the others have none
    (what only chooses experts, or tokens to attend to). What `y` depends on through `until` does not count. `gy`, and
    what is raised: as of `grad`."""
    with OneSite():
        order = _below(y, until)
        return _walk("gradients_of", order, y, _seed("gradients_of", y, gy), params, lenient=True, until=until)


def expand(graph: Graph, loss: Tensor, grad_accs: Mapping[Tensor, Tensor] | None) -> dict[Tensor, Tensor]:
    """See `Graph.build_backward_expand`: the gradient of each parameter of `graph`."""
    what = "build_backward_expand"
    if loss not in graph:
        raise GraphError(f"{what}: {loss.describe()} is not in this graph; build_forward_expand(loss) first")
    below = {*_below(loss)}
    params = [t for t in graph.leafs if t.flags & FLAG_PARAM and t in below]
    if not params:
        raise GraphError(f"{what}: {loss.describe()} depends on no parameter; mark them with set_param()")
    if not isinstance(grad_accs, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"{what}: grad_accs must be a dict of parameters and leafs, not {grad_accs!r:.40}")
    accs = {} if grad_accs is None else dict(grad_accs)
    for t, acc in accs.items():
        if t not in {*params}:
            raise GraphError(f"{what}: grad_accs has {t.describe()}, which is no parameter of this graph")
        if acc.dtype is not DType.F32 or acc.ne != t.ne:
            raise ShapeError(f"{what}: the accumulator of {t.describe()} must be F32 of its ne, not {acc.describe()}")
    with OneSite():
        found = _walk(what, [*graph.leafs, *graph.nodes], loss, _seed(what, loss, None), params)
        for t, acc in accs.items():
            found[t] = ops.add_inplace(acc, found[t]).set_name(found[t].name)
    for t in params:
        graph.build_forward_expand(found[t])
    return {t: found[t] for t in params}


def _tensors(what: str, wrt: Sequence[Tensor]) -> list[Tensor]:
    """`wrt`, when all of it can have a gradient."""
    if isinstance(wrt, Tensor) or not isinstance(wrt, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"{what}: wrt must be a list of tensors, not {type(wrt).__name__}")
    tensors = list(wrt)
    for t in tensors:
        if not isinstance(t, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"{what}: wrt must be a list of tensors, not of {type(t).__name__}")
        if not t.dtype.is_float:
            raise DTypeError(f"{what}: {t.describe()} has no gradient: it must be F32, F16, BF16 or F64")
    return tensors


def _seed(what: str, y: Tensor, gy: Tensor | None) -> Tensor:
    """The gradient of `y` itself."""
    if not y.dtype.is_float:
        raise DTypeError(explain(what, "y must be F32, F16, BF16 or F64", [("y", y.describe())], user_site()))
    if gy is None:
        if y.n_elements != 1:
            text = "y must have one element, or gy must be given"
            raise ShapeError(explain(what, text, [("y", y.describe())], user_site()))
        return (Context.current() or y.ctx).constant(np.ones(y.shape, np.float32))
    if not isinstance(gy, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DTypeError(explain(what, f"gy must be a Tensor, not {type(gy).__name__}", [], user_site()))
    named = [("y", y.describe()), ("gy", gy.describe())]
    if gy.ne != y.ne:
        raise ShapeError(explain(what, "gy must have y's ne", named, user_site()))
    if not gy.dtype.is_float:
        raise DTypeError(explain(what, "gy must be of a float type", named, user_site()))
    return as_f32(gy)


def _below(y: Tensor, until: Tensor | None = None) -> list[Tensor]:
    """`y` and all it depends on, sources before their readers, in the order of `Graph.build_forward_expand`; without
    what `until` depends on."""
    order: list[Tensor] = []
    seen, path = {y}, [(y, iter(y.src))]
    while path:
        t, sources = path[-1]
        for s in sources:
            if s is not None and s not in seen:
                seen.add(s)
                path.append((s, iter(() if s is until else s.src)))
                break
        else:
            path.pop()
            order.append(t)
    return order


def _walk(
    what: str,
    order: Sequence[Tensor],
    y: Tensor,
    gy: Tensor,
    wrt: Sequence[Tensor],
    lenient: bool = False,
    until: Tensor | None = None,
) -> dict[Tensor, Tensor]:
    """The gradients of all tensors between `wrt` and `y`, those of `wrt` dense, of their shapes and named. `order`: all
    that runs, sources before their readers. `lenient`: only those of the tensors of `wrt` that `y` depends on through
    sources that have gradients, and of no others. `until`: a tensor whose sources do not count."""
    wanted = set(wrt)
    for t in order:
        if t is not until and t.dtype.is_float and any(s in wanted for s in t.src):
            wanted.add(t)
    memory, given = _Memory(order), {gy, *order}
    memory.check_reads(y, wanted)
    found = {y: gy} if y in wanted else {}
    flat: set[Tensor] = set()  # tensors that may have no other gradient than 0
    for t in reversed(order):
        sources = [s for s in t.src if s is not None and s in wanted and t is not until]
        if t in found and sources:
            for i, g in enumerate(_gradients(t, found[t], wanted, lenient)):
                s = t.src[i]
                if s is None or g is None:
                    continue
                if isinstance(g, Zero):
                    flat.add(s)
                else:
                    found[s] = _sum(found.get(s), g, s)
        elif t in flat:
            flat.update(sources)
    for t in wrt:
        if t not in found and t in flat:
            found[t] = zeros(t)
        if t not in found:
            if lenient:
                continue
            text = f"y does not depend on {t.describe()}, or only through integers"
            raise GraphError(explain(what, text, [("y", y.describe())], user_site()))
        found[t] = _finished(found[t], t, given)
    memory.check_gradients(what, found.values())
    for t in (*(t for t in wrt if t in found), *found):
        if found[t] not in given and t.name and not found[t].name:
            found[t].set_name(f"{t.name} (grad)")
    return {t: found[t] for t in wrt if t in found} if lenient else found


def _gradients(
    t: Tensor, gy: Tensor, wanted: Container[Tensor | None], lenient: bool
) -> list[Tensor | Part | Zero | None]:
    """What the op of `t` records for the sources that are wanted, `lenient`: and that have gradients."""
    op = OPS[t.op]
    named = [("node", t.describe()), *[(op.role(i), s.describe()) for i, s in enumerate(t.src) if s is not None]]
    if op.grad is None:
        raise NoGradient(explain(op.name, "the op has no gradient", named, t.site))
    entries = op.grad(t, gy)
    if not isinstance(entries, tuple | list) or len(entries) != len(t.src):
        given = len(entries) if isinstance(entries, tuple | list) else type(entries).__name__
        text = f"its grad must give an entry for each of {len(t.src)} sources, not {given}"
        raise GraphError(explain(op.name, text, named, t.site))
    recorded: list[Tensor | Part | Zero | None] = []
    for i, (s, entry) in enumerate(zip(t.src, entries, strict=True)):
        if s not in wanted or (entry is None and lenient):
            recorded.append(None)
            continue
        assert s is not None
        if entry is None:
            raise NoGradient(explain(op.name, f"the op has no gradient for its source {op.role(i)}", named, t.site))
        g = entry() if callable(entry) else entry
        if not isinstance(g, Tensor | Part | Zero):  # pyright: ignore[reportUnnecessaryIsInstance]
            text = f"the gradient of {op.role(i)} must be a Tensor, not {type(g).__name__}"
            raise GraphError(explain(op.name, text, named, t.site))
        if isinstance(g, Tensor) and (g.dtype is not DType.F32 or g.ne != s.ne):
            text = f"the gradient of {op.role(i)} must be F32 of its ne, not {g.describe()}"
            raise GraphError(explain(op.name, text, named, t.site))
        recorded.append(g)
    return recorded


def _sum(so_far: Tensor | None, g: Tensor | Part, s: Tensor) -> Tensor:
    """One more gradient of `s` added to those before it."""
    if isinstance(g, Tensor):
        return g if so_far is None else ops.add(so_far, g)
    where = (g.nb1, g.nb2, g.nb3, g.offset)
    if so_far is None:
        return ops.set(zeros(s), g.g, *where)
    return ops.acc(so_far if so_far.is_contiguous else ops.cont(so_far), g.g, *where)


def _finished(g: Tensor, t: Tensor, given: Container[Tensor]) -> Tensor:
    """The gradient of `t` as a node of its own, dense, and of its rank."""
    g = ops.dup(g) if g in given else dense(g)
    return g if g.rank == t.rank else g.reshape(t.shape)


class _Memory:
    """Where nodes write over memory that others read. Edges of the graph say nothing of that, so gradients that follow
    the edges would be wrong without a word."""

    def __init__(self, order: Sequence[Tensor]) -> None:
        self.at = {t: i for i, t in enumerate(order)}
        self.writers: dict[Tensor, list[Tensor]] = {}
        for t in order:
            if t.op not in ("none", "dup"):  # dup_inplace changes nothing
                for root in written_by(t):
                    self.writers.setdefault(root, []).append(t)

    def check_reads(self, y: Tensor, wanted: Container[Tensor | None]) -> None:
        """Raise GraphError when a node that `y` depends on reads what another one has written without having it as a
        source, and the gradient of either is wanted."""
        if not self.writers:
            return
        for t in _below(y):
            for s in t.src:
                for w in self._later(s):
                    if s is not None and self.at[w] < self.at[t] and (s in wanted or w in wanted):
                        text = f"{s.describe()} is read after {w.op} has written over it: read the result of {w.op}"
                        raise GraphError(explain(t.op, text, [("node", t.describe()), ("by", _at(w))], t.site))

    def check_gradients(self, what: str, gradients: Iterable[Tensor]) -> None:
        """Raise GraphError when a gradient reads a value of the graph that a later node of it has written over."""
        if not self.writers:
            return
        seen = set(gradients)
        todo = [*seen]
        while todo:
            t = todo.pop()
            for s in t.src:
                if s in self.at:
                    for w in self._later(s):
                        if s is not None and self.at[w] > self.at[s]:
                            text = f"a gradient needs {s.describe()}, which {w.op} has written over in place"
                            raise Overwritten(
                                explain(what, text, [("read by", _at(t)), ("written by", _at(w))], w.site)
                            )
                elif s is not None and s not in seen:
                    seen.add(s)
                    todo.append(s)

    def _later(self, s: Tensor | None) -> list[Tensor]:
        """The nodes that write over elements of `s`, other than those whose result it is."""
        writers = self.writers.get(s.root) if s is not None else None
        if s is None or not writers:
            return []
        own = {s}
        t = s
        while t.view_src is not None:
            t = _base(t)
            own.add(t)
        return [w for w in writers if w not in own and may_overlap(w, s)]


def _base(t: Tensor) -> Tensor:
    """The source whose memory `t` is a view of, or was written over."""
    op = OPS[t.op]
    at = 0 if op.kernel is None else op.writes
    if at is not None:
        base = t.src[at]
    else:
        base = next(s for i in op.inplace if (s := t.src[i]) is not None and s.root is t.root and same_elements(s, t))
    assert base is not None
    return base


def _at(t: Tensor) -> str:
    return f"{t.op} {t.describe()}{at_line(t.site)}"
