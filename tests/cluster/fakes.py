"""Actors in threads of this process, which can be killed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pyggml.cluster.actors import ActorDied
from pyggml.cluster.seats import Node, Seat


class FakeActor:
    """Calls run in one thread, in their order; what is sent is pickled."""

    def __init__(self, kind: type, seat: Seat, before: Callable[[FakeActor, str], None]) -> None:
        self.kind, self.seat, self.dead = kind, seat, False
        self._object, self._before = kind(), before
        self._thread = ThreadPoolExecutor(1)

    def call(self, method: str, *args: Any) -> Future[Any]:
        sent = [a if isinstance(a, Future) else pickle.loads(pickle.dumps(a)) for a in args]
        return self._thread.submit(self._run, method, sent)

    def kill(self) -> None:
        self.dead = True

    def _run(self, method: str, args: list[Any]) -> Any:
        values = [a.result() if isinstance(a, Future) else a for a in args]
        self._before(self, method)
        if self.dead:
            raise ActorDied(f"{self.kind.__name__} on {self.seat.node}")
        result = pickle.dumps(getattr(self._object, method)(*values))
        if self.dead:
            raise ActorDied(f"{self.kind.__name__} on {self.seat.node}")
        return pickle.loads(result)


class FakeActors:
    """`before(actor, method)` is called in front of each call."""

    def __init__(self, cpus: tuple[int, ...] = (1, 1), before: Callable[[FakeActor, str], None] | None = None) -> None:
        self.alive = [Node(f"node{i}", n, 1 << 34) for i, n in enumerate(cpus)]
        self.before = before or (lambda actor, method: None)
        self.started: list[FakeActor] = []

    def nodes(self) -> list[Node]:
        return list(self.alive)

    def start(self, kind: type, seat: Seat) -> FakeActor:
        self.started.append(FakeActor(kind, seat, self.before))
        return self.started[-1]

    def get(self, result: Future[Any]) -> Any:
        return result.result()
