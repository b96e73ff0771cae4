"""`load_model(precision=...)`: the fast form, and what it changes in the logits of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu.isa import isa_name
from pyggml.testing.harness import nmse
from pyggml.types import Floats

from ..backend.products.test_fast import FLOATS, LEVELS
from ..conftest import shared_dir

LLAMAS = shared_dir() / "golden" / "llama"
FAST = pytest.mark.skipif(isa_name() not in LEVELS, reason="no kernels that round columns to bytes")
TILES = pytest.mark.skipif(isa_name() != "amx", reason="no tiles")
IDS = list(range(3, 35))


def logits(path: Path, precision: str, n_ubatch: int = 512, ids: Sequence[int] = IDS, **options: Any) -> Floats:
    """Logits of all tokens of a text."""
    model = gg.load_model(path, precision=precision)
    with model, model.new_context(64, n_ubatch=n_ubatch, n_threads=1, **options) as ctx:
        batch = gg.Batch()
        for i, token in enumerate(ids):
            batch.add(token, i, [0], logits=True)
        ctx.decode(batch)
        return np.array(ctx.logits)


@FAST
@pytest.mark.parametrize(
    "name, most", [("llama2-Q4_0", 0.65), ("llama2-Q8_0", 0.65), ("llama2-Q4_K_M", 0.5), ("llama2-Q6_K", 0.5)]
)
def test_logits(name: str, most: float) -> None:
    """Their error is at most this part of that of llama.cpp's logits (docs/products.md has all types)."""
    theirs, exact = (np.load(LLAMAS / f"logits_{kind}.npz") for kind in ("kvf32", "exact"))
    ids = theirs[f"{name}/tokens"].tolist()
    found = logits(LLAMAS / f"{name}.gguf", "fast", ids=ids, type_k=gg.F32, type_v=gg.F32)
    assert 1e-7 < nmse(found, exact[name]) < most * nmse(theirs[f"{name}/logits"], exact[name])


@pytest.mark.skipif(isa_name() not in FLOATS, reason="no kernels that round floats to 16 bits")
@pytest.mark.parametrize("name, most", [("llama2-F16", 0.55), ("llama2-BF16", 0.01)])
def test_logits_of_floats(name: str, most: float) -> None:
    test_logits(name, most)


@FAST
@pytest.mark.parametrize("name", ["llama2-Q4_K_M", "mixtral-Q4_K_M", "llama2-F16", "llama2-BF16"])
def test_company(name: str) -> None:
    path = LLAMAS / f"{name}.gguf"
    assert np.array_equal(logits(path, "fast"), logits(path, "fast", 5))


@TILES
@pytest.mark.parametrize("name", ["llama2-Q4_0", "llama2-Q4_K_M"])
def test_tiles_round_many_columns(name: str) -> None:
    path, ids = LLAMAS / f"{name}.gguf", list(range(3, 60))
    exact = logits(path, "exact", ids=ids)
    assert 1e-7 < nmse(logits(path, "fast", ids=ids), exact) < 1e-3
    assert np.array_equal(logits(path, "fast", 30, ids), exact)
    assert np.array_equal(logits(path, "exact", 5, ids), exact)


@pytest.mark.skipif(not LLAMAS.exists(), reason="no golden data")
def test_weights_in_f32_do_not_change() -> None:
    path = LLAMAS / "llama2-F32.gguf"
    assert np.array_equal(logits(path, "fast"), logits(path, "exact"))


def test_unknown_precisions_are_refused(tiny: Path) -> None:
    with pytest.raises(gg.ModelError, match="precision is one of exact, fast, not 'quick'"):
        gg.load_model(tiny, precision="quick")
