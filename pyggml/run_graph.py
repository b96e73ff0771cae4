"""`compute`: run a graph from Python in one call."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from pyggml.native.threads import thread_count

from . import codec
from .backends.protocol import Backend
from .codec import Array
from .errors import BackendError, GraphError, ShapeError
from .graph import Graph
from .hazards import check_asked
from .sched import Scheduler, check_graph, require_values
from .tensor import Tensor, full_ne
from .turn import Turn
from .var import Size, Var, vars_of

_schedulers: WeakKeyDictionary[Graph, dict[str, Scheduler]] = WeakKeyDictionary()


def compute(
    graph: Graph,
    inputs: Mapping[Tensor | str, Any] | None = None,
    n_threads: int | None = None,
    backend: str = "cpu",
) -> None:
    """Run `graph` on `backend` ("cpu" or "ref"), after copying `inputs` (NumPy order) into its leafs. An input is the
    leaf or its name; a value that is not given is the one that was set() last.

    Where the shapes of inputs follow from Vars, the shapes of the arrays say what these are, and bind them: all arrays
    must agree. Vars that no input's shape has stay as `Var.bind` has set them.

    The graph is planned once per backend, and again when it has grown or has other outputs, but not for other values of
    Vars. Results stay readable until it runs again. A graph of little work runs on one thread, whatever `n_threads`
    says (default: one per core). Raises GraphError for an input that is foreign to the graph, no leaf, or missing, and
    for one that was set for other values of its Vars; ShapeError for shapes that do not fit; BackendError when a kernel
    refuses its data.

    Threads take turns, from setting the inputs to the end of the run, when they compute one graph, or graphs that share
    nodes, inputs or Vars. The results are those of the last run: threads that share a graph read them under its lock
    (`with graph.lock: gg.compute(graph, ...)`), threads whose graphs share nodes or Vars under a lock of the program.
    """
    check_graph("compute", graph)
    if not graph.nodes:
        raise GraphError("the graph is empty: build_forward_expand(result) first")
    given = leafs_of(graph, inputs)
    turn = Turn(graph, given)
    with graph.lock, turn:
        turn.begin()
        _run(graph, given, n_threads, backend)


def eval(  # as MLX has it; `pyggml.eval`, for one look at values
    *tensors: Tensor,
    inputs: Mapping[Tensor | str, Any] | None = None,
    n_threads: int | None = None,
    backend: str = "cpu",
) -> Any:
    """Compute tensors, with all they depend on, and return their values as NumPy arrays: one for one tensor, else a
    tuple. `inputs`, which may bind Vars, `n_threads` and `backend` as in `compute`, as are the errors; AllocError for a
    leaf without value, GraphError for a tensor that was overwritten in place (`pyggml.hazards`).

    The arrays are views of the tensors' memory when NumPy has the type, else float32 copies. Values of leafs that this
    call sets or stores into are copies too. Each `eval` computes anew, into new memory: build what runs again and again
    once, as a Graph for `compute`.

    Any number of threads may evaluate the same tensors, with inputs and Vars of their own: they take turns, and each
    gets the values of its inputs.
    """
    graph = Graph()
    if not tensors:
        raise GraphError("eval takes tensors, eval(a, b); none was given")
    for t in tensors:
        if not isinstance(t, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"eval takes tensors, eval(a, b), not {type(t).__name__}")
        graph.build_forward_expand(t)
    check_asked(tensors, graph)
    given = leafs_of(graph, inputs)
    turn = Turn(graph, given)
    with turn:
        turn.begin()
        for t in tensors:
            t.set_output()
        _run(graph, given, n_threads, backend)
        arrays = tuple([_values(t, turn) for t in tensors])
    return arrays[0] if len(arrays) == 1 else arrays


def _values(t: Tensor, turn: Turn) -> Array:
    """The values of `t`, as they stay when the turn is over: the next one may write over a leaf."""
    is_written = t.root.op == "none" and t.root in turn.changed
    return np.array(t.numpy()) if is_written else t.numpy()


def _run(graph: Graph, given: Mapping[Tensor, Any], n_threads: int | None, backend: str) -> None:
    """Set the leafs that are `given`, and run the graph unless it has no nodes."""
    if not isinstance(backend, str) and not isinstance(backend, Backend):  # pyright: ignore[reportUnnecessaryIsInstance]
        several = "; pyggml.Scheduler(backends) runs graphs on several"
        raise BackendError(f"backend must be the name of one, such as 'cpu' or 'ref', not {backend!r:.60}{several}")
    threads = None if n_threads is None else thread_count(n_threads)
    schedule = None
    with bound_by(given):
        if graph.nodes:
            made = _schedulers.setdefault(graph, {})
            sched = made.get(backend) or made.setdefault(backend, Scheduler((backend,)))
            require_values(graph, given)
            schedule = sched.alloc(graph)
        for t, value in given.items():
            t.set(value)
    if schedule is not None:
        schedule.run(n_threads=threads)


@contextmanager
def bound_by(given: Mapping[Tensor, Any]) -> Generator[None]:
    """Bind the Vars in the shapes of these tensors to what the shapes of their values say. They are bound as before
    when the block raises. Raises ShapeError where two values disagree, and for what a Var cannot be."""
    found: dict[Var, tuple[int, Tensor]] = {}
    several: list[tuple[Size, int, Tensor]] = []  # sizes of more than one Var, and what they must be
    for t, value in given.items():
        if not vars_of(*t.ne):
            continue
        shape = codec.as_array("inputs", value).shape
        for size, n in zip(t.ne, full_ne(shape[::-1] or (1,)), strict=False):
            if not isinstance(size, Size):
                continue
            stride, var = size.unit()
            if not isinstance(var, Var):
                several.append((size, n, t))
                continue
            fits, rest = divmod(n - size.const, stride)
            if rest or not var.lo <= fits <= var.hi:
                text = f"a value of shape {shape} does not fit {t.describe()} for any {var.name} in {var.lo}..{var.hi}"
                raise ShapeError(f"inputs: {text}")
            before, other = found.setdefault(var, (fits, t))
            if before != fits:
                text = f"{var.name} is {before} for {other.describe()}, and {fits} for {t.describe()}"
                raise ShapeError(f"inputs: by the shapes of their values, {text}")
    as_before = {var: var.value for var in found}
    try:
        for var, (value, _) in found.items():
            var.bind(value)
        for size, n, t in several:
            if int(size) != n:
                names = " and ".join(var.name for var in size.vars)
                now = ", ".join(f"{var.name} = {var.value}" for var in size.vars)
                text = f"that a size of {t.describe()} is {n} does not tell {names}, which are now {now}"
                raise ShapeError(f"inputs: {text}: bind them, or give inputs that have one of them in a size")
        yield
    except BaseException:
        for var, value in as_before.items():
            var.bind(value)
        raise


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
