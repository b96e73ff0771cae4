"""Threads of Python, for C code that runs without the GIL and does not use the library's own pool."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pyggml.errors import BackendError


class ThreadPool(ThreadPoolExecutor):
    """A ThreadPoolExecutor whose `submit` and `map` raise BackendError when the system has no thread for it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as e:
            if "new thread" not in str(e):  # the pool was shut down
                raise
            raise BackendError(f"cannot start a thread: {e}") from None
