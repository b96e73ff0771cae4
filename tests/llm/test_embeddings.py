"""Embeddings of tokens, of texts, and of layers; their norms; scores of a reranker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyggml.dtypes import DType
from pyggml.errors import BatchError, ModelError
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.embed import normalized
from pyggml.llm.model import Model, load_model
from pyggml.types import Floats

TEXTS = ["Once upon a time", "there was a cat who went into the wood", "It", "and saw a king."]


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(repack=False)


def _nmse(got: Floats, want: Floats) -> float:
    return float(((got.astype(np.float64) - want) ** 2).sum() / (want.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("n_ubatch", [64, 7])
def test_golden(shared: Path, n_ubatch: int) -> None:
    """Two sequences of 24 and 10 tokens in one batch; what is pooled are llama.cpp's embeddings of the tokens (its own
    mean and cls of the first sequence are over its last ubatch alone)."""
    with np.load(shared / "golden" / "adapters" / "results.npz") as z:
        ids, tokens = z["tokens"], z["embd none"]
    batch = Batch()
    for seq, n in enumerate((24, 10)):
        for pos, token in enumerate(ids[:n]):
            batch.add(int(token), pos, seq, logits=True)
    model = load_model(shared / "golden" / "llama" / "llama2-F32.gguf", repack=False)

    def context(pooling: str) -> LlamaContext:
        ctx = model.new_context(
            64, n_ubatch=n_ubatch, n_seq_max=2, type_k=DType.F32, type_v=DType.F32, embeddings=True, pooling=pooling
        )
        ctx.decode(batch)
        return ctx

    assert _nmse(context("none").embeddings, tokens) <= 1e-9
    sequences = tokens[:24], tokens[24:]
    pooled = {"mean": [s.mean(0) for s in sequences], "cls": [s[0] for s in sequences]}
    for pooling, want in (pooled | {"last": [s[-1] for s in sequences]}).items():
        ctx = context(pooling)
        assert _nmse(ctx.embeddings, np.stack(want)) <= 1e-9
        assert _nmse(ctx.embeddings_seq(1), want[1]) <= 1e-9


def test_texts_together_and_alone(model: Model) -> None:
    together = model.embed(TEXTS)
    assert together.shape == (len(TEXTS), model.hparams.n_embd)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, rtol=1e-6)
    for n_ubatch in (1, 16):
        np.testing.assert_allclose(model.embed(TEXTS, n_ubatch=n_ubatch), together, atol=2e-3)
    ids = [model.tokenize(text) for text in TEXTS]
    np.testing.assert_array_equal(model.embed(ids), together)
    assert model.embed([]).shape == (0, model.hparams.n_embd)


def test_layers(model: Model) -> None:
    """The last norm of what the last layer gives is what there is without `layer`."""
    ids = model.tokenize(TEXTS[1])
    n_layer = model.hparams.n_layer

    def hidden(layer: int) -> Floats:
        ctx = model.new_context(64, embeddings=True, layer=layer)
        ctx.decode(ids[:5])
        ctx.decode(ids[5:])
        return ctx.embeddings

    embd = model.tensors["token_embd.weight"].numpy()
    np.testing.assert_array_equal(hidden(0), embd[ids[5:]])
    np.testing.assert_array_equal(hidden(-2), hidden(n_layer - 1))
    assert _nmse(hidden(-1), hidden(n_layer)) == 0.0
    assert _nmse(hidden(-2), hidden(-1)) > 0.1
    with pytest.raises(ModelError, match=f"the model has layers 0 to {n_layer}"):
        hidden(n_layer + 1)


def test_no_logits(model: Model) -> None:
    ctx = model.new_context(64, embeddings=True, pooling="last")
    ctx.decode([5, 6, 7])
    assert ctx.embeddings.shape == (1, model.hparams.n_embd) and ctx.pooling == "last"
    with pytest.raises(BatchError, match="asked for those of none"):
        ctx.logits_ith(-1)
    with pytest.raises(BatchError, match="no pooled embeddings of sequence 1"):
        ctx.embeddings_seq(1)


def test_state_of_a_context_of_embeddings(model: Model, tmp_path: Path) -> None:
    first, second = (model.new_context(64, embeddings=True) for _ in range(2))
    first.decode([5, 6, 7])
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    for ctx in (first, second):
        ctx.decode([8])
    np.testing.assert_array_equal(first.embeddings, second.embeddings)


def test_arguments(model: Model) -> None:
    with pytest.raises(ModelError, match="known are none, mean, cls, last, rank"):
        model.new_context(64, embeddings=True, pooling="max")
    with pytest.raises(ModelError, match="of a context with embeddings=True"):
        model.new_context(64, pooling="mean")
    with pytest.raises(ModelError, match="makes no vector of a text"):
        model.embed(TEXTS, "none")
    with pytest.raises(ModelError, match="texts must be a list of texts, not str"):
        model.embed("one")
    with pytest.raises(BatchError, match="text 1 has 0 tokens"):
        model.embed([[1], []])
    with pytest.raises(ModelError, match="it is no reranker"):
        model.rerank("who?", TEXTS)


def test_norms() -> None:
    rows = np.array([[3.0, -4.0], [0.0, 0.0], [1e30, 0.0]], np.float32)
    np.testing.assert_allclose(normalized(rows), [[0.6, -0.8], [0, 0], [1, 0]], rtol=1e-6)
    np.testing.assert_array_equal(normalized(rows, False), rows)
    np.testing.assert_allclose(normalized(rows, 1)[0], [3 / 7, -4 / 7], rtol=1e-6)
    np.testing.assert_allclose(normalized(rows, 0)[0], [24570, -32760], rtol=1e-6)
    np.testing.assert_allclose(normalized(rows, 3)[0], np.array([3, -4]) / 91 ** (1 / 3), rtol=1e-6)
    with pytest.raises(ModelError, match="normalize = -2"):
        normalized(rows, -2)


def test_what_texts_begin_with_is_evaluated_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = LlamaContext.decode

    def counted(self: LlamaContext, batch: Batch) -> None:
        sizes.append(batch.n_tokens)
        decode(self, batch)

    texts = [f"Instruct: find a place. Query: {t}" for t in ("a", "bc", "def", "g")]
    alone = np.concatenate([model.embed([t], "last", n_threads=1) for t in texts])
    with monkeypatch.context() as m:
        m.setattr(LlamaContext, "decode", counted)
        together = model.embed(texts, "last", n_threads=1)
        assert sum(sizes) < 1.5 * len(model.tokenize(texts[2])) and len(sizes) == 2
        sizes.clear()
        model.embed(texts, "mean", n_threads=1)  # the mean is of all tokens
        model.embed(["ab", "ac"], "last", n_threads=1)  # not worth it
        assert len(sizes) == 2
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)
    same = model.embed([texts[0]] * 3, "last", n_threads=1)
    np.testing.assert_allclose(same, alone[[0, 0, 0]], rtol=1e-5, atol=1e-6)
