"""Samplers in a chain: the order, the trace, the shortcut in C, what cannot be."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml.errors import SamplerError
from pyggml.llm.model import load_model
from pyggml.llm.samplers import SamplerChain, SamplingOptions, SamplingParams
from pyggml.llm.vocab import Vocab

from .test_samplers import OFF, softmax


@pytest.fixture(scope="module")
def vocab(tiny: Path) -> Vocab:
    return load_model(tiny).vocab


def test_chain_order_and_defaults(vocab: Vocab) -> None:
    def names(**params: object) -> list[str]:
        return [s.name for s in SamplerChain(SamplingParams(**params), vocab).samplers]

    assert names() == ["top_k", "top_p", "min_p", "temperature"]
    assert names(samplers="temperature;min_p;top_k") == ["temperature", "min_p", "top_k"]
    everything = {
        "repeat_penalty": 1.1,
        "dry_multiplier": 0.8,
        "top_n_sigma": 1.0,
        "typ_p": 0.9,
        "xtc_probability": 0.5,
    }
    assert ";".join(names(**everything)) == "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
    assert names(temp=0) == ["greedy"]
    assert names(temp=0, frequency_penalty=1.0, typ_p=0.9) == ["penalties", "typ_p", "greedy"]
    assert names(mirostat=2, temp=0.7) == ["temperature", "mirostat_v2"]
    assert names(adaptive_target=0.5, samplers="adaptive-p;min_p") == ["min_p", "adaptive_p"]
    assert names(adaptive_target=0.5, samplers=()) == ["adaptive_p"] and names(samplers=("adaptive_p",)) == []
    assert names(adaptive_target=0.5, samplers=(), temp=0) == ["greedy"]
    assert names(samplers=("top_k",) * 64) == ["top_k"] * 64
    with pytest.raises(SamplerError, match="65, at most 64"):
        names(samplers=("top_k",) * 65)
    assert names(xtc_probability=1.0, xtc_threshold=0.6, repeat_last_n=0, repeat_penalty=2.0) == names()
    logits = np.random.default_rng(1).standard_normal(259).astype(np.float32) * 3
    first, last = (
        SamplerChain(SamplingParams(samplers=o, temp=3.0, min_p=0.3), vocab).distribution(logits)[0]
        for o in ("temperature;min_p", "min_p;temperature")
    )
    assert len(first) > len(last)


def test_same_seed_same_tokens(vocab: Vocab) -> None:
    rows = np.random.default_rng(1).standard_normal((40, 259)).astype(np.float32)

    def run(seed: int | None, **params: object) -> list[int]:
        chain = SamplerChain(SamplingParams(seed=seed, **params), vocab)
        return [chain.sample(r) for r in rows]

    for params in ({}, {"xtc_probability": 0.5, "xtc_threshold": 0.01}, {"mirostat": 1}, OFF):
        assert run(1, **params) == run(1, **params) != run(2, **params)
    assert run(None) != run(None) and run(-1) != run(-1)
    assert run(1, temp=0) == run(2, temp=0) == rows.argmax(axis=1).tolist()


def test_trace(vocab: Vocab) -> None:
    logits = np.random.default_rng(1).standard_normal(259).astype(np.float32) * 2
    params = SamplingParams(seed=4, top_k=20, top_p=0.8)
    chain, plain = SamplerChain(params, vocab), SamplerChain(params, vocab)
    chain.traces = []
    tokens = [chain.sample(logits) for _ in range(5)]
    assert tokens == [plain.sample(logits) for _ in range(5)] == [t.token for t in chain.traces]
    step, p = chain.traces[0], softmax(logits)
    assert [s.sampler.partition("(")[0] for s in step.samplers] == ["logits", "top_k", "top_p", "min_p", "temperature"]
    assert (step.samplers[0].n_after, step.samplers[1].n_before, step.samplers[1].n_after) == (259, 259, 20)
    assert step.samplers[0].p == pytest.approx(p[step.token], rel=1e-5)
    assert step.samplers[1].p == pytest.approx(p[step.token] / np.sort(p)[-20:].sum(), rel=1e-5)
    assert step.samplers[0].best == int(p.argmax())


@given(
    st.sampled_from((1, 2, 40, 41, 259, 512, 5000)),
    st.integers(0, 10**6),
    st.sampled_from((None, 0, 1)),
    st.sampled_from((None, -np.inf, np.inf, np.nan)),
    st.fixed_dictionaries(
        {},
        optional={
            "top_k": st.integers(1, 60) | st.just(5000),
            "top_p": st.floats(0, 1),
            "min_p": st.floats(0, 1),
            "temp": st.floats(0.01, 20),
            "repeat_penalty": st.just(1.3),
            "logit_bias": st.just({0: -math.inf, 1: 2.0}),
            "xtc_probability": st.just(0.5),
            "samplers": st.permutations(("top_k", "top_p", "min_p", "temperature")),
        },
    ),
)
@settings(max_examples=150, deadline=None)
def test_all_at_once_and_one_by_one(
    vocab: Vocab, n: int, seed: int, decimals: int | None, odd: float | None, params: dict[str, object]
) -> None:
    """A chain that keeps traces goes sampler by sampler: the tokens are the same, also of logits that are equal, NaN or
    infinite."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((8, n)) * 3
    rows = (rows if decimals is None else rows.round(decimals)).astype(np.float32)
    if odd is not None:
        rows[rng.random(rows.shape) < rng.choice([0.002, 0.5])] = odd
    results: list[list[int | str]] = []
    if n < 2:
        params.pop("logit_bias", None)
    for traced in (False, True):
        chain, tokens = SamplerChain(SamplingParams(seed=seed, **params), vocab), list[int | str]()
        chain.traces = [] if traced else None
        for row in rows:
            try:
                with np.errstate(all="ignore"):
                    token = chain.sample(row)
                chain.accept(token)
                tokens.append(token)
            except SamplerError:
                tokens.append("none")
        results.append(tokens)
    assert results[0] == results[1]


@pytest.mark.parametrize("params", [{"temp": 0}, {}, OFF, {"top_k": 0, "typ_p": 0.5}, {"mirostat": 1}, {"mirostat": 2}])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_no_token_is_left(params: dict[str, float], value: float, vocab: Vocab) -> None:
    with np.errstate(invalid="ignore"), pytest.raises(SamplerError, match=r"NaN|no token is left"):
        SamplerChain(SamplingParams(**params), vocab).sample(np.full(259, value, np.float32))


def test_one_token_is_left(vocab: Vocab) -> None:
    logits = np.full(259, -np.inf, np.float32)
    logits[77] = -3
    for params in ({}, OFF, {"temp": 0}, {"typ_p": 0.5}, {"mirostat": 1}, {"mirostat": 2}, {"dynatemp_range": 2.0}):
        assert SamplerChain(SamplingParams(**params), vocab).sample(logits) == 77


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"top_p": 1.5}, "top_p must be from 0 to 1, not 1.5"),
        ({"temp": -1.0}, "temp must be 0 or more"),
        ({"temp": math.nan}, "temp must be a finite number"),
        ({"repeat_penalty": 0.0}, "repeat_penalty must be from 1e-6 to 1e6, not 0.0"),
        ({"mirostat": 3}, "mirostat must be 0, 1 or 2"),
        ({"samplers": "top_k;magic"}, "unknown sampler 'magic'; known are: adaptive_p, dry"),
        ({"grammar": "root ::= x", "json_schema": "{}"}, "cannot both"),
    ],
)
def test_bad_parameters(params: dict[str, object], text: str) -> None:
    with pytest.raises(SamplerError, match=text):
        SamplingParams(**params)


def test_options_are_the_parameters() -> None:
    declared = {f.name: f.type for f in fields(SamplingParams)}
    for_checkers = {name: kind.__forward_arg__ for name, kind in SamplingOptions.__annotations__.items()}
    assert list(declared.items()) == list(for_checkers.items())  # the fields in order, each with its type


def test_candidates_leave_the_logits_alone(vocab: Vocab) -> None:
    logits = np.random.default_rng(1).standard_normal(259).astype(np.float32)
    before = logits.copy()
    params = SamplingParams(logit_bias={3: 1.0}, repeat_penalty=1.2, dry_multiplier=1.0, dynatemp_range=0.5)
    chain = SamplerChain(params, vocab)
    chain.prime([3, 4, 5, 3, 4])
    for _ in range(5):
        chain.accept(chain.sample(logits))
    assert (logits == before).all()
