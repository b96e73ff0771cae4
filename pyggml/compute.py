"""`compute`: run a graph from Python in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from .errors import GraphError
from .graph import Graph
from .sched import Scheduler
from .tensor import FLAG_INPUT, FLAG_PLANNED, Tensor

_schedulers: WeakKeyDictionary[Graph, dict[tuple[str, int | None], Scheduler]] = WeakKeyDictionary()


def compute(
    graph: Graph, inputs: Mapping[Tensor, Any] | None = None, n_threads: int | None = None, backend: str = "cpu"
) -> None:
    """Run `graph` on `backend` ("cpu" or "ref"), after copying `inputs` (NumPy order) into its input leafs.

    The graph is planned once per backend and thread count; results stay readable until it runs again. Raises GraphError
    for an input that is foreign to the graph, no leaf, or missing; BackendError where a kernel refuses its data.
    """
    if not graph.nodes:
        raise GraphError("the graph is empty: build_forward_expand(result) first")
    given = dict(inputs or {})
    for t in given:
        if t not in graph:
            raise GraphError(f"inputs: {t.describe()} is not in this graph")
    made = _schedulers.setdefault(graph, {})
    key = (backend, n_threads)
    sched = made.get(key) or made.setdefault(key, Scheduler((backend,), n_threads))
    _require_values(graph, given)
    schedule = sched.alloc(graph)
    for t, value in given.items():
        t.set(value)
    schedule.run()


def _require_values(graph: Graph, given: Mapping[Tensor, Any]) -> None:
    for t in graph.leafs:
        no_value = t.buffer is None or t.flags & FLAG_PLANNED
        if no_value and t not in given and t.view_src is None:
            kind = "input" if t.flags & FLAG_INPUT else "leaf"
            raise GraphError(f"no value for the {kind} {t.describe()}: pass it in inputs={{...}} or set() it")
