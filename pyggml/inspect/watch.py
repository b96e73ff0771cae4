"""Watchers, which see values while graphs run: the scheduler's part of taps and edits; `taps.py` has the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from pyggml.lock import Lock
from pyggml.tensor import Tensor

Patterns = tuple[tuple[str, ...], ...]


class Watcher(Protocol):
    """Names the nodes it wants when a graph is planned, and gets their values when it runs, as ggml's eval callback."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Everything that `asks` depends on. Watchers with the same patterns share plans."""
        ...

    def asks(self, name: str, last: bool = True) -> bool:
        """Whether the watcher wants a node of that name. `last`: whether it is the last node of that name."""
        ...

    def chosen(self, nodes: Sequence[Tensor]) -> Collection[Tensor]:
        """Further nodes of a graph that the watcher wants, given all nodes."""
        ...

    def deliver(self, t: Tensor) -> None:
        """Called when `t` has been computed and nothing has read it yet. Readers see what this call changes."""
        ...


class Watches:
    """The watchers of a set of graphs. When the `patterns` change, graphs are planned again; earlier plans are used
    again when their patterns are back."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._set(())

    def _set(self, watchers: tuple[Watcher, ...]) -> None:
        self.now = watchers
        self.patterns: Patterns = tuple(w.patterns for w in watchers)

    def add(self, watcher: Watcher) -> None:
        """Tell `watcher` about graphs that run from now on."""
        with self._lock:
            self._set((*self.now, watcher))

    def remove(self, watcher: Watcher) -> None:
        """Tell `watcher` no longer."""
        with self._lock:
            self._set(tuple(w for w in self.now if w is not watcher))

    def asks(self, name: str) -> bool:
        """Whether any watcher wants the node of that name."""
        return any(w.asks(name) for w in self.now)

    def of(self, nodes: Sequence[Tensor]) -> dict[Tensor, bool]:
        """The nodes of a graph that any watcher wants, in order, and whether each is the last of its name."""
        last = {t.name: t for t in nodes if t.name} if self.now else {}
        wanted = {t: last[t.name] is t for t in nodes if t.name in last}
        asked = {t: is_last for t, is_last in wanted.items() if any(w.asks(t.name, is_last) for w in self.now)}
        chosen = {t for w in self.now for t in w.chosen(nodes)}
        return asked | {t: wanted.get(t, False) for t in chosen}

    def tell(self, t: Tensor, last: bool) -> None:
        """Deliver `t` to the watchers that want it, in the order in which they were added."""
        for watcher in self.now:
            if watcher.asks(t.name, last) or watcher.chosen((t,)):
                watcher.deliver(t)
