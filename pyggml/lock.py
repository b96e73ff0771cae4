"""Locks for objects that one thread at a time may use, which also know when they are lost in a forked child."""

from __future__ import annotations

from _thread import RLock, get_ident
from collections.abc import Callable
from functools import wraps
from threading import local
from typing import Concatenate, NoReturn, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from .errors import BackendError, GraphError
from .system.memory import in_child


class Lock(RLock):  # pyright: ignore[reportGeneralTypeIssues]
    """A lock for `with`. The thread that holds it may take it again; other threads wait (Ctrl-C ends the wait).

    Raises BackendError in a forked child when another thread of the parent held the lock: nobody would ever release it.
    Entering and leaving are the C code of RLock. So Ctrl-C comes before or after them, and never leaves it locked.

    telling    the name of the node whose values taps and edits see just now, in a run of the thread that holds the
               lock; empty at other times
    take_back  takes back what a text has put into the state on trial; None: there is nothing
    """

    telling = ""
    take_back: Callable[[], object] | None = None

    def __init__(self) -> None:
        _locks.add(self)

    def end_trial(self) -> None:
        """Take back what was put into the state on trial. Called before the state is read, changed or saved."""
        if self.take_back is not None:
            with self:
                if self.take_back is not None:  # still
                    self.take_back()


class _Lost(Lock):
    def __enter__(self, *_: object) -> NoReturn:
        raise BackendError("another thread was at work with this when the process was forked: make a new one here")


_locks: WeakSet[Lock] = WeakSet()


def _in_child() -> None:
    for lock in list(_locks):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            lock.__class__ = _Lost


in_child(_in_child)


_acting = local()


def acting_thread() -> int:
    """The number of the thread for which this code runs: the one that `act_for` has named, else the running one."""
    return getattr(_acting, "thread", 0) or get_ident()


def act_for(thread: int) -> None:
    """Say that the running thread, one of a pool, works for `thread`, which waits for it."""
    _acting.thread = thread


class Locked(Protocol):
    """An object with a lock."""

    @property
    def lock(self) -> Lock: ...


_S = TypeVar("_S", bound=Locked)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def locked(f: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """A decorator for methods (or functions of an object with a lock), which hold the lock from beginning to end."""

    @wraps(f)
    def whole(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.lock:
            return f(self, *args, **kwargs)

    return whole


def changing(f: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """As `locked`, for methods that change or save the state that a run works on. Such a method raises GraphError when
    a tap or an edit calls it in the middle of that run."""

    @wraps(f)
    def whole(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.lock:
            if self.lock.telling:
                raise GraphError(
                    f"what a tap or an edit of {self.lock.telling} looks into is not finished: it can be read now, "
                    "not changed, run or saved; use another context for that"
                )
            self.lock.end_trial()
            return f(self, *args, **kwargs)

    return whole
