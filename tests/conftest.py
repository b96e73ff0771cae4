"""Fixtures of all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Tests run in several processes: a second thread of BLAS in each of them only waits for a core. NumPy reads it once.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from .tiny_model import tiny, write_model

__all__ = ["tiny", "write_model"]

# CI repeats the same examples every time; runs by hand go on looking for new ones. No deadlines: machines are shared.
settings.register_profile("here", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("here")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in every job that a script starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def shared_dir() -> Path:
    """Where models, goldens and data should be: PYGGML_SHARED, or `shared` beside the repository."""
    return Path(os.environ.get("PYGGML_SHARED", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """`shared_dir()`; tests that need it skip, saying so, where it is missing."""
    folder = shared_dir()
    if not folder.is_dir():
        pytest.skip(f"shared data folder not found: {folder}")
    return folder


@pytest.fixture(scope="session", autouse=True)
def outside_the_checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run everything in an empty folder: `python -m pyggml` started in the checkout would find its bare sources."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("cwd"))
    yield
    os.chdir(before)
