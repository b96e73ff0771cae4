"""Who looks at values while graphs run. The scheduler's part of taps and edits; `taps.py` has the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from pyggml.lock import Lock
from pyggml.tensor import Tensor

Patterns = tuple[tuple[str, ...], ...]


class Watcher(Protocol):
    """Is asked for names when a graph is planned, and told values when it runs, as ggml's eval callback is."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """What `asks` depends on: watchers of the same patterns share their plans."""
        ...

    def asks(self, name: str, last: bool = True) -> bool:
        """Whether it wants the node of that name; of several nodes of one name, the `last`, or others."""
        ...

    def chosen(self, nodes: Sequence[Tensor]) -> Collection[Tensor]:
        """Which nodes of a graph it wants besides; it is told them all."""
        ...

    def deliver(self, t: Tensor) -> None:
        """`t` has been computed, and nothing that reads it. What this changes of it, its readers see."""
        ...


class Watches:
    """The watchers of the graphs that share this. Graphs are planned again for other `patterns`; those planned before
    run on when the same are back."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._set(())

    def _set(self, watchers: tuple[Watcher, ...]) -> None:
        self.now = watchers
        self.patterns: Patterns = tuple(w.patterns for w in watchers)

    def add(self, watcher: Watcher) -> None:
        """Graphs that run from now on tell `watcher`."""
        with self._lock:
            self._set((*self.now, watcher))

    def remove(self, watcher: Watcher) -> None:
        """They no longer do."""
        with self._lock:
            self._set(tuple(w for w in self.now if w is not watcher))

    def asks(self, name: str) -> bool:
        """Whether anyone wants the node of that name."""
        return any(w.asks(name) for w in self.now)

    def of(self, nodes: Sequence[Tensor]) -> dict[Tensor, bool]:
        """Which nodes of a graph, in its order, anyone wants, and whether each is the last of its name."""
        last = {t.name: t for t in nodes if t.name} if self.now else {}
        wanted = {t: last[t.name] is t for t in nodes if t.name in last}
        asked = {t: is_last for t, is_last in wanted.items() if any(w.asks(t.name, is_last) for w in self.now)}
        chosen = {t for w in self.now for t in w.chosen(nodes)}
        return asked | {t: wanted.get(t, False) for t in chosen}

    def tell(self, t: Tensor, last: bool) -> None:
        """Deliver `t` to those who want it, in the order in which they came."""
        for watcher in self.now:
            if watcher.asks(t.name, last) or watcher.chosen((t,)):
                watcher.deliver(t)
