"""Perplexity against its definition, computed apart."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from pyggml.tools.cli import main

from pyggml.errors import BatchError, ModelError
from pyggml.llm.evaluate import chunks as module
from pyggml.llm.evaluate.perplexity import Perplexity, perplexity
from pyggml.llm.model import Model, load_model

from ...plain_llama import Plain


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


@pytest.fixture
def stories(shared: Path) -> Model:
    return load_model(shared / "models" / "stories260K.gguf")


@pytest.fixture
def tales(shared: Path) -> str:
    return (shared / "data" / "tales.txt").read_text(encoding="utf-8")[5000:7000]


def one_by_one(model: Model, tokens: list[int]) -> np.ndarray:
    """log p(tokens[i + 1] | tokens[: i + 1]) for every i, from single steps."""
    ctx, out = model.new_context(len(tokens)), []
    for token, following in pairwise(tokens):
        ctx.decode([token])
        x = ctx.logits[-1].astype(np.float64)
        p = np.exp(x) / np.exp(x).sum()
        out.append(np.log(p[following]))
    return np.array(out)


def check(result: Perplexity, logprobs: list[float], tolerance: float) -> None:
    """ppl is exp of the mean; the error bar that of a mean (with n - 1), through the derivative of exp."""
    x = np.array(logprobs)
    ppl = np.exp(-x.mean())
    assert result.n_scored == len(x)
    assert result.nll == pytest.approx(-x.mean(), rel=tolerance)
    assert result.ppl == pytest.approx(ppl, rel=tolerance)
    assert result.error == pytest.approx(ppl * x.std() / np.sqrt(len(x) - 1), rel=10 * tolerance)


@pytest.mark.parametrize("n_ctx", [64, 65])
def test_second_half_of_each_chunk(stories: Model, tales: str, n_ctx: int) -> None:
    ids = stories.tokenize(tales)
    assert ids[0] == stories.vocab.bos and len(ids) > 6 * n_ctx
    logprobs: list[float] = []
    for i, result in enumerate(perplexity(stories, tales, n_ctx, n_chunks=5)):
        chunk = ids[i * n_ctx : (i + 1) * n_ctx]
        # the tokens at n_ctx // 2 + 1 and after, each given all before it in the chunk
        logprobs += one_by_one(stories, [1, *chunk[1:]])[n_ctx // 2 :].tolist()
        assert (result.n_done, result.n_chunks) == (i + 1, 5)
        check(result, logprobs, 1e-4)
    assert len(logprobs) == 5 * (n_ctx - 1 - n_ctx // 2)


def test_against_a_model_in_numpy(model: Model) -> None:
    """A float64 forward pass; the cache stores F16."""
    ids = np.random.default_rng(2).integers(3, 259, 100)
    plain, logprobs = Plain(model), list[float]()
    for i in range(4):
        chunk = ids[i * 24 : (i + 1) * 24]
        x = plain.logits(np.array([1, *chunk[1:]]), np.arange(24))
        x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
        logprobs += [x[j, chunk[j + 1]] for j in range(12, 23)]
    *_, result = perplexity(model, ids.tolist(), 24)
    assert result.n_chunks == 4
    check(result, logprobs, 1e-4)


def test_strided(stories: Model, tales: str) -> None:
    """Chunks of n_ctx + stride / 2 tokens, one every `stride` tokens, the last `stride` of each are predicted; only the
    first one begins with bos, as the text does."""
    ids = stories.tokenize(tales)[:200]
    logprobs: list[float] = []
    for start in range(0, 200 - 72, 16):
        logprobs += one_by_one(stories, ids[start : start + 72])[-16:].tolist()
    *_, result = perplexity(stories, ids, 64, stride=16)
    assert result.n_done == result.n_chunks == 8
    check(result, logprobs, 1e-4)


def test_long_chunks_and_blocks(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(3).integers(3, 259, 130).tolist()
    *_, expected = perplexity(model, ids, 64)
    monkeypatch.setattr(module, "_N_BATCH", 20)  # the second half begins within a batch
    monkeypatch.setattr(module, "_BLOCK", 259 * 3)
    *_, result = perplexity(model, ids, 64)
    assert result.nll == pytest.approx(expected.nll, rel=1e-5) and result.n_scored == expected.n_scored


def test_bad_texts(model: Model, write_model: object) -> None:
    for kwargs, text in (
        ({"n_ctx": 64}, "need a text of 128; it has 100"),
        ({"n_ctx": 50, "stride": 50}, "make no sense"),
        ({"n_ctx": 2}, "make no sense"),
        ({"n_ctx": 16, "n_chunks": 0}, "make no sense"),
        ({"n_ctx": 0}, "need a text of 256"),
    ):
        with pytest.raises(BatchError, match=text):
            perplexity(model, [5] * 100, **kwargs)
    with pytest.raises(BatchError, match="token 259 is outside"):
        list(perplexity(model, [259] * 100, 16))


def test_model_that_ends_texts(tiny: Path) -> None:
    model = load_model(tiny, kv_overrides={"tokenizer.ggml.add_eos_token": True})
    with pytest.raises(ModelError, match="eos"):
        perplexity(model, "a" * 100, 16)


def test_command(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night. " * 8)
    model = load_model(tiny)
    *_, expected = perplexity(model, text.read_text(), 32)
    n = len(model.tokenize(text.read_text())) // 32
    args = ["perplexity", "-m", str(tiny), "-f", str(text), "-c", "32"]
    for more in (["--json"], []):
        with pytest.raises(SystemExit) as e:
            main([*args, *more])
        assert e.value.code == 0
        out = capfd.readouterr().out
        if more:
            result = json.loads(out)
            assert result["ppl"] == pytest.approx(expected.ppl, rel=1e-6)
            assert result["error"] == pytest.approx(expected.error, rel=1e-6)
            assert (result["n_ctx"], result["n_chunks"], result["n_scored"]) == (32, n, n * 15)
        else:
            assert out == f"Final estimate: PPL = {expected.ppl:.4f} +/- {expected.error:.5f}\n"
    with pytest.raises(SystemExit) as e:
        main([*args, "--chunks", "2", "--ppl-stride", "40"])
    assert e.value.code == 2 and "more than --ppl-stride" in capfd.readouterr().err
