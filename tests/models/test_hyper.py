"""Residual streams, attention residuals and n-grams against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pyggml.models import get_architecture
from pyggml.models.blocks import Build
from pyggml.models.hyper import Put, put_back, sinkhorn, weighted_streams
from pyggml.models.kimi_k3 import mixed, situ
from pyggml.models.metadata import Reader
from pyggml.models.qwen4exp import NGrams, ngram_rows
from pyggml.models.weights import Weights

import pyggml as gg
from pyggml.errors import ModelError

Floats = npt.NDArray[np.floating[Any]]
N_EMBD, N_STREAM, N_TOKENS = 12, 4, 3
KIMI = {
    "vocab_size": 16,
    "embedding_length": N_EMBD,
    "block_count": 4,
    "feed_forward_length": 8,
    "context_length": 32,
    "attention.head_count": 1,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.key_length": 24,
    "attention.kv_lora_rank": 16,
    "attention.key_length_mla": 12,
    "attention.value_length_mla": 8,
    "rope.dimension_count": 8,
    "ssm.conv_kernel": 4,
    "kda.head_dim": 8,
    "attn_res.block_size": 2,
    "activation.situ_beta": 4.0,
    "activation.situ_linear_beta": 25.0,
}


def random(*shape: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(t: gg.Tensor) -> Floats:
    graph = gg.Graph()
    graph.build_forward_expand(t.set_output())
    gg.compute(graph)
    return np.array(t.numpy(), np.float64)


def test_streams() -> None:
    x, cur = random(N_TOKENS, N_STREAM, N_EMBD), random(N_TOKENS, N_EMBD, seed=2)
    w, comb = random(N_TOKENS, N_STREAM, seed=3), random(N_TOKENS, N_STREAM, N_STREAM, seed=4)  # [token, from, to]
    with gg.Context() as ctx:
        tx, tcur, tw, tcomb = (ctx.from_numpy(a) for a in (x, cur, w, comb))
        np.testing.assert_allclose(run(weighted_streams(tx, tw)), np.einsum("tne,tn->te", x, w), atol=1e-5)
        add = np.einsum("te,tn->tne", cur, w)
        np.testing.assert_allclose(run(put_back(tcur, tx, Put(tw))), x + add, atol=1e-5)
        want = np.einsum("tne,tnm->tme", x, comb) + add
        np.testing.assert_allclose(run(put_back(tcur, tx, Put(tw, tcomb))), want, atol=1e-5)


@pytest.mark.parametrize("n_iter", [1, 2, 20])
def test_sinkhorn(n_iter: int) -> None:
    eps = 1e-3
    x = random(N_TOKENS, N_STREAM, N_STREAM)
    e = np.exp(x.astype(np.float64))
    want = e / e.sum(-1, keepdims=True) + eps
    for i in range(n_iter):
        want = want / (want.sum(-1, keepdims=True) + eps) if i else want
        want = want / (want.sum(-2, keepdims=True) + eps)
    with gg.Context() as ctx:
        np.testing.assert_allclose(run(sinkhorn(ctx.from_numpy(x), n_iter, eps)), want, rtol=1e-5)


def test_residuals_of_layers_before() -> None:
    """The golden model has layers for one of them only."""
    hp = get_architecture("kimi-k3").hparams("kimi-k3", {f"kimi-k3.{k}": v for k, v in KIMI.items()})
    kept, cur, w = random(N_TOKENS, 3, N_EMBD), random(N_TOKENS, N_EMBD, seed=2), random(N_EMBD, seed=3)
    x = np.concatenate([kept, cur[:, None]], 1).astype(np.float64)
    scores = (x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)) @ w
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("tne,tn->te", x, probs / probs.sum(-1, keepdims=True))
    memory = get_architecture("kimi-k3").new_memory(hp, 32)
    with gg.Context() as ctx:
        weights = Weights({"blk.3.attn_res_score.weight": ctx.from_numpy(w, name="blk.3.attn_res_score.weight")})
        b = Build(hp, weights, memory, N_TOKENS, 1, (32,))
        got = run(mixed(b, ctx.from_numpy(kept), ctx.from_numpy(cur), "attn_res_score", 3))
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("linear_beta", [0.0, 25.0])
@pytest.mark.parametrize("halves", [False, True])
def test_situ(linear_beta: float, halves: bool) -> None:
    gate, up = 8 * random(N_TOKENS, N_EMBD), 40 * random(N_TOKENS, N_EMBD, seed=2)
    want = (
        4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * (linear_beta * np.tanh(up / linear_beta) if linear_beta else up)
    )
    with gg.Context() as ctx:
        both = (ctx.from_numpy(np.concatenate([gate, up], 1)), None) if halves else map(ctx.from_numpy, (gate, up))
        np.testing.assert_allclose(run(situ(*both, 4.0, linear_beta)).squeeze(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("hyper_connection.count", 0, "is 0, not from 1 to 64"),
        ("hyper_connection.sinkhorn_iterations", 1 << 20, "not from 1 to 100"),
        ("rope.dimension_count", 8, "supported is 0"),
        ("attention.indexer.kpool_select_tail", False, "supported is True"),
        ("attention.indexer.top_k", 3, "chooses 3 tokens: less than one block of 4"),
    ],
)
def test_files_that_lie(key: str, value: object, text: str) -> None:
    own = {"hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 2, "hyper_connection.epsilon": 1e-6}
    more = {"rope.dimension_count": 0, "attention.q_lora_rank": 8, "attention.indexer.kpool": 4}
    indexer = {f"attention.indexer.{k}": 8 for k in ("head_count", "key_length", "top_k")}
    kv = {f"glm5-next.{k}": v for k, v in {**KIMI, **own, **more, **indexer}.items()}
    get_architecture("glm5-next").read(Reader("glm5-next", kv))
    with pytest.raises(ModelError, match=text):
        get_architecture("glm5-next").read(Reader("glm5-next", {**kv, f"glm5-next.{key}": value}))


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("activation.situ_beta", 0.0, r"is 0\.0, not positive"),
        ("attention.key_length_mla", 8, "is 8, less than 9"),
        ("attention.value_length_mla", 0, "is 0, less than 1"),
        ("ssm.conv_kernel", 1, "is 1, less than 2"),
        ("kda.head_dim", 0, "is 0, less than 1"),
        ("block_count", 2**31 - 1, "is 2147483647: more than the 512 layers"),
    ],
)
def test_kimi_files_that_lie(key: str, value: object, text: str) -> None:
    kv = {f"kimi-k3.{k}": v for k, v in {**KIMI, key: value}.items()}
    with pytest.raises(ModelError, match=f"{key} {text}"):
        get_architecture("kimi-k3").hparams("kimi-k3", kv)


def row_numbers(g: NGrams, text: list[int]) -> list[list[int]]:
    """The rows that each token chooses, in whole numbers of Python."""
    out: list[list[int]] = []
    for at in range(len(text)):
        known = [text[at]]
        for token in reversed(text[max(0, at - g.size + 1) : at]):
            if token == g.end:
                break
            known.append(token)
        known += [g.end] * (g.size - len(known))
        rows: list[int] = []
        for n in range(2, g.size + 1):
            number = 0
            for token, multiplier in zip(known[:n], g.multipliers, strict=False):
                number ^= token * multiplier % 2**64
            of = slice((n - 2) * g.each, (n - 1) * g.each)
            rows += [number % rows + first for rows, first in zip(g.rows[of], g.first[of], strict=True)]
        out.append(rows)
    return out


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ngrams(size: int) -> None:
    """Texts with ends in them, whole and in two parts."""
    n = 2 * (size - 1)
    g = NGrams(size, 2, (2**63 + 7, 2**40 + 1, 12345, 99)[:size], tuple(range(0, 100 * n, 100)), (97,) * n, 5, 5)
    texts = np.random.default_rng(size).integers(0, 9, (3, 40)).astype(np.int32)
    want = np.array([row_numbers(g, text.tolist()) for text in texts])
    none = np.full((3, size - 1), -1, np.int32)
    np.testing.assert_array_equal(ngram_rows(g, none, texts), want)
    known = np.concatenate([none, texts[:, :17]], axis=1)[:, 1 - size :]
    np.testing.assert_array_equal(ngram_rows(g, known, texts[:, 17:]), want[:, 17:])
