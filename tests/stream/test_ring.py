"""Groups whose reading fails: whoever waits for one is told, and it is read the next time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from pyggml.stream.ring import Group, Ring, in_turn


class Readers(ThreadPoolExecutor):
    """One thread that takes `n_jobs` jobs, and no more. As in Python's own, the job that no thread could be started for
    may stay in the queue: `late`."""

    def __init__(self, n_jobs: int, late: bool = False) -> None:
        super().__init__(1)
        self.n_jobs, self.late = n_jobs, late

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.n_jobs == 0:
            if self.late:
                super().submit(fn, *args, **kwargs)
            raise RuntimeError("can't start new thread")
        self.n_jobs -= 1
        return super().submit(fn, *args, **kwargs)

    def wait(self) -> None:
        super().submit(int).result()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("n_jobs", range(3))
def test_jobs_that_no_reader_takes(n_jobs: int, late: bool) -> None:
    readers = Readers(n_jobs, late)
    group = Group(Ring(readers), "w", 0, 8, [lambda: 1] * 3)
    with readers:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            group.acquire()
        readers.wait()
        readers.n_jobs = 3
        group.acquire()
        group.release()
        assert not readers.n_jobs and not group.left and not group.running


def test_what_failed_ahead_of_time_is_read_again() -> None:
    fails = [True]

    def job() -> int:
        if fails.pop():
            raise OSError("once")
        return 8

    readers = Readers(99)
    ring = Ring(readers)
    first, second = Group(ring, "a", 0, 8, [lambda: 8]), Group(ring, "b", 8, 16, [job])
    in_turn([first, second])
    with readers:
        first.acquire()  # and `second` is read ahead
        first.release()
        readers.wait()
        fails.append(False)
        second.acquire()
        second.release()
    assert not fails and ring.bytes_read == 16


def test_jobs_that_begin_too_late_do_nothing() -> None:
    """Another group may be in the place by then."""
    queue: list[Callable[[], object]] = []

    class Later(Readers):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            queue.append(lambda: fn(*args))
            return Future()

    done: list[str] = []

    def fails() -> int:
        raise OSError("damaged")

    def late() -> int:
        done.append("late")
        return 8

    ring = Ring(Later(0))
    group = Group(ring, "a", 0, 8, [fails, late])
    ring.prefetch(group)
    queue.pop(0)()
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(group.acquire)  # tries again, and waits
        while len(queue) < 3:
            pass
        queue.pop(0)()
        assert not done and not waiting.done()
        queue.pop(1)()
        queue.pop(0)()
        with pytest.raises(OSError, match="damaged"):
            waiting.result()
