"""The one thread that computes: an engine, what is asked of it from event loops, and the way of tokens back to them.

Requests are answered in asyncio. `EngineThread.submit` hands generations over, and their tokens come back through the
queue of an `Answering`. Whoever reads slowly lets that queue grow, to the length of the own text at most, and holds up
nobody.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from pyggml import limits
from pyggml.breaker import Breaker
from pyggml.llm.decoder import Decoder
from pyggml.llm.generate.engine import Engine, Token
from pyggml.llm.generate.generation import Generation
from pyggml.llm.generate.snapshots import Snapshots

from .errors import HTTPError, of_generation, stopping

T = TypeVar("T")
_PROGRESS = Token("", -1)  # comes when a part of a prompt has been evaluated, if a request asks for that
_Item = tuple[int, "Token | HTTPError | None"]  # of which generation; None: it has ended


def is_progress(token: Token) -> bool:
    """Whether this is no token, but says that a part of the prompt has been evaluated."""
    return token is _PROGRESS


class Answering:
    """The generations of one request, and their tokens as they come: `async for i, token in answering`, where `i` says
    of which generation. Belongs to one task; `close` it when nobody listens any more, which calls `at_end`. Raises
    HTTPError when a generation failed."""

    def __init__(self, generations: Sequence[Generation], thread: EngineThread) -> None:
        self.generations, self._thread = generations, thread
        self.loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._n_left = len(generations)
        self._n_probs = 0  # log-probabilities so far
        self.at_end: Callable[[], object] = lambda: None

    def __aiter__(self) -> Answering:
        return self

    async def __anext__(self) -> tuple[int, Token]:
        while self._n_left:
            i, item = await self._queue.get()
            if isinstance(item, Token):
                if item.top:  # thousands of alternatives take long to be written: others have a turn before
                    await asyncio.sleep(0)
                return i, item
            if item is not None:
                raise item
            self._n_left -= 1
        raise StopAsyncIteration

    def close(self) -> None:
        """End the generations that are under way."""
        self.at_end()
        if self._n_left:
            self._thread.cancel(self)

    def put_progress(self, i: int, n_done: int, n: int) -> None:
        """Called by the thread: a part of prompt `i` is evaluated."""
        _hand_over({self: [(i, _PROGRESS)]})

    def take(self, items: Sequence[_Item]) -> None:
        """Called by the event loop: what the thread has found."""
        for i, item in items:
            self._queue.put_nowait((i, item))
            before, most = self._n_probs, limits.REQUEST_PROBS
            self._n_probs += len(item.top) if isinstance(item, Token) else 0
            if before <= most < self._n_probs:
                self._thread.cancel(self)
                self._queue.put_nowait((i, HTTPError(400, f"an answer has at most {most} log-probabilities")))


def _hand_over(found: Mapping[Answering, Sequence[_Item]]) -> None:
    """Called by the thread: give each request its items, and wake each event loop up once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Answering, Sequence[_Item]]]] = {}
    for answering, items in found.items():
        by_loop.setdefault(answering.loop, []).append((answering, items))

    def take(parts: Sequence[tuple[Answering, Sequence[_Item]]]) -> None:
        for answering, items in parts:
            answering.take(items)

    for loop, parts in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            loop.call_soon_threadsafe(take, parts)


@dataclass
class Counts:
    """What the thread has done, for /metrics."""

    n_prompt: int = 0
    n_cached: int = 0  # tokens of prompts that needed no evaluation
    prompt_seconds: float = 0.0
    n_predicted: int = 0
    predicted_seconds: float = 0.0
    n_steps: int = 0
    n_busy: int = 0  # slots that were busy, summed over steps
    n_tokens_max: int = 0
    n_drafts: int = 0
    n_drafted: int = 0  # tokens of the drafts
    n_accepted: int = 0  # ... that were right


@dataclass(eq=False)
class _Job(Generic[T]):
    """Something else to do in the thread, between two steps. `ready` says when."""

    run: Callable[[], T]
    ready: Callable[[], bool]
    future: Future[T] = field(default_factory=Future[T])


class EngineThread:
    """Runs an engine over `ctx`, which it closes at the end. Without a `ctx` it does jobs alone."""

    def __init__(self, ctx: Decoder | None, n_queue: int, snapshots: Snapshots | None = None) -> None:
        self.ctx, self.counts = ctx, Counts()
        self.engine = None if ctx is None else Engine(ctx, failed=self._failed, snapshots=snapshots)
        self.n_slots = 0 if ctx is None else ctx.memory.n_seq_max
        self._n_queue = n_queue
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open: dict[Generation, tuple[Answering, int]] = {}
        self._n_open, self._lock = 0, threading.RLock()
        self._jobs: list[_Job[Any]] = []
        self._stopped, self._breaker = False, Breaker()
        self._thread = threading.Thread(target=self._run, name="pyggml engine", daemon=True)

    # -- from event loops -------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all texts, what is computed for them, and the thread; and wait for it."""
        self.cut()
        while self._thread.is_alive():
            self._breaker.abort()
            self._thread.join(0.05)

    def cut(self) -> None:
        """The same, without waiting: each request gets the error that the server is stopping."""
        self._order(self._stop)
        self._breaker.abort()

    @property
    def stopped(self) -> bool:
        """Whether it takes no further requests."""
        return self._stopped

    def _order(self, do: Callable[[], None]) -> None:
        """Let the thread do something; it begins with the first order. An order that is given before `_stop` is run."""
        self._orders.put(do)
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()

    @property
    def n_waiting(self) -> int:
        """How many texts wait for a slot."""
        return max(self._n_open - self.n_slots, 0)

    def submit(self, generations: Sequence[Generation], shows_progress: bool = False) -> Answering:
        """Begin generations as soon as there is room. With `shows_progress` a token that `is_progress` comes after each
        part of a prompt. Raises HTTPError (503) when too many wait already."""
        with self._lock:
            self.check_room(len(generations))
            self._n_open += len(generations)
            answering = Answering(generations, self)
            for i, g in enumerate(generations if shows_progress else ()):
                g.progress = partial(answering.put_progress, i)
            self._order(lambda: self._begin(answering))
        return answering

    def check_room(self, n: int) -> None:
        """Raises HTTPError (503) when `n` more texts are too many. A request that comes alone is never too large."""
        if self._stopped:
            raise stopping()
        if self._n_open and self._n_open + n > self.n_slots + self._n_queue:
            raise HTTPError(503, f"{self._n_open} texts are under way or wait: try again later")

    def cancel(self, answering: Answering) -> None:
        """End what is left of a request."""
        self._order(lambda: self._cancel(answering))

    async def call(self, run: Callable[[], T], ready: Callable[[], bool] | None = None) -> T:
        """Run a function in the thread between two steps, when `ready` says so. Returns or raises what it does."""
        job = _Job(run, ready or (lambda: True))
        with self._lock:
            if self._stopped:
                raise stopping()
            self._order(lambda: self._jobs.append(job))
        return await asyncio.wrap_future(job.future)

    # -- in the thread ----------------------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        return self.engine is not None and self.engine.busy

    def _run(self) -> None:
        try:
            with self._breaker:
                while not self._stopped:
                    self._take_orders(wait=not self._busy and not self._jobs)
                    self._do_job()
                    if self.engine is not None and self.engine.busy:
                        self._step(self.engine)
        finally:  # nobody waits for a thread that has ended, even by an error that nobody thought of
            self._end()
            if self.ctx is not None:
                self.ctx.close()

    def _take_orders(self, wait: bool) -> None:
        with suppress(Empty):
            while True:
                self._orders.get(wait)()
                wait = False

    def _do_job(self) -> None:
        """Do the first job that is ready, and that somebody waits for. One at a time: however many there are, texts
        that are continued go on between them."""
        for job in tuple(self._jobs):
            if job.future.cancelled() or job.ready():
                self._jobs.remove(job)
                if job.future.set_running_or_notify_cancel():
                    try:
                        job.future.set_result(job.run())
                    except BaseException as e:
                        job.future.set_exception(e)
                    return

    def _step(self, engine: Engine) -> None:
        """Evaluate a batch, and hand over what it gave."""
        found: dict[Answering, list[_Item]] = {}
        busy = [slot.generation for slot in engine.slots if not slot.ended]
        self.counts.n_steps += bool(busy)
        self.counts.n_busy += len(busy)
        try:
            for g, token in engine.step():
                if g in self._open:
                    answering, i = self._open[g]
                    found.setdefault(answering, []).append((i, token))
        except Exception as e:  # the batch failed: nobody knows whose fault that is
            for slot in engine.slots:
                if not slot.ended:
                    self._failed(slot.generation, e)
                    engine.cancel(slot.generation)
        for g in [slot.generation for slot in engine.slots if slot.generation in self._open]:
            if g.finish_reason is not None:
                answering, i = self._close(g)
                none = [(i, Token("", -1, finish_reason=g.finish_reason))] if g.n_predict == 0 else []
                found.setdefault(answering, []).extend([*none, (i, None)])
        _hand_over(found)

    def _begin(self, answering: Answering) -> None:
        for i, g in enumerate(answering.generations):
            self._open[g] = (answering, i)
            if self.engine is not None:
                self.engine.submit(g)

    def _cancel(self, answering: Answering) -> None:
        for g in answering.generations:
            if g in self._open:
                if self.engine is not None:
                    self.engine.cancel(g)
                self._close(g)

    def _failed(self, g: Generation, e: Exception) -> None:
        if g in self._open:
            answering, i = self._close(g)
            _hand_over({answering: [(i, of_generation(e))]})

    def _close(self, g: Generation) -> tuple[Answering, int]:
        counts, t = self.counts, g.timings
        counts.n_prompt += t.n_prompt
        counts.n_cached += g.n_past
        counts.prompt_seconds += t.prompt
        counts.n_predicted += len(g.ids)
        counts.predicted_seconds += t.eval
        counts.n_tokens_max = max(counts.n_tokens_max, g.n_done)
        if (drafts := g.draft_stats) is not None:
            counts.n_drafts += drafts.n_drafts
            counts.n_drafted += drafts.n_drafted
            counts.n_accepted += drafts.n_accepted
        with self._lock:
            self._n_open -= 1
        return self._open.pop(g)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True

    def _end(self) -> None:
        """Answer all that is open."""
        self._stop()
        self._take_orders(wait=False)
        for g in tuple(self._open):
            if self.engine is not None:
                self.engine.cancel(g)
            answering, i = self._close(g)
            _hand_over({answering: [(i, stopping())]})
        for job in self._jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(stopping())
        self._jobs.clear()
