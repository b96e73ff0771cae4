"""K and V stored in less than 8 bits are rotated first: smaller errors, the same attention, shifts and states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyggml.models.memory import kv_cache
from pyggml.models.memory.kv_cache import ROTATED_TYPES

import pyggml as gg
from pyggml.errors import StateError
from pyggml.llm.model import Model, load_model

from ...tiny_model import write_gguf

IDS = [int(t) for t in np.random.default_rng(3).integers(3, 259, 48)]
WIDE = {"llama.embedding_length": 128, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_gguf(tmp_path_factory.mktemp("wide") / "wide.gguf", kv=WIDE))  # heads of 64


def logits(model: Model, dtype: gg.DType, shift: int = 0) -> np.ndarray[Any, Any]:
    ctx = model.new_context(128, type_k=dtype, type_v=dtype, flash_attn=True, n_threads=1)
    ctx.decode(IDS[:40])
    if shift:
        ctx.memory.seq_rm(0, 0, shift)
        ctx.memory.seq_add(0, shift, -1, -shift)
    batch = gg.Batch()
    for i, token in enumerate(IDS[40:], 40 - shift):
        batch.add(token, i, 0, True)
    ctx.decode(batch)
    return np.array(ctx.logits, np.float64)


@pytest.mark.parametrize("shift", [0, 5])
@pytest.mark.parametrize("dtype", ROTATED_TYPES, ids=lambda t: t.name)
def test_near_to_f32(model: Model, dtype: gg.DType, shift: int) -> None:
    exact = logits(model, gg.F32, shift)
    error = ((logits(model, dtype, shift) - exact) ** 2).sum() / (exact**2).sum()
    assert error < (0.02 if "5" in dtype.name else 0.08)


def test_outliers_cost_less(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def error() -> float:
        return float(((logits(model, gg.Q4_0) - exact) ** 2).sum())

    def outliers(x: np.ndarray[Any, Any]) -> None:
        x[..., 3] *= 12.0  # as real models have them

    with model.edit("Vcur-?", outliers):
        exact = logits(model, gg.F32)
        rotated = error()
        monkeypatch.setattr(kv_cache, "ROTATED_TYPES", ())
        assert rotated < 0.6 * error()


def test_the_matrix_is_its_own_inverse(model: Model) -> None:
    (memory,) = model.new_context(32, type_k=gg.Q5_0, type_v=gg.F16, flash_attn=True, n_threads=1).memory.caches
    rotation = memory.rotation_k(0)
    assert rotation is not None
    h = rotation.numpy()
    assert np.allclose(h @ h, np.eye(64), atol=1e-6) and (h == h.T).all()
    assert memory.rotation_v(64) is None
    (memory,) = model.new_context(32, type_k=gg.Q8_0, n_threads=1).memory.caches
    assert memory.rotation_k(0) is None


def test_states_say_that_they_are_rotated(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "state"
    options: Any = {"type_k": gg.Q4_0, "type_v": gg.Q4_0, "flash_attn": True, "n_threads": 1}
    ctx = model.new_context(64, **options)
    ctx.decode(IDS[:20])
    ctx.save_state(file, IDS[:20])
    again = model.new_context(64, **options)
    assert again.load_state(file) == IDS[:20]
    ctx.decode(IDS[20:21])
    again.decode(IDS[20:21])
    assert (ctx.logits == again.logits).all()
    plain = file.read_bytes().replace(b"Q4_0 rotated", b"Q4_0        ")
    file.write_bytes(plain)
    with pytest.raises(StateError):
        model.new_context(64, **options).load_state(file)
