"""A checkout that has moved on since its C library was built says so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import pyggml as gg
from pyggml.native.stale import CHECKOUT, check_build

SOURCES = CHECKOUT / "csrc"


def test_installed(tmp_path: Path) -> None:
    check_build(tmp_path)  # no sources beside the package


@pytest.mark.skipif(not SOURCES.is_dir(), reason="not a checkout")
def test_checkout(tmp_path: Path) -> None:
    check_build()
    shutil.copytree(SOURCES, tmp_path / "csrc")
    header = tmp_path / "csrc" / "pg.h"
    later = Path(gg.get_include(), "..").stat().st_mtime + 1e6
    os.utime(header, (later, later))
    check_build(tmp_path)  # touched, not changed
    header.write_text(header.read_text() + "\n")
    os.utime(header, (later, later))
    with pytest.raises(gg.BackendError, match="rebuild it with `pip install"):
        check_build(tmp_path)
