"""Graphs of steps: their order, and the check that no step is made when the loss is no number."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pyggml import ops
from pyggml.buffers.buffer import check_free_memory
from pyggml.errors import BackendError, GraphError
from pyggml.graph import Graph
from pyggml.inspect.taps import Tap
from pyggml.sched import Schedule, Scheduler
from pyggml.tensor import Context, Tensor
from pyggml.types import Floats

from .clipping import clipped, norm_of
from .recompute import computed_again

Step = Callable[[Tensor, Tensor], Tensor]  # records the step of a parameter with its gradient


class _NoNumber(ArithmeticError):
    """A number that is not finite: the value of `tensor`."""

    def __init__(self, what: str, tensor: Tensor, value: float) -> None:
        super().__init__(f"{what} is {value}")
        self.tensor = tensor


def finite(what: str, t: Tensor) -> Tensor:
    """`t`, one number. When it is not finite, nothing after this node runs, and `run_checked` raises GraphError."""

    def check(dst: Floats, x: Floats) -> None:
        if not np.isfinite(x).all():
            raise _NoNumber(what, t, x.item())
        dst[...] = x

    return ops.map_custom(check, t).set_name(f"{t.name} (checked)")


def run_checked(schedule: Schedule, n_steps: int) -> None:
    """Run a graph. Raises GraphError when a number that `finite` checks is not, with the first tensor that has such an
    element."""
    try:
        schedule.run(interruptible=False)  # a step is made, or not
    except BackendError as e:
        if not isinstance(e.__cause__, _NoNumber):
            raise
        name = _first_without_value(e.__cause__.tensor)
        where = f"in step {n_steps}: the first tensor with an element that is no number is {name}"
        raise GraphError(f"{e.__cause__} {where}; the parameters stay as they were") from None


def check_graph_memory(scheduler: Scheduler, n_bytes: int, graph: Graph) -> int:
    """The bytes of the memory that a scheduler's graphs share. Raises AllocError when this graph needs more than the
    `n_bytes` before, and these are not free."""
    size = scheduler.buffer_size("cpu")
    if size > n_bytes:
        check_free_memory(size - n_bytes, f"the graph of a batch of {graph.n_nodes} nodes")
    return max(size, n_bytes)


def with_steps(
    ctx: Context,
    first: Sequence[Tensor],
    gradients: Mapping[Tensor, Tensor],
    step: Step,
    clip: float | None,
    again: Iterable[Collection[Tensor]] = (),
    forward: Tensor | None = None,
) -> Graph:
    """The graph of `first`, of the gradients, by parameter, and of the steps of the parameters. Steps come as early as
    they can, or, with clipping, after all gradients. `again`, `forward`: as of `in_order`."""
    if clip is None and first:
        return in_order(first, gradients, step, again, forward)
    graph = _passes(first, gradients, again, forward)
    if clip is not None and gradients:
        norm = norm_of(gradients)
        graph.build_forward_expand(finite("the norm of the gradients", norm))
        gradients = clipped(ctx, gradients, norm, clip)
    for w, g in gradients.items():
        graph.build_forward_expand(step(w, g))
    return graph


def _passes(
    first: Sequence[Tensor],
    gradients: Mapping[Tensor, Tensor],
    again: Iterable[Collection[Tensor]],
    forward: Tensor | None,
) -> Graph:
    """The graph of `first`, then of the `gradients`, in the order in which they were recorded: from the end of the
    forward pass to its beginning, so that what was computed last is needed first, and its memory is free soon."""
    begin, both = Graph(), Graph()
    for t in first if forward is None else (forward,):
        begin.build_forward_expand(t)
        both.build_forward_expand(t)
    for t in (*first, *gradients.values()):
        both.build_forward_expand(t)
    rest = both.nodes[begin.n_nodes :]
    made = {t: i for ctx in {t.ctx: None for t in rest} for i, t in enumerate(ctx.tensors)}
    graph, rest = Graph(), sorted(rest, key=made.__getitem__)
    for t in (*begin.nodes, *(computed_again(begin.nodes, rest, again) if gradients else rest)):
        graph.build_forward_expand(t)
    return graph


def in_order(
    first: Sequence[Tensor],
    gradients: Mapping[Tensor, Tensor],
    step: Step,
    again: Iterable[Collection[Tensor]] = (),
    forward: Tensor | None = None,
) -> Graph:
    """The graph of `first`, then of the `gradients`, by parameter, and of the step of each parameter. A step overwrites
    its parameter, so it comes when all nodes that read the parameter, and all of `first`, have run; and at once then,
    because the memory of its gradient is free afterwards.

    again    nodes that are computed once more for the gradients, by layer, see `recompute`
    forward  the end of the forward pass; what comes after it runs in the order in which it was recorded. None: `first`
    """
    before = _passes(first, gradients, again, forward)
    due: dict[Tensor, int] = {}
    for at, node in enumerate(before.nodes):
        due.update((s.root, at) for s in node.src if s is not None and s.root in gradients)
    computed = {node: at for at, node in enumerate(before.nodes)}
    checked = max(computed[t] for t in first)
    steps: dict[int, list[Tensor]] = {}
    for w, g in gradients.items():
        steps.setdefault(max(due[w], computed[g], checked), []).append(w)
    graph = Graph()
    for at, node in enumerate(before.nodes):
        graph.build_forward_expand(node)
        for w in steps.get(at, ()):
            graph.build_forward_expand(step(w, gradients[w]))
    return graph


def _first_without_value(loss: Tensor) -> str:
    """The name of the first node of the graph of `loss` that has an element that is no number, when it runs with the
    inputs as they are."""
    graph, scheduler, found = Graph().build_forward_expand(loss), Scheduler(("cpu",)), list[str]()

    def look(name: str, values: Any) -> None:
        if not found and np.isnan(values).any():
            found.append(name)

    leafs = [t.name for t in graph.leafs if t.dtype.is_float and np.isnan(t.numpy()).any()]
    if leafs:
        return leafs[0]
    with Tap(scheduler.watches, ("*",), look):
        scheduler.alloc(graph).run()
    return found[0] if found else loss.name
