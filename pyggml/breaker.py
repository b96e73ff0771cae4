"""Break off the graphs that a thread computes, from another thread."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from .errors import Aborted


class _Run(Protocol):
    def abort(self) -> None: ...


class Breaker:
    """A `with` block whose thread computes for others: Ctrl-C does not break off the graphs that run in it, and
    `abort`, which any thread may call, does.

    A server computes in such a block. Its answers go on while it waits for them to end, and what nobody waits for any
    more need not be computed to its end.
    """

    def __init__(self) -> None:
        self._run: _Run | None = None  # the last one that has begun
        self.aborted = False

    def __enter__(self) -> Breaker:
        self._token = _breaker.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _breaker.reset(self._token)
        self._run = None

    def begin(self, run: _Run) -> None:
        """A backend is about to run a program. Raises Aborted when the block is `aborted` already."""
        if self.aborted:
            raise Aborted("the graph was broken off before it began")
        self._run = run

    def abort(self) -> None:
        """End the run that is under way before its next op, and let no other one begin: each raises Aborted. (A run
        that begins at this very moment may not notice; call again until the thread has ended.)"""
        self.aborted = True
        if (run := self._run) is not None:
            run.abort()


_breaker: ContextVar[Breaker | None] = ContextVar("pyggml_breaker", default=None)
breaker = _breaker.get  # of the block around, if any
