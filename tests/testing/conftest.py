"""A C compiler for tests that need one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

import pyggml as gg


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of planted.c. Skips when no compiler is there."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    lib = tmp_path_factory.mktemp("planted") / "planted.so"
    source = Path(__file__).with_name("planted.c")
    command = ["cc", "-O1", "-shared", "-fPIC", f"-I{gg.get_include()}", str(source), "-o", str(lib)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(lib))
