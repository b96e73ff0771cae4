"""Files that are no files: a FIFO would be waited for, for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import pyggml as gg
from pyggml.errors import GGUFError, MediaError
from pyggml.llama_cpp.llama_cache import LlamaDiskCache
from pyggml.media.picture import open_picture

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")


def test_a_fifo_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match=r"m\.gguf: is no regular file"):
        gg.load_model(tmp_path / "m.gguf")


def test_a_fifo_is_no_picture(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(MediaError, match="is no regular file"):
        open_picture(tmp_path / "a.png")


def test_a_fifo_is_no_kept_state(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.state")
    assert not LlamaDiskCache(str(tmp_path)).cache_size
    with pytest.raises(KeyError):
        LlamaDiskCache(str(tmp_path))[[1, 2]]
