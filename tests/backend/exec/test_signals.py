"""Ctrl-C while threads compute: who is woken, which runs end, whose handler stays, what a forked child inherits."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import backend as cpu_backend
from pyggml.breaker import Breaker
from pyggml.sched import Schedule

from ...child import in_child


@pytest.fixture(autouse=True)
def every_run_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_backend, "_LONG_NS", 0)


def schedule_of(n_nodes: int, n: int = 1000) -> Schedule:
    ctx = gg.Context()
    y = x = ctx.new_tensor(gg.F32, (n,)).set_input()
    for i in range(n_nodes):
        y = gg.add(y, x) if i % 2 else gg.scale(y, 0.5)
    schedule = gg.Scheduler(("cpu",), 1).alloc(gg.Graph().build_forward_expand(y))
    x.set(np.ones(n))
    return schedule


@contextmanager
def running() -> Iterator[list[str]]:
    """Another thread is inside one run of seconds; yields what it raised."""
    schedule, raised = schedule_of(1500, 1 << 22), list[str]()

    def work() -> None:
        try:
            schedule.run()
        except gg.BackendError as e:
            raised.append(str(e))

    thread = threading.Thread(target=work)
    thread.start()
    plan = schedule.programs[0]._plan  # pyright: ignore
    while not plan.busy or not plan.watch:
        time.sleep(0.001)
    time.sleep(0.05)
    try:
        yield raised
    finally:
        schedule.programs[0].abort()  # pyright: ignore[reportAttributeAccessIssue]
        thread.join()


def ctrl_c_soon() -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()


def read_a_pipe() -> None:
    os.read(os.pipe()[0], 1)


def wait_for_an_event() -> None:
    threading.Event().wait()


@pytest.mark.parametrize("wait", [read_a_pipe, wait_for_an_event])
def test_ctrl_c_wakes_a_main_thread_that_waits(wait: Callable[[], None]) -> None:
    def work() -> None:
        with running() as raised:
            ctrl_c_soon()
            start = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                wait()
            assert time.monotonic() - start < 100
        assert raised

    in_child(work)


def test_a_handler_that_was_set_meanwhile_stays() -> None:
    def work() -> None:
        with running():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGINT)
        came: list[int] = []
        with running():
            signal.signal(signal.SIGINT, lambda number, _: came.append(number))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert came == [signal.SIGINT]
        with running():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        schedule_of(2).run()
        with open("/proc/self/status") as status:
            caught = next(line for line in status if line.startswith("SigCgt"))
        assert not int(caught.split()[1], 16) >> (signal.SIGINT - 1) & 1

    in_child(work)


def test_one_ctrl_c_ends_the_runs_under_way_and_no_later_one() -> None:
    def work() -> None:
        signal.signal(signal.SIGINT, lambda *_: None)
        short = schedule_of(4)
        with running() as first, running() as second:
            short.run()
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(50):  # while the others are still watched
                short.run()
            time.sleep(0.1)
            assert len(first) == len(second) == 1 and "aborted" in first[0]
        with running() as third:
            time.sleep(0.05)
            assert not third

    in_child(work)


def test_a_child_forked_during_a_run_has_its_own_handler() -> None:
    def work() -> None:
        schedule = schedule_of(4)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        for _ in range(20):
            schedule.run()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        schedule.run()
        os.kill(os.getpid(), signal.SIGINT)

    with running():
        for _ in range(3):
            in_child(work)


def test_forks_while_handlers_are_set_and_restored() -> None:
    """Short runs that watch for SIGINT, one after the other: forks fall between any two instructions of them."""
    short, other, stop = schedule_of(1), schedule_of(1), threading.Event()

    def work() -> None:
        while not stop.is_set():
            short.run()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    try:
        for _ in range(60):
            in_child(other.run)
    finally:
        stop.set()
        for t in threads:
            t.join()


def test_a_handler_that_calls_ours_is_not_called_by_it() -> None:
    """faulthandler, set while a run watches, hands signals on to our handler: later runs leave it before ours."""

    def child() -> None:
        with running() as raised:
            faulthandler.register(signal.SIGINT, file=open(os.devnull, "w"), chain=True)  # noqa: SIM115
        for _ in range(3):
            with running() as raised, pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            assert len(raised) == 1

    in_child(child)


def test_a_breaker_takes_the_place_of_ctrl_c() -> None:
    """In its block SIGINT breaks nothing off, and `abort` does: what runs, and what would run later."""
    schedule, breaker, raised, came = schedule_of(1500, 1 << 20), Breaker(), list[Exception](), list[int]()

    def work() -> None:
        with breaker:
            try:
                while True:
                    schedule.run()
            except gg.Aborted as e:
                raised.append(e)
            with pytest.raises(gg.Aborted, match="before it began"):
                schedule.run()
        schedule.run(n_threads=1)

    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    thread = threading.Thread(target=work)
    try:
        thread.start()
        while not schedule.programs[0]._plan.busy:  # pyright: ignore
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        while not came:
            time.sleep(0.001)
        time.sleep(0.05)
        assert raised == []
        breaker.abort()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(raised) == 1 and "aborted" in str(raised[0])
