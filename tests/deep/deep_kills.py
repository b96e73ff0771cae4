"""Writers that are killed (SIGKILL) at random moments: the old file or the new is there afterwards, whole.

PYGGML_DEEP (200) says how often each writer is killed. A folder that a writer was making may stay, under a name that
begins with a dot.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.trust.faults import Operation, emptied, operations, tree

from . import COUNT, SEED

WRITERS = (
    "quantize",
    "layout r16",
    "convert",
    "export",
    "save_state",
    "save_seq",
    "batch",
    "finetune",
    "save adapter",
    "save PEFT",
    "imatrix",
    "imatrix .dat",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Operation], Path]:
    parent = tmp_path_factory.mktemp("kills")
    (parent / "in").mkdir()
    (parent / "out").mkdir()
    return operations(parent / "in", parent / "out"), parent / "out"


def in_fork(op: Operation, seconds: float | None) -> tuple[float, bool]:
    """Run the operation in a fork, which is killed after `seconds`. Returns how long it took, and whether it ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            op.run()
            os._exit(0)
        finally:
            os._exit(1)
    start = time.monotonic()
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return time.monotonic() - start, status == 0


@pytest.mark.parametrize("name", WRITERS)
def test_old_or_new(folders: tuple[dict[str, Operation], Path], name: str) -> None:
    op, out = folders[0][name], folders[1]
    rng = np.random.default_rng(SEED)
    emptied(out)
    op.prepare()
    before = tree(out)
    took = max(in_fork(op, None)[0] for _ in range(1))
    after = tree(out)
    counts = Counter[str]()
    while counts["killed"] < COUNT:
        emptied(out)
        op.prepare()
        elapsed, ended = in_fork(op, float(rng.uniform(0, took)))
        if ended:
            took *= 0.95
            continue
        took = max(took * 1.01, elapsed / 2)
        counts["killed"] += 1
        found = tree(out)
        files = {path: data for path, data in found.items() if not path.startswith(".")}
        counts["left something hidden"] += files != found
        if name == "batch":  # lines that are there stay, the last may be half
            assert after["x"].startswith(files.get("x", b""))
            counts["in between"] += bool(files.get("x")) and files != after
        else:
            assert files in (before, after)
        counts["new"] += files == after
        if not counts["killed"] % 20 or name == "batch":
            assert in_fork(op, None)[1] or name in ("export", "save PEFT")  # a new folder that is there is not replaced
            assert {p: d for p, d in tree(out).items() if not p.startswith(".")} == after
    print(f"\n{name}: {', '.join(f'{n} {what}' for what, n in counts.items())}")
