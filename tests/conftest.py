"""Fixtures of all tests."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

# Tests run in several processes: a second thread of BLAS in each of them only waits for a core. NumPy reads it once.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from pyggml.opdef import OPS

from .cells import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown
from .tiny_model import tiny, write_model

__all__ = ["pytest_sessionfinish", "pytest_terminal_summary", "pytest_testnodedown", "tiny", "write_model"]

pytest_plugins = ["pyggml.testing.plugin"]
collect_ignore = ["example_op"]  # a package of its own: tests/testing runs its test

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in every job that a script starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Let garbage collection pass over the hundreds of thousands of objects that are the tests themselves, and come
    less often. It took 15 % of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])


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


@pytest.fixture
def example_op(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package in tests/example_op, as if it were installed. Skips when no C compiler is there to build it."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("example_op")))
    package = importlib.import_module("example_op")
    yield package
    del OPS[package.OP.name], sys.modules["example_op"]


@pytest.fixture(scope="session", autouse=True)
def outside_the_checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run everything in an empty folder: `python -m pyggml` started in the checkout would find its bare sources."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("cwd"))
    yield
    os.chdir(before)
