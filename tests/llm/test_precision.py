"""`load_model(precision=...)`: the fast form, and what it changes in the logits of a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu.isa import isa_name
from pyggml.testing.harness import nmse
from pyggml.types import Floats

from ..conftest import shared_dir

LLAMAS = shared_dir() / "golden" / "llama"
FAST = pytest.mark.skipif(
    isa_name() not in ("avx2", "avx512vnni", "dotprod", "i8mm"), reason="no kernels for the fast form"
)
IDS = list(range(3, 35))


def logits(path: Path, precision: str, n_ubatch: int = 512) -> Floats:
    """Logits of all tokens of a text."""
    model = gg.load_model(path, precision=precision)
    with model, model.new_context(64, n_ubatch=n_ubatch, n_threads=1) as ctx:
        batch = gg.Batch()
        for i, token in enumerate(IDS):
            batch.add(token, i, [0], logits=True)
        ctx.decode(batch)
        return np.array(ctx.logits)


@FAST
@pytest.mark.parametrize("name, theirs, part", [("llama2-Q4_0", 1.1e-3, 0.6), ("llama2-Q4_K_M", 2.7e-3, 0.5)])
def test_logits(name: str, theirs: float, part: float) -> None:
    """Their NMSE is a part of that of llama.cpp's logits."""
    path = LLAMAS / f"{name}.gguf"
    assert 1e-7 < nmse(logits(path, "fast"), logits(path, "exact")) < part * theirs


@FAST
@pytest.mark.parametrize("name", ["llama2-Q4_K_M", "mixtral-Q4_K_M"])
def test_company(name: str) -> None:
    path = LLAMAS / f"{name}.gguf"
    assert np.array_equal(logits(path, "fast"), logits(path, "fast", 5))


@FAST
def test_weights_that_are_not_quantised_do_not_change() -> None:
    path = LLAMAS / "llama2-F16.gguf"
    assert np.array_equal(logits(path, "fast"), logits(path, "exact"))


def test_unknown_precisions_are_refused(tiny: Path) -> None:
    with pytest.raises(gg.ModelError, match="precision is one of exact, fast, not 'quick'"):
        gg.load_model(tiny, precision="quick")
