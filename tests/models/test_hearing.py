"""Towers that hear: features and logits against the transformers library's (float64), and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml.dtypes import DType
from pyggml.errors import BatchError, MediaError, ModelError, ShapeError
from pyggml.llm.batch import Batch
from pyggml.llm.media_prompt import MediaPrompt
from pyggml.llm.model import Model, load_model

from ..conftest import shared_dir
from ..random_whisper import write_whisper

MM = shared_dir() / "golden" / "mm"
pytestmark = pytest.mark.skipif(not MM.is_dir(), reason=f"no golden data in {MM}")
Array = np.ndarray[Any, np.dtype[Any]]


def nmse(a: Array, b: Array) -> float:
    return float(((a - b) ** 2).sum() / (b**2).sum())


@pytest.fixture(scope="module")
def chirp() -> Array:
    with np.load(MM / "sounds" / "chirp.npz") as z:
        assert int(z["rate"]) == 16000
        return z["samples"]


@pytest.fixture(scope="module")
def golden() -> dict[str, Array]:
    with np.load(MM / "mm.npz") as z:
        return {k: z[k] for k in z.files if k.split("/")[0] in ("whisper", "qwen2-audio", "voxtral")}


def load(name: str) -> Model:
    return load_model(MM / name, repack=False)


def test_whisper(golden: dict[str, Array], chirp: Array) -> None:
    model, ids = load("whisper"), golden["whisper/0/ids"].tolist()
    rows = model.encode_audio(chirp, rate=16000)
    assert rows.shape == (1500, 64) and rows.dtype == np.float32
    assert nmse(rows[:200], golden["whisper/0/features"]) < 1e-9
    ctx = model.new_context(1500, n_ubatch=1500, type_k=DType.F32, type_v=DType.F32)
    heard, batch = Batch(), Batch()
    for i, row in enumerate(rows):
        heard.add_embd(row, i)
    for i, token in enumerate(ids[:8]):
        batch.add(token, i, 0, logits=True)
    ctx.encode(heard)
    np.testing.assert_array_equal(ctx.embeddings, rows)
    ctx.decode(batch)
    got = [np.array(ctx.logits)]
    for token in ids[8:]:
        ctx.decode([token])
        got.append(np.array(ctx.logits))
    assert nmse(np.concatenate(got), golden["whisper/0/logits"]) < 1e-9


def test_whisper_writes_down_the_sound_of_a_prompt(golden: dict[str, Array], chirp: Array) -> None:
    model, ids = load("whisper"), golden["whisper/0/ids"].tolist()
    ctx = model.new_context(32, type_k=DType.F32, type_v=DType.F32)  # fewer cells than the sound has rows
    for _ in range(2):  # another sound begins anew
        ctx.decode(MediaPrompt(ids, audio=[chirp]), logits="all")
        assert nmse(np.array(ctx.logits), golden["whisper/0/logits"]) < 1e-9
    for prompt in (MediaPrompt(ids), MediaPrompt(ids, audio=[chirp, chirp]), MediaPrompt(ids, images=[b""])):
        with pytest.raises(ModelError, match="writes down one sound"):
            ctx.decode(prompt)


@pytest.mark.parametrize(("name", "n"), [("qwen2-audio", 75), ("voxtral", 375)])
def test_text_models_that_hear(name: str, n: int, golden: dict[str, Array], chirp: Array) -> None:
    model, want = load(name), golden[f"{name}/0/logits"]
    rows = model.encode_audio(chirp)
    assert rows.shape == (n, 64)
    if f"{name}/0/features" in golden:
        assert nmse(rows[:200], golden[f"{name}/0/features"]) < 1e-9
    ctx = model.new_context(512, type_k=DType.F32, type_v=DType.F32)
    ctx.decode(MediaPrompt(golden[f"{name}/0/ids"].tolist(), audio=[chirp]), logits="all")
    assert nmse(np.array(ctx.logits)[-len(want) :], want) < 1e-8


def test_long_sounds(chirp: Array) -> None:
    """Voxtral hears all of it in parts of 30 seconds, the others the first 30 seconds."""
    long = np.concatenate([chirp] * 11)  # 33 seconds
    voxtral = load("voxtral")
    rows = voxtral.encode_audio(long)
    assert rows.shape == (750, 64)
    assert nmse(rows[:375], voxtral.encode_audio(long[:480000])) < 1e-3  # but for the window at the border
    whisper = load("whisper")
    np.testing.assert_array_equal(whisper.encode_audio(long), whisper.encode_audio(long[:480000]))
    assert load("qwen2-audio").encode_audio(long).shape == (750, 64)


def test_a_rate_is_converted(chirp: Array) -> None:
    model = load("whisper")
    twice = np.repeat(chirp, 2)
    assert model.encode_audio(twice, rate=32000).shape == (1500, 64)


def test_bad_input(chirp: Array) -> None:
    qwen, whisper = load("qwen2-audio"), load("whisper")
    for sound, error in ((np.zeros(0), MediaError), ("none.wav", MediaError), (np.zeros(100), ShapeError)):
        with pytest.raises(error):
            qwen.encode_audio(sound)
    with pytest.raises(MediaError, match="NaN"):
        whisper.encode_audio(np.full(9, np.nan))
    with pytest.raises(ModelError, match="no tower that hears"):
        load("llava-siglip").encode_audio(chirp)
    with pytest.raises(BatchError, match="not tokens"):
        whisper.new_context(64).encode([1, 2])
    with pytest.raises(ModelError, match="does not transcribe"):
        qwen.transcribe(chirp)
    with pytest.raises(ModelError, match="no tokenizer"):
        whisper.transcribe(chirp)


def test_the_activation_of_whisper(tmp_path: Path) -> None:
    """A config may name another than gelu, of encoder and decoder."""
    folder = write_whisper(tmp_path / "w")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "activation_function": "relu"}))
    model = load_model(folder, repack=False)
    ctx = model.new_context(64)
    with model.tap("ffn_up-0", "ffn_act-0", "ffn_relu-0") as seen:
        ctx.decode(MediaPrompt([1, 2, 3], audio=[np.zeros(4000, np.float32)]))
    np.testing.assert_array_equal(seen["ffn_act-0"][0], np.maximum(seen["ffn_up-0"][1], 0))
    np.testing.assert_array_equal(seen["ffn_relu-0"][0], np.maximum(seen["ffn_up-0"][0], 0))
