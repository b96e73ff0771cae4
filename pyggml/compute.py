"""`compute`: run a graph from Python in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from pyggml.native.threads import thread_count

from .errors import GraphError
from .graph import Graph
from .sched import Scheduler, check_graph, require_values
from .tensor import Tensor

_schedulers: WeakKeyDictionary[Graph, dict[str, Scheduler]] = WeakKeyDictionary()


def compute(
    graph: Graph,
    inputs: Mapping[Tensor | str, Any] | None = None,
    n_threads: int | None = None,
    backend: str = "cpu",
) -> None:
    """Run `graph` on `backend` ("cpu" or "ref"), after copying `inputs` (NumPy order) into its leafs. An input is the
    leaf or its name; a value that is not given is the one that was set() last.

    The graph is planned once per backend, and again when it has grown or has other outputs. Results stay readable until
    it runs again. A graph of little work runs on one thread, whatever `n_threads` says (default: one per CPU). Raises
    GraphError for an input that is foreign to the graph, no leaf, or missing; BackendError when a kernel refuses its
    data.

    Threads that compute one graph take turns, from setting the inputs to the end of the run. The results are those of
    the last run, so threads that share a graph read them under its lock (`with graph.lock: gg.compute(graph, ...)`).
    Threads with graphs of their own share constants and weights, but no inputs or nodes.
    """
    check_graph("compute", graph)
    if not graph.nodes:
        raise GraphError("the graph is empty: build_forward_expand(result) first")
    threads = None if n_threads is None else thread_count(n_threads)
    given = leafs_of(graph, inputs)
    with graph.lock:
        made = _schedulers.setdefault(graph, {})
        sched = made.get(backend) or made.setdefault(backend, Scheduler((backend,)))
        require_values(graph, given)
        schedule = sched.alloc(graph)
        for t, value in given.items():
            t.set(value)
        schedule.run(n_threads=threads)


def eval(  # as MLX has it; `pyggml.eval`, for one look at values
    *tensors: Tensor,
    inputs: Mapping[Tensor | str, Any] | None = None,
    n_threads: int | None = None,
    backend: str = "cpu",
) -> Any:
    """Compute tensors, with all they depend on, and return their values as NumPy arrays: one for one tensor, else a
    tuple. `inputs`, `n_threads` and `backend` as in `compute`, as are the errors; AllocError for a leaf without value.

    The arrays are views of the tensors' memory when NumPy has the type, else float32 copies. Each `eval` computes anew,
    into new memory: build what runs again and again once, as a Graph for `compute`.
    """
    graph = Graph()
    for t in tensors:
        if not isinstance(t, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"eval takes tensors, eval(a, b), not {type(t).__name__}")
        graph.build_forward_expand(t)
        t.set_output()
    if graph.nodes:
        compute(graph, inputs, n_threads, backend)
    elif inputs:
        for t, value in leafs_of(graph, inputs).items():
            t.set(value)
    arrays = tuple(t.numpy() for t in tensors)
    return arrays[0] if len(arrays) == 1 else arrays


def leafs_of(graph: Graph, inputs: Mapping[Tensor | str, Any] | None) -> dict[Tensor, Any]:
    """`inputs` by tensor of `graph`. Raises GraphError for one that is foreign to it, or no leaf."""
    inputs = {} if inputs is None else inputs
    if not isinstance(inputs, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GraphError(f"inputs must be a mapping of tensors (or their names) to values, not {type(inputs).__name__}")
    given: dict[Tensor, Any] = {}
    for key, value in inputs.items():
        named = [t for t in graph.leafs if t.name == key] if isinstance(key, str) else [key]
        if len(named) != 1:
            names = ", ".join(t.name for t in graph.leafs if t.name) or "nothing"
            raise GraphError(
                f"inputs: {len(named)} leafs of this graph are called {key!r}, not one; they are called {names:.200}"
            )
        if not isinstance(named[0], Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"inputs: {key!r} is neither a tensor nor a name")
        if named[0] not in graph:
            raise GraphError(f"inputs: {named[0].describe()} is not in this graph")
        given[named[0]] = value
    return given
