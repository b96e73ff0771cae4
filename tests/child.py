"""Code that runs in a forked child: what it does to signals, threads and the pool ends with it."""

from __future__ import annotations

import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable

import pytest


def in_child(work: Callable[[], None], seconds: float = 300) -> None:
    """Run `work` in a fork of this process; its failure, or more than `seconds`, is an AssertionError here.

    Skipped under ASAN, which does not hand its own locks over to a child: a fork while another thread is being made or
    ended leaves them held for ever.
    """
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("forks of a process with threads, under ASAN")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a process with threads is forked: that is the point
        pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    end = time.monotonic() + seconds
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.005)
    if done[0] == 0:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise AssertionError(f"the child did not end within {seconds} s")
    assert os.waitstatus_to_exitcode(done[1]) == 0, "the child failed, see its traceback"
