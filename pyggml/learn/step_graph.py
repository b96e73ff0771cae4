"""Graphs of steps: their order, and the check that no step is made when the loss is no number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pyggml import ops
from pyggml.errors import BackendError, GraphError
from pyggml.graph import Graph
from pyggml.inspect.taps import Tap
from pyggml.sched import Schedule, Scheduler
from pyggml.tensor import Tensor
from pyggml.types import Floats


class _NoNumber(ArithmeticError):
    """A loss that is not finite."""


def require_number(loss: Tensor) -> Tensor:
    """Record a node after which nothing runs, and no parameter changes, when the loss is no number. The graph runs with
    `run_checked`."""
    return ops.map_custom(_require_number, loss).set_name("loss (checked)")


def _require_number(dst: Floats, loss: Floats) -> None:
    if not np.isfinite(loss).all():
        raise _NoNumber(str(loss.item()))
    dst[...] = loss


def run_checked(schedule: Schedule, loss: Tensor, n_steps: int) -> None:
    """Run a graph with `require_number(loss)`. Raises GraphError when the loss is no number, with the first tensor that
    has such an element."""
    try:
        schedule.run()
    except BackendError as e:
        if not isinstance(e.__cause__, _NoNumber):
            raise
        where = f"in step {n_steps}: the first tensor with an element that is no number is {_first_without_value(loss)}"
        raise GraphError(f"the loss is {e.__cause__} {where}; the parameters stay as they were") from None


def in_order(first: Sequence[Tensor], gradients: Mapping[Tensor, Tensor], step: Callable[[Tensor], Tensor]) -> Graph:
    """The graph of `first`, then of the `gradients`, by parameter, and of the step of each parameter. A step overwrites
    its parameter, so it comes when all nodes that read the parameter have run; and at once then, because the memory of
    its gradient is free afterwards."""
    before = Graph()
    for t in (*first, *gradients.values()):
        before.build_forward_expand(t)
    due: dict[Tensor, int] = {}
    for at, node in enumerate(before.nodes):
        due.update((s.root, at) for s in node.src if s is not None and s.root in gradients)
    computed = {node: at for at, node in enumerate(before.nodes)}
    steps: dict[int, list[Tensor]] = {}
    for w, g in gradients.items():
        steps.setdefault(max(due[w], computed[g]), []).append(w)
    graph = Graph()
    for at, node in enumerate(before.nodes):
        graph.build_forward_expand(node)
        for w in steps.get(at, ()):
            graph.build_forward_expand(step(w))
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
