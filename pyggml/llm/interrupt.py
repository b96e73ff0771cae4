"""Protect changes that Ctrl-C must not leave half done."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Generator[None]:
    """A block in which Ctrl-C waits: the KeyboardInterrupt is raised at its end. Nothing needs to be done in threads
    other than the main one, where Python never raises it, or when SIGINT has a handler that is not Python's."""
    old = signal.getsignal(signal.SIGINT)
    if old is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    try:
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
        yield
    finally:
        signal.signal(signal.SIGINT, old)
        if came and callable(old):  # the signal is not sent again: set_wakeup_fd's reader (asyncio) has seen it
            old(signal.SIGINT, sys._getframe())  # pyright: ignore[reportPrivateUsage]
        elif came:
            signal.raise_signal(signal.SIGINT)
