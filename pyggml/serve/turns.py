"""Long requests are read and prepared a few at a time: each takes memory, and holds Python's lock for long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from pyggml import limits

from .errors import HTTPError

SHORT = 1 << 16  # a request of fewer bytes need not wait
LENGTH: ContextVar[int] = ContextVar("bytes of the body of the request that the task answers", default=0)


class Turns:
    """Lets requests through whose bodies have `limits.PREPARED_BYTES` together, or one that has more. Other long ones
    wait, in the order in which they came."""

    def __init__(self) -> None:
        self._n = 0  # bytes of those that are let through
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def turn(self, n: int) -> AsyncGenerator[None]:
        """The turn of a request of `n` bytes. Raises HTTPError (503) when too many wait already."""
        if n < SHORT:
            yield
            return
        if self._waiting or not self._has_room(n):
            n_waiting = sum(x for x, _ in self._waiting)
            if n_waiting and n_waiting + n > limits.WAITING_BYTES:
                raise HTTPError(503, "too many long requests wait: try again later")
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((n, future))
            try:
                await future
            except asyncio.CancelledError:
                if (n, future) in self._waiting:
                    self._waiting.remove((n, future))
                elif not future.cancelled():  # it was let through just now
                    self._n -= n
                self._next()
                raise
        else:
            self._n += n
        try:
            yield
        finally:
            self._n -= n
            self._next()

    def _has_room(self, n: int) -> bool:
        return not self._n or self._n + n <= limits.PREPARED_BYTES

    def _next(self) -> None:
        """Let those through that have room now. Some may have been told to leave, and not have heard it yet."""
        while self._waiting and (self._waiting[0][1].cancelled() or self._has_room(self._waiting[0][0])):
            n, future = self._waiting.popleft()
            if not future.cancelled():
                self._n += n
                future.set_result(None)
