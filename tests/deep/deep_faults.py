"""Every call of the system fails once, and from there on: PYGGML_DEEP (200) says how many of each kind are tried.

Allocations below 4096 bytes fail in the thread that does the operation alone, and not those of NumPy itself, nor the
buffers in which it converts values: NumPy 2.4 raises SystemError for some, or crashes (`a[ids].max()` with the third
one failing does; see `_learn` in tests/trust/faults.py). With
PYTHONMALLOC=malloc in the environment each object of Python is an allocation, too; then the interpreter's own code
fails in other ways (a worker of an executor ends without a word).
"""

from __future__ import annotations

from pathlib import Path

from tests.trust.preloaded import faulty

from . import COUNT


def test_every_call(tmp_path: Path) -> None:
    done = faulty(tmp_path, COUNT, timeout=7200)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
