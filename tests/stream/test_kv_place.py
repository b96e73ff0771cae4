"""Caches in a file: what they hold is the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.buffers.buffer import file_memory
from pyggml.errors import AllocError, ModelError
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import load_model

from ..child import in_child
from ..random_model import write_random

ARCHS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"attention.sliding_window": 8, "attention.key_length": 8, "attention.value_length": 8},
    "mamba": {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 8, "ssm.time_step_rank": 4},
}


def in_file(ctx: LlamaContext) -> bool:
    """Whether a file without a name is mapped."""
    with open("/proc/self/maps", encoding="utf-8") as f:
        return any("(deleted)" in line and "rw-s" in line for line in f)


def run(ctx: LlamaContext) -> np.ndarray:
    """Two sequences, one copied and cut, and what is saved and loaded again."""
    rows: list[np.ndarray] = []
    batch = gg.Batch()
    for pos, token in enumerate([5, 9, 60, 12, 7, 33, 8, 41, 3, 17, 2, 50]):
        batch.add(token, pos, [0], True)
    ctx.decode(batch)
    rows.append(ctx.logits.copy())
    ctx.memory.seq_cp(0, 1)
    for pos in range(12, 20):
        batch = gg.Batch()
        batch.add(4, pos, [0], True)
        batch.add(6, pos, [1], True)
        ctx.decode(batch)
        rows.append(ctx.logits.copy())
    return np.concatenate(rows)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_same_results(tmp_path: Path, arch: str) -> None:
    model = load_model(write_random(tmp_path / "m.gguf", arch, ARCHS[arch]))
    want = model.new_context(n_ctx=64, n_seq_max=2, n_threads=1, kv_ram="1GiB")
    expected = run(want)
    ctx = model.new_context(n_ctx=64, n_seq_max=2, n_threads=1, kv_ram=1)
    assert np.array_equal(run(ctx), expected)
    ctx.save_state(tmp_path / "s.bin")
    other = model.new_context(n_ctx=64, n_seq_max=2, n_threads=1, kv_ram=1)
    other.load_state(tmp_path / "s.bin")
    for c in (want, other):
        batch = gg.Batch()
        batch.add(11, 20, [0], True)
        c.decode(batch)
    assert np.array_equal(other.logits, want.logits)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux's /proc")
def test_the_file_goes_with_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    model = load_model()
    ctx = model.new_context(n_ctx=64)
    assert not in_file(ctx)
    ctx = model.new_context(n_ctx=64, kv_ram=ctx.memory.nbytes - 1)
    assert in_file(ctx) and not list(tmp_path.iterdir())
    ctx.close()
    assert not in_file(ctx)


def test_batches() -> None:
    model, texts = load_model(), ["Once upon a time", "The wolf said"]
    want = list(gg.batch(model, texts, 6, temp=0.0, n_threads=1))
    assert list(gg.batch(model, texts, 6, temp=0.0, n_threads=1, kv_ram="1k")) == want


def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = load_model()
    for bad in ("much", 0, -1, 1.5, []):
        with pytest.raises(ModelError, match="kv_ram"):
            model.new_context(n_ctx=64, kv_ram=bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(AllocError, match=r"cannot allocate \d+ bytes of a file in"):
        file_memory(1 << 62)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    with pytest.raises(AllocError, match="none"):
        model.new_context(n_ctx=64, kv_ram=1)


def test_a_forked_child_leaves_the_cache_alone() -> None:
    ctx = load_model().new_context(n_ctx=64, n_threads=1, kv_ram=1)
    ctx.decode([5, 9])

    def work() -> None:
        with pytest.raises(ModelError, match="closed"):
            ctx.decode([3])

    in_child(work)
    ctx.decode([3])
