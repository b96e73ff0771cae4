"""What a backend is: the scheduler's view of something that runs parts of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ..buffers.alloc import Step, steps_of
from ..buffers.buffer import ALIGNMENT, Buffer
from ..errors import BackendError, explain
from ..opdef import opdef_of
from ..tensor import Tensor

Resolve = Callable[[Tensor], Tensor]  # a source tensor -> itself, or its copy on this backend


class Program(Protocol):
    """Nodes made ready to run, again and again, on one backend."""

    def run(self, interruptible: bool = True, n_threads: int | None = None) -> None:
        """Compute the nodes, on no more than `n_threads` and the backend's threads. An `interruptible` run may end
        early on Ctrl-C when it is long. Raises BackendError naming the node that failed."""
        ...


@runtime_checkable
class Backend(Protocol):
    """Runs nodes whose memory it can reach. This is all that the scheduler knows of a backend.

    Before nodes run, the scheduler copies sources that the backend cannot read in place into its own kind of buffer:
    host memory, or a `DeviceBuffer` (see there). A node that writes into memory runs where that memory is.

    A backend may have an attribute `varies = True`. Then its programs take elements and strides that are Sizes, which
    get their numbers when their Vars are bound (`Tensor.layout`). Other backends are given plain numbers. They run no
    graph with such sizes.
    """

    name: str
    buft: str  # the buffer type it computes in
    alignment: int

    def supports_op(self, t: Tensor) -> bool:
        """Whether it has code for this node's op and types."""
        ...

    def supports_buft(self, buft: str) -> bool:
        """Whether the backend can read sources in buffers of this type without a copy."""
        ...

    def fuse(self, nodes: Sequence[Tensor], uses: Mapping[Tensor, int]) -> list[Step]:
        """The steps in which it computes these nodes. `uses`: how often the whole graph reads each tensor."""
        ...

    def reads(self, step: Step) -> Iterable[Buffer]:
        """The memory that the backend reads for a step but did not plan itself: the memory of leafs, or of its copies
        of leafs."""
        ...

    def compile(self, steps: Sequence[Step], resolve: Resolve) -> Program:
        """Make steps, whose memory is fixed, ready to run."""
        ...


class HostBackend:
    """What backends that compute in host memory share."""

    alignment = ALIGNMENT
    buft = "CPU"

    def fuse(self, nodes: Sequence[Tensor], uses: Mapping[Tensor, int]) -> list[Step]:
        """See `Backend.fuse`: each node by itself."""
        return steps_of(nodes)

    def reads(self, step: Step) -> Iterable[Buffer]:
        """See `Backend.reads`: the memory of the leafs."""
        roots = [s if s.view_src is None else s.view_src for t in step.nodes for s in t.src if s is not None]
        return [root.buffer for root in roots if root.op == "none" and root.buffer is not None]


_MEMBERS = ("name", "buft", "alignment", "supports_op", "supports_buft", "fuse", "reads", "compile")
BACKENDS: dict[str, Callable[[int | None], Backend]] = {}


def register_backend(name: str, make: Callable[[int | None], Backend]) -> None:
    """Let `name` stand for a backend that `make(n_threads)` makes, wherever backends are named (`compute`, `Scheduler`,
    `Model.new_context`). The Backend protocol says what it must do. Raises BackendError for other arguments."""
    if not isinstance(name, str) or not callable(make):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BackendError(
            f"register_backend takes a name and a function that makes a backend, not {name!r:.40}, {make!r:.40}"
        )
    BACKENDS[name] = make


def new_backend(name: object, n_threads: int | None = None) -> Backend:
    """A backend by name, or itself. Raises BackendError for an unknown name, and for one that lacks what `Backend`
    has."""
    if isinstance(name, str) and name not in BACKENDS:
        raise BackendError(f"no backend is called {name!r:.60}; there are {', '.join(BACKENDS)}")
    made: Any = BACKENDS[name](n_threads) if isinstance(name, str) else name
    lacks = [m for m in _MEMBERS if not hasattr(made, m)]
    if lacks:
        how = "pyggml.backends.protocol.Backend says what a backend must do, HostBackend does most of it"
        raise BackendError(f"the backend {name!r:.60} has no {', '.join(lacks)}: {how}")
    return made


def node_error(t: Tensor, text: str, kind: type[BackendError] = BackendError) -> BackendError:
    """The error of a node that failed while it ran: op, tensors, and the line that recorded it."""
    op = opdef_of(t)
    named = [(op.role(i), "None" if s is None else s.describe()) for i, s in enumerate(t.src)]
    return kind(explain(op.name, text, [("result", t.describe()), *named], t.site))
