"""Groups of weights that take turns in memory, and the threads that read them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any
from weakref import WeakSet, ref

from pyggml.errors import BackendError, ModelError

Job = Callable[[], int]  # puts a piece of a weight in its place, and returns the bytes that it read
READERS = 4  # threads: more read no faster from a virtual disk (docs/memory.md)


class _State(Enum):
    AWAY, COMING, HERE = range(3)


class Group:
    """Weights that come and go together, in the bytes `start` to `end` of the ring: `Streamed` of the scheduler."""

    def __init__(self, ring: Ring, name: str, start: int, end: int, jobs: Sequence[Job]) -> None:
        self._ring, self.name, self.start, self.end, self.jobs = ring, name, start, end, jobs
        self.state = _State.AWAY
        self.turn = 0  # how often reading it has ended: a job of an earlier turn does nothing
        self.left = self.running = 0  # jobs of this turn that have not begun; those that have, and are not done
        self.error: BaseException | None = None  # of this turn: no job begins any more
        self.users: list[int] = []  # threads that hold it or wait for it
        self.rivals: WeakSet[Group] = WeakSet()  # groups in the same place
        self.next: ref[Group] = ref(self)  # the group that was asked for after it, the last time

    def acquire(self, nodes: Sequence[Any] = ()) -> None:
        """See `Streamed`. Raises what reading it raised, BackendError when it can never come."""
        self._ring.acquire(self)

    def release(self) -> None:
        """See `Streamed`."""
        self._ring.release(self)

    @property
    def held(self) -> bool:
        """Whether its place is taken: being read, or in use."""
        return self.state is _State.COMING or (self.state is _State.HERE and bool(self.users))


class Ring:
    """Reads groups into the places that they share: the group that is asked for, and while that is used the one after
    it. Groups refer to the ring, and the ring does not refer to groups: all are freed with the tensors of their
    weights."""

    def __init__(self, readers: ThreadPoolExecutor) -> None:
        self._readers = readers
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._closed = False
        self._last: ref[Group] | None = None
        self.bytes_read = 0

    def acquire(self, g: Group) -> None:
        """See `Group.acquire`."""
        self.check()
        me = threading.get_ident()
        with self._changed:
            g.users.append(me)
            if g.state is _State.AWAY:
                g.error = None  # of an earlier attempt, which nobody waited for
            try:
                while g.state is not _State.HERE:
                    self.check()
                    if g.error is not None:
                        error, g.error = g.error, None
                        raise error
                    blocking = [o for o in g.rivals if o.held]
                    for o in blocking:
                        if o.state is _State.HERE and me in o.users:
                            raise BackendError(f"the weights {g.name}* and {o.name}* cannot be in memory together")
                    if g.state is _State.AWAY and not blocking:
                        self._start(g)
                    self._changed.wait()
                last = self._last and self._last()
                if last is not None:
                    last.next = ref(g)
                self._last = ref(g)
                self.prefetch(g.next())
            except BaseException:
                g.users.remove(me)
                raise

    def release(self, g: Group) -> None:
        """See `Group.release`."""
        with self._changed:
            g.users.remove(threading.get_ident())
            self._changed.notify_all()

    def prefetch(self, g: Group | None) -> None:
        """Begin to read a group, unless another is wanted in its place."""
        with self._changed:
            if (
                g is not None
                and g.state is _State.AWAY
                and not self._closed
                and not any(o.held or o.users for o in g.rivals)
            ):
                self._start(g)

    def close(self) -> None:
        """Stop reading. Whoever asks for a group from now on gets ModelError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raises ModelError when the model was closed, BackendError in a forked child."""
        if self._closed:
            raise ModelError("the model was closed: its weights are not read any more")
        if self._pid != os.getpid():
            raise BackendError("threads of the parent process read the weights of this model: load it again here")

    def _start(self, g: Group) -> None:
        for o in g.rivals:
            o.state = _State.AWAY
        g.state, g.left, g.running, g.error = _State.COMING, len(g.jobs), 0, None
        try:
            for job in g.jobs:
                self._readers.submit(self._run, g, g.turn, job)
        except BaseException as e:  # no thread, no memory; the job that it was raised for may be among the others
            g.error = e
            self._settle(g)
            raise

    def _settle(self, g: Group) -> None:
        """Note that a group is here, or that it did not come, when none of its jobs runs or will run."""
        if g.running == 0 and (g.left == 0 or g.error is not None):
            g.turn += 1
            g.state = _State.HERE if g.error is None and not self._closed else _State.AWAY
            self._changed.notify_all()

    def _run(self, g: Group, turn: int, job: Job) -> None:
        """Do one job of a group, if it is still wanted. Runs in a reader's thread."""
        with self._changed:
            if turn != g.turn or g.error is not None:
                return
            g.left, g.running = g.left - 1, g.running + 1
        n, error = 0, None
        try:
            if not self._closed and threading.main_thread().is_alive():
                n = job()
        except BaseException as e:
            error = e
        with self._changed:
            self.bytes_read += n
            g.error = g.error or error
            g.running -= 1
            self._settle(g)
            if 0 < g.left + g.running < READERS and g.users:  # who waits for it is done with the one before
                self.prefetch(g.next())


def in_turn(groups: Sequence[Group]) -> None:
    """Tell each group which one follows it, in the order in which graphs ask for them, and which share its place."""
    for g, after in zip(groups, [*groups[1:], *groups[:1]], strict=True):
        g.next = ref(after)
        g.rivals.update(o for o in groups if o is not g and o.start < g.end and g.start < o.end)
