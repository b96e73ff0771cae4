"""Workers that share requests. Results come in order; the requests of a worker that dies are done again."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from pyggml.errors import BatchError
from pyggml.llm.generate.requests import Result
from pyggml.logger import LOG

_AT_MOST = 8
ATTEMPTS = 3  # processes that die at the same thing, until that is given up


class WorkerDied(Exception):
    """A worker is gone, with the requests that it was answering."""


class Worker(Protocol):
    """Answers requests, several at a time."""

    def answers(self, requests: Sequence[Any]) -> Iterator[Result]:
        """A result for each, in order, `index` counting from 0. Raises WorkerDied."""
        ...

    def replace(self) -> bool:
        """Begin anew after WorkerDied. Returns whether that was possible."""
        ...

    def close(self) -> None:
        """End the worker, and whatever it is doing in any thread."""
        ...


class Pool:
    """Hands out requests in their order. Each worker gets so many that all workers have something to do until the end.
    Results that come too early are kept until their turn."""

    def __init__(self, workers: Sequence[Worker], n_parallel: int) -> None:
        self._workers, self._n_parallel = workers, n_parallel
        self._changed = threading.Condition()
        self._requests: Sequence[Any] = ()
        self._left: deque[int] = deque()
        self._results: dict[int, Result] = {}
        self._undone = self._busy = 0
        self._deaths: Counter[int] = Counter()  # by the first request that had no result
        self._error: BaseException | None = None

    def run(self, requests: Sequence[Any]) -> Iterator[Result]:
        """A result for each request, in their order. Once.

        Raises what a worker raises; BatchError when three workers in a row die at the same request, or no worker is
        left.
        """
        self._requests, self._left = requests, deque(range(len(requests)))
        self._undone, self._busy = len(requests), len(self._workers)
        threads = [threading.Thread(target=self._work, args=(w,), daemon=True) for w in self._workers]
        try:
            for t in threads:
                t.start()
            for i in range(len(requests)):
                with self._changed:
                    while i not in self._results:
                        if self._error is not None:
                            raise self._error
                        if not self._busy:
                            raise BatchError("no worker is left")
                        self._changed.wait()
                    result = self._results.pop(i)
                yield result
        finally:
            with self._changed:
                self._undone = 0
                self._left.clear()
                self._changed.notify_all()
            for w in self._workers:
                w.close()
            for t in threads:
                t.join()

    def _work(self, worker: Worker) -> None:
        """Answer requests with a worker until there are none left. Runs in a thread for each worker."""
        try:
            while chunk := self._take():
                n = 0
                try:
                    for result in worker.answers([self._requests[i] for i in chunk]):
                        if not self._done(chunk[n], result):
                            return
                        n += 1
                except WorkerDied as e:
                    if not self._put_back(chunk[n:], e) or not worker.replace():
                        return
        except BaseException as e:
            with self._changed:
                self._error = self._error or e
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def _take(self) -> list[int]:
        """Wait for the next requests. Returns none when all are answered."""
        with self._changed:
            while not self._left and self._undone and self._error is None:
                self._changed.wait()  # another worker may die
            if self._error is not None:
                return []
            n = len(self._left) // (2 * len(self._workers))
            least = min(self._n_parallel, -(-len(self._requests) // len(self._workers)))
            n = min(max(n, least), _AT_MOST * self._n_parallel, len(self._left))
            return [self._left.popleft() for _ in range(n)]

    def _done(self, i: int, result: Result) -> bool:
        """Keep a result; False when nobody waits for it."""
        with self._changed:
            if not self._undone:
                return False
            self._results[i] = {**result, "index": i}
            self._undone -= 1
            self._changed.notify_all()
            return True

    def _put_back(self, chunk: Sequence[int], died: WorkerDied) -> bool:
        with self._changed:
            if not self._undone:
                return False
            LOG.warning("a worker died; %d requests are done again: %s", len(chunk), died)
            self._left = deque(sorted((*chunk, *self._left)))
            self._deaths[chunk[0]] += 1
            if self._deaths[chunk[0]] == ATTEMPTS:
                raise BatchError(
                    f"{ATTEMPTS} workers died at request {chunk[0] + 1} or the next ones: {died}"
                ) from died
            self._changed.notify_all()
            return True
