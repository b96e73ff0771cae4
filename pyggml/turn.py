"""Turns: threads compute graphs side by side, unless one of them writes what another one uses."""

from __future__ import annotations

from _thread import RLock
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar
from weakref import ref

from .errors import GraphError
from .graph import Graph
from .lock import Lock, acting_thread
from .system.memory import in_child
from .tensor import FLAG_STORE, Tensor
from .var import Var, vars_of


class Turn(RLock):  # pyright: ignore[reportGeneralTypeIssues]
    """A thread computes a graph within `with turn:`, after `turn.begin()`. Meanwhile no other thread computes one that
    writes what this graph reads or writes: nodes, the leafs that are `given` values or stored into, and the Vars that
    these values bind. Turns that have nothing of that in common run side by side.

    A turn that begins inside of another one, in the function of an op, a tap or an edit, does not wait for that one,
    and raises GraphError when it would change its values. C code ends a turn, and the list of turns has weak
    references, so that Ctrl-C never leaves one that others wait for.
    """

    _begun: ClassVar[list[ref[Turn]]] = []
    _beginning: ClassVar[Lock] = Lock()

    def __init__(self, graph: Graph, given: Mapping[Tensor, Any]) -> None:
        self._graph, self._given, self._thread = graph, given, acting_thread()
        self._is_over = False

    def begin(self) -> None:
        """Wait for the turns that have begun, and that this one would disturb or be disturbed by."""
        while (other := self._first_of_others()) is not None:
            with other:
                other._is_over = True

    def _first_of_others(self) -> Turn | None:
        """A turn to wait for. None when there is none: this one has begun then."""
        with Turn._beginning:
            for entry in [*Turn._begun]:
                other = entry()
                if other is None or other._is_over or not (self._disturbs(other) or other._disturbs(self)):
                    continue
                if other._thread != self._thread:
                    return other
                if self._changes_values_of(other) and other._is_held():
                    raise GraphError(
                        "a graph that is computed while another one runs, in a function that this one calls, gives "
                        "values to leafs or Vars of it, or stores into its tensors: it needs leafs and Vars of its own"
                    )
            Turn._begun.append(ref(self, Turn._begun.remove))
            return None

    def _is_held(self) -> bool:
        """Whether its thread is within it."""
        return f"owner={self._thread} " in repr(self)  # an RLock tells its owner in no other way

    def _disturbs(self, other: Turn) -> bool:
        """Whether this turn writes what the other one reads or writes."""
        if not self.changed.isdisjoint(other._graph.leafs) or not self.changed.isdisjoint(other.changed):
            return True
        return bool(self._bound) and not self._bound.isdisjoint(other._vars)

    def _changes_values_of(self, other: Turn) -> bool:
        """Whether the other one would compute something else; not when this one just computes nodes of it, too."""
        used = {*other._graph.leafs, *other.changed}
        return not (self._written.isdisjoint(used) and self._bound.isdisjoint(other._vars))

    @classmethod
    def forked(cls) -> None:
        """Forget the turns of the parent: its other threads do not run in the child."""
        cls._begun, cls._beginning = [], Lock()

    @cached_property
    def changed(self) -> set[Tensor]:
        """The tensors that it writes: nodes and leafs."""
        return self._written.union(self._graph.nodes)

    @cached_property
    def _written(self) -> set[Tensor]:
        """The leafs that are given values, and the tensors that nodes store into."""
        return {*self._given, *[t.root for t in self._graph.nodes if t.flags & FLAG_STORE]}

    @cached_property
    def _bound(self) -> set[Var]:
        return {var for t in self._given for var in vars_of(*t.ne)}

    @cached_property
    def _vars(self) -> set[Var]:
        tensors = (*self._graph.nodes, *self._graph.leafs)
        return {var for t in tensors for var in vars_of(*t.ne, *t.nb, t.view_offs)}


in_child(Turn.forked)
