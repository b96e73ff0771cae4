"""Several prompts at once: the texts of one by one, for any number at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyggml.dtypes import DType
from pyggml.errors import BatchError, ModelError, SamplerError
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, load_model

from ...models.memory.test_iswa import windowed
from ...tiny_model import write_gguf

LONG = "the quick brown fox jumps over the lazy dog"
PROMPTS = ["a", LONG, "hello", LONG + " and", "xyz" * 9, "ab", LONG, "q", "what is it?"]


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


@pytest.mark.parametrize("n_parallel", [1, 2, 4, 32])
def test_texts_are_those_of_one_by_one(shared: Path, n_parallel: int) -> None:
    model = load_model(shared / "models" / "stories260K.gguf")
    prompts = [
        "Once upon a time",
        "The dog",
        "Once upon a time, there was a little girl named Lily. She",
        "A",
        "Tom and Sam",
    ]
    expected = ["".join(model.generate(p, 50, temp=0.0)) for p in prompts]
    assert model.generate_batch(prompts, 50, temp=0.0, n_parallel=n_parallel) == expected


@pytest.mark.parametrize("n_parallel", [1, 3, 20])
@pytest.mark.parametrize("n_predict", [1, 17, -1])
def test_tokens_are_those_of_one_by_one(model: Model, n_parallel: int, n_predict: int) -> None:
    """Prompts of all lengths, some alike; those that end the text early (the bias) leave room for the next."""
    bias = {2: 1.5 if n_predict > 0 else 0.5}
    got: list[list[tuple[str, int, str | None]]] = [[] for _ in PROMPTS]
    for i, t in model.stream_batch(PROMPTS, n_predict, temp=0.0, logit_bias=bias, n_parallel=n_parallel, n_threads=1):
        got[i].append((t.text, t.id, t.finish_reason))
    for prompt, tokens in zip(PROMPTS, got, strict=True):
        one = model.stream(prompt, n_predict, temp=0.0, logit_bias=bias, n_threads=1)
        assert tokens == [(t.text, t.id, t.finish_reason) for t in one]
    if n_predict != 1:
        assert {tokens[-1][2] for tokens in got} == {"length", "eog"}


def test_probabilities_are_those_of_one_by_one(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an F32 cache: all that differs is the order of sums."""
    new_context = model.new_context
    f32 = {"type_k": DType.F32, "type_v": DType.F32}
    monkeypatch.setattr(model, "new_context", lambda *a, **k: new_context(*a, **k, **f32), raising=False)
    got: list[list[float]] = [[] for _ in PROMPTS]
    for i, t in model.stream_batch(PROMPTS, 15, temp=0.0, ignore_eos=True, n_parallel=4):
        assert t.logprob is not None
        got[i].append(t.logprob)
    for prompt, logprobs in zip(PROMPTS, got, strict=True):
        one = [t.logprob for t in model.stream(prompt, 15, temp=0.0, ignore_eos=True)]
        np.testing.assert_allclose(logprobs, one, rtol=0, atol=2e-5)


def test_a_seed_is_another_for_each(model: Model) -> None:
    texts = model.generate_batch(["ab", "abc", "ab"], 12, temp=0.9, seed=4, n_parallel=2)
    assert texts == ["".join(model.generate(p, 12, temp=0.9, seed=4 + i)) for i, p in enumerate(("ab", "abc", "ab"))]
    assert texts[0] != texts[2]


def test_stop_strings_and_probabilities(model: Model) -> None:
    text = "".join(model.generate("abc", 30, temp=0.0))
    stop = text[6:9]
    expected = "".join(model.generate("abc", 30, temp=0.0, stop=stop))
    assert expected in text and len(expected) < len(text)
    assert model.generate_batch(["abc", "x"], 30, temp=0.0, stop=stop)[0] == expected
    (_, token), *_ = model.stream_batch(["abc"], 3, 2, temp=0.0)
    assert len(token.top) == 2 and token.logprob == token.top[0][1]


def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of every batch from now on."""
    batches: list[list[int]] = []
    decode = LlamaContext.decode

    def noted(self: LlamaContext, batch: object) -> None:
        batches.append(list(batch.tokens))  # pyright: ignore
        decode(self, batch)  # pyright: ignore

    monkeypatch.setattr(LlamaContext, "decode", noted)
    return batches


def test_common_beginnings_are_evaluated_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(4).integers(3, 259, 60).tolist()
    prompts = [[1, *ids, k, k + 1] for k in range(10, 16)]
    expected = [[t.id for t in model.stream(p, 5, temp=0.0, ignore_eos=True)] for p in prompts]
    batches = evaluated(monkeypatch)
    got: list[list[int]] = [[] for _ in prompts]
    for i, t in model.stream_batch(prompts, 5, temp=0.0, ignore_eos=True, n_parallel=4):
        got[i].append(t.id)
    assert got == expected
    assert sum(map(len, batches)) == 61 + 6 * (2 + 4)
    assert [len(b) for b in batches[:3]] == [63, 1 + 3 * 2, 4]


def test_prompts_longer_than_a_batch(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of texts under way go first; long prompts fill the rest of the batch."""
    monkeypatch.setitem(LlamaContext.__init__.__kwdefaults__, "n_batch", 16)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 259, n).tolist() for n in (3, 40, 20, 1)]
    expected = [[t.id for t in model.stream(p, 6, temp=0.0, ignore_eos=True)] for p in prompts]
    batches = evaluated(monkeypatch)
    got: list[list[int]] = [[] for _ in prompts]
    for i, t in model.stream_batch(prompts, 6, temp=0.0, ignore_eos=True):
        got[i].append(t.id)
    assert got == expected
    assert max(map(len, batches)) == 16 and sum(map(len, batches)) == 64 + 4 * 5


def test_sliding_windows(tmp_path: Path) -> None:
    model = windowed(write_gguf(tmp_path / "four.gguf", {"llama.block_count": 4}), 8, 2)
    expected = ["".join(model.generate(p, 20, temp=0.0)) for p in PROMPTS]
    assert model.generate_batch(PROMPTS, 20, temp=0.0, n_parallel=3) == expected


def test_nothing_to_do_and_what_cannot_be_done(model: Model) -> None:
    assert model.generate_batch([]) == []
    assert model.generate_batch(["a", "b"], 0) == ["", ""]
    with pytest.raises(BatchError, match="n_parallel"):
        model.stream_batch(["a"], n_parallel=0)
    with pytest.raises(BatchError, match="prompt 1 is empty"):
        model.stream_batch(["a", []])
    with pytest.raises(BatchError, match="token 259 is outside the vocabulary"):
        list(model.stream_batch(["a", [259]]))
    with pytest.raises(SamplerError, match="temp"):
        model.stream_batch(["a"], temp=-1.0)
    with pytest.raises(ModelError, match="vocab_only"):
        load_model(model.path, vocab_only=True).stream_batch(["a"])
