"""Every sampler against its definition, written out slowly here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml.errors import SamplerError
from pyggml.gguf_io.read import open_gguf
from pyggml.llm.model import load_model
from pyggml.llm.samplers import SamplerChain, SamplingParams, guided
from pyggml.llm.samplers.adaptive import AdaptiveP
from pyggml.llm.samplers.candidates import Candidates
from pyggml.llm.samplers.dry import Dry, find_breakers
from pyggml.llm.samplers.mirostat import Mirostat
from pyggml.llm.samplers.penalties import Penalties
from pyggml.llm.samplers.temperature import DynamicTemperature, Temperature
from pyggml.llm.samplers.truncate import MinP, TopK, TopNSigma, TopP, Typical, Xtc
from pyggml.llm.vocab import Vocab

OFF = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
logits_of = st.builds(
    lambda n, seed, scale: (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32),
    st.sampled_from((1, 2, 7, 60, 300, 5000)),
    st.integers(0, 10**6),
    st.sampled_from((0.1, 1.0, 4.0)),
)


@pytest.fixture(scope="module")
def vocab(tiny: Path) -> Vocab:
    return load_model(tiny).vocab


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x.astype(np.float64) - x.max())
    return p / p.sum()


def left(c: Candidates) -> set[int]:
    return set(c.tokens().tolist())


def ranked(p: np.ndarray) -> list[int]:
    return sorted(range(len(p)), key=lambda i: -p[i])


def same_up_to_rounding(got: set[int], order: list[int], n: int, measure: np.ndarray, limit: float) -> None:
    """`got` is the first n of `order`, but for those whose measure is within rounding of the limit."""
    for i in got ^ set(order[:n]):
        assert abs(measure[i] - limit) < 1e-5 * max(1.0, abs(limit))


@given(logits_of, st.integers(1, 80))
@settings(max_examples=40, deadline=None)
def test_top_k(logits: np.ndarray, k: int) -> None:
    sampler = TopK(k)
    for shift in (0.0, 0.0, 3.0, -9.0):  # the guessed limit fits, and does not
        c = Candidates(logits + np.float32(shift))
        sampler.apply(c)
        assert sorted(c.logits, reverse=True) == c.logits.tolist()
        assert c.tokens().tolist() == ranked(logits + np.float32(shift))[:k]
        assert (c.logits == (logits + np.float32(shift))[c.tokens()]).all()


@given(logits_of, st.integers(1, 400), st.sampled_from(("top_p", "min_p", "typ_p")))
@settings(max_examples=40, deadline=None)
def test_min_keep_leaves_the_first_in_each_samplers_own_order(logits: np.ndarray, least: int, name: str) -> None:
    """However strict a sampler is. One that leaves more anyway is not changed."""
    kinds = {"top_p": TopP, "min_p": MinP, "typ_p": Typical}
    p = softmax(logits)
    surprise = np.abs(-np.log(np.maximum(p, 1e-300)) - (-(p * np.log(np.maximum(p, 1e-300))).sum()))
    order = sorted(range(len(p)), key=lambda i: surprise[i]) if name == "typ_p" else ranked(p)
    measure = surprise if name == "typ_p" else p
    for strict in (True, False):
        value = {"top_p": (1e-6, 0.9999), "min_p": (1.0, 1e-4), "typ_p": (1e-6, 0.9999)}[name][not strict]
        alone, kept = Candidates(logits.copy()), Candidates(logits.copy())
        kinds[name](value).apply(alone)
        kinds[name](value, least).apply(kept)
        n = max(len(alone), min(least, len(p)))
        assert len(kept) == n
        same_up_to_rounding(left(kept), order, n, measure, measure[order[n - 1]])


def test_min_keep_holds_xtc_back() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    for least, n in ((0, 2), (2, 2), (3, 4)):
        c = Candidates(logits.copy())
        Xtc(1.0, 0.15, np.random.default_rng(0), least).apply(c)
        assert len(c) == n


def test_top_k_of_equals_takes_the_first() -> None:
    for _ in range(2):
        c = Candidates(np.array([1, 2, 2, 2, 2, 0], np.float32))
        TopK(3).apply(c)
        assert c.tokens().tolist() == [1, 2, 3]


@given(logits_of, st.floats(0.01, 0.999))
@settings(max_examples=40, deadline=None)
def test_top_p(logits: np.ndarray, p: float) -> None:
    c = Candidates(logits)
    TopP(p).apply(c)
    probs = softmax(logits)
    order = ranked(probs)
    sums = np.cumsum(probs[order])
    n = next((i + 1 for i, s in enumerate(sums) if s >= p), len(order))
    position = np.empty(len(order))
    position[order] = sums
    assert left(c) == set(order[: len(c)]) and c.is_sorted
    assert len(c) == n or abs(sums[min(len(c), n) - 1] - p) < 1e-5


@given(logits_of, st.floats(0.001, 1.0))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("sort", [False, True])
def test_min_p(sort: bool, logits: np.ndarray, p: float) -> None:
    c = Candidates(logits)
    if sort:
        c.sort()
    MinP(p).apply(c)
    ratio = softmax(logits) / softmax(logits).max()
    order = ranked(ratio)
    same_up_to_rounding(left(c), order, int((ratio >= p).sum()), ratio, p)
    assert len(c) >= 1


@given(logits_of, st.floats(0.01, 0.99))
@settings(max_examples=40, deadline=None)
def test_typical(logits: np.ndarray, p: float) -> None:
    c = Candidates(logits)
    Typical(p).apply(c)
    probs = softmax(logits)
    entropy = -sum(q * math.log(q) for q in probs if q > 0)
    distance = np.array([abs(-math.log(q) - entropy) if q > 0 else math.inf for q in probs])
    kept: list[int] = []
    for i in np.argsort(distance, kind="stable").tolist():
        kept.append(i)
        if probs[kept].sum() > p:
            break
    assert (
        left(c) == set(kept)
        or max(distance[list(left(c) ^ set(kept))]) - min(distance[kept]) < 1e-4
        or (len(left(c) ^ set(kept)) == 1 and abs(probs[kept].sum() - p) < 1e-5)
    )


@given(logits_of, st.floats(0.1, 3.0))
@settings(max_examples=40, deadline=None)
def test_top_n_sigma(logits: np.ndarray, n: float) -> None:
    logits = np.append(logits, np.float32(-np.inf))
    c = Candidates(logits)
    TopNSigma(n).apply(c)
    limit = float(logits.max()) - n * float(np.std(logits[:-1].astype(np.float64)))
    same_up_to_rounding(left(c), ranked(logits), int((logits >= limit).sum()), logits, limit)


def test_xtc() -> None:
    logits = np.log(np.array([0.4, 0.05, 0.3, 0.15, 0.1], np.float32))
    for threshold, kept in ((0.12, {1, 3, 4}), (0.35, set(range(5))), (0.25, {1, 2, 3, 4}), (0.5, set(range(5)))):
        c = Candidates(logits)
        Xtc(1.0, threshold, np.random.default_rng(0)).apply(c)
        assert left(c) == kept
    sampler, n = Xtc(0.3, 0.12, np.random.default_rng(0)), 0
    for _ in range(2000):
        c = Candidates(logits)
        sampler.apply(c)
        n += len(c) == 3
    assert abs(n / 2000 - 0.3) < 0.04


@given(logits_of, st.floats(0.1, 3.0), st.floats(0.1, 2.0), st.floats(0.5, 2.0))
@settings(max_examples=30, deadline=None)
def test_temperatures(logits: np.ndarray, temp: float, spread: float, exponent: float) -> None:
    c = Candidates(logits)
    Temperature(temp).apply(c)
    assert np.allclose(c.logits, logits / np.float32(temp), rtol=1e-6)
    c = Candidates(logits)
    DynamicTemperature(temp, spread, exponent).apply(c)
    if len(logits) > 1:
        p = softmax(logits)
        entropy = -sum(q * math.log(q) for q in p if q > 0) / math.log(len(p))
        low, high = max(0.0, temp - spread), temp + spread
        assert np.allclose(c.logits, logits / (low + (high - low) * entropy**exponent), rtol=1e-3, atol=1e-5)
    assert np.isfinite(logits).all()


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(-1, 12), st.integers(2, 10))
@settings(max_examples=60, deadline=None)
def test_penalties(tokens: list[int], last_n: int, k: int) -> None:
    if last_n == 0:
        return
    logits = np.random.default_rng(len(tokens)).standard_normal(10).astype(np.float32)
    sampler = Penalties(last_n, 1.3, 0.2, 0.1, exempt=4)
    sampler.prime(tokens[:5])
    for t in tokens[5:]:
        sampler.accept(t)
    window = tokens if last_n < 0 else tokens[-last_n:]
    expected = logits.copy()
    for t in range(10):
        n = window.count(t)
        if n and t != 4:
            x = logits[t] * 1.3 if logits[t] <= 0 else logits[t] / 1.3
            expected[t] = x - n * 0.2 - 0.1
    c, before = Candidates(logits), logits.copy()
    c.keep_top(k)  # also behind another sampler
    sampler.apply(c)
    assert np.allclose(c.logits, expected[c.tokens()], rtol=1e-5)
    assert (logits == before).all()


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(-1, 30),
    st.integers(1, 4),
    st.lists(st.integers(0, 3), max_size=1),
)
@settings(max_examples=150, deadline=None)
def test_dry(tokens: list[int], last_n: int, allowed: int, breaker: list[int]) -> None:
    if last_n == 0:
        return
    sampler = Dry(0.5, 1.5, allowed, last_n, {t: {()} for t in breaker})
    sampler.prime(tokens[:7])
    for t in tokens[7:]:
        sampler.accept(t)
    c = Candidates(np.zeros(4, np.float32))
    sampler.apply(c)
    window = tokens if last_n < 0 else tokens[-last_n:]
    expected = [0.0] * 4
    for j in range(1, len(window)):  # the repeat would go on with window[j]
        m = 0
        while m < j and window[j - 1 - m] == window[len(window) - 1 - m] and window[j - 1 - m] not in breaker:
            m += 1
        if m >= allowed:
            expected[window[j]] = min(expected[window[j]], -0.5 * 1.5 ** (m - allowed))
    assert np.allclose(c.logits, expected)


def test_dry_breakers(vocab: Vocab) -> None:
    a, b = 3 + ord("a"), 3 + ord("b")
    assert find_breakers(["a", "ab"], vocab) == {a: {()}, b: {(a,)}}
    sampler = Dry(1.0, 2.0, 2, -1, find_breakers(["ab"], vocab))
    for ids, loses in (([a, a, b, 50, 51, 52, 53, 51, 52], True), ([51, 52, 53, 51, 52, a, b], False)):
        sampler.reset()
        sampler.prime(ids)
        c = Candidates(np.zeros(259, np.float32))
        sampler.apply(c)
        assert bool((c.logits < 0).any()) == loses
    c = Candidates(np.zeros(259, np.float32))
    strong = Dry(3.0, 10.0, 1, -1, {})
    strong.prime([5] * 200)  # 10 ** 198 is no float32
    strong.apply(c)
    assert np.isfinite(c.logits).all() and c.logits[5] < -1e38


def test_mirostat_2() -> None:
    logits = np.random.default_rng(3).standard_normal(200).astype(np.float32) * 2
    p, rng = softmax(logits), np.random.default_rng(0)
    sampler, mu = Mirostat(2, 3.0, 0.1, 200), 6.0
    for _ in range(50):
        c = Candidates(logits)
        sampler.apply(c)
        assert left(c) == {i for i in range(200) if -math.log2(p[i]) <= mu}
        token = c.draw(rng)
        sampler.accept(token)
        inside = p[list(left(c))].sum()
        mu -= 0.1 * (-math.log2(p[token] / inside) - 3.0)
        assert abs(sampler.mu - mu) < 1e-3


def test_mirostat_1() -> None:
    logits = np.random.default_rng(3).standard_normal(500).astype(np.float32) * 2
    p, rng = softmax(logits), np.random.default_rng(0)
    sampler, mu = Mirostat(1, 3.0, 0.1, 500), 6.0
    for _ in range(50):
        top = sorted(p, reverse=True)[:100]
        t = [math.log((i + 2) / (i + 1)) for i in range(99)]
        b = [math.log(top[i] / top[i + 1]) for i in range(99)]
        s = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
        eps = s - 1
        k = max(1, min(500, int((eps * 2**mu / (1 - 500**-eps)) ** (1 / s))))
        c = Candidates(logits)
        sampler.apply(c)
        assert abs(len(c) - k) <= 1 and left(c) == set(ranked(p)[: len(c)])
        token = c.draw(rng)
        sampler.accept(token)
        mu -= 0.1 * (-math.log2(p[token] / p[list(left(c))].sum()) - 3.0)
        assert abs(sampler.mu - mu) < 1e-3


def test_adaptive_p() -> None:
    """Against its definition; a token that was none of the candidates changes nothing."""
    sampler, rng, target, decay = AdaptiveP(0.4, 0.7), np.random.default_rng(5), 0.4, 0.7
    total, weight = target / (1 - decay), 1 / (1 - decay)
    for token in (3, 0, 7, 60, 2):
        logits = rng.standard_normal(9).astype(np.float32) * 3
        logits[5] = -np.inf
        c = Candidates(logits)
        sampler.apply(c)
        aim = min(max(2 * target - total / weight, 0), 1)
        far = np.abs(softmax(logits) - aim) / 0.3
        want = np.where(np.arange(9) == 5, -np.inf, 5 - 10 * far**2 / (1 + far))
        np.testing.assert_allclose(c.logits, want, rtol=1e-5)
        sampler.accept(token)
        if token < 9:
            total, weight = softmax(logits)[token] + decay * total, 1 + decay * weight


def test_adaptive_p_keeps_near_its_target(vocab: Vocab) -> None:
    """The tokens that are chosen have nearly that probability in the mean; otherwise likelier ones are chosen."""
    rng, means = np.random.default_rng(1), list[float]()
    for target in (0.1, 0.3, -1.0):
        chain = SamplerChain(SamplingParams(adaptive_target=target, seed=1, temp=1.0, min_p=0.02), vocab)
        assert ("adaptive_p(0.1, decay 0.9)" in str(chain)) == (target == 0.1)
        found: list[float] = []
        for _ in range(300):
            logits = (rng.standard_normal(vocab.n_tokens) * 4).astype(np.float32)
            ids, probs = SamplerChain(SamplingParams(temp=1.0, min_p=0.02), vocab).distribution(logits)
            token = chain.sample(logits)
            chain.accept(token)
            found.append(float(probs[ids == token][0]))
        means.append(float(np.mean(found)))
    assert abs(means[0] - 0.1) < 0.06 and abs(means[1] - 0.3) < 0.06 and means[2] > 0.36


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_reaches_its_target(version: int, vocab: Vocab) -> None:
    logits = np.random.default_rng(5).standard_normal(259).astype(np.float32) * 1.5
    chain = SamplerChain(SamplingParams(mirostat=version, mirostat_tau=4.0, seed=1, temp=1.0), vocab)
    surprise: list[float] = []
    for _ in range(600):
        ids, p = chain.distribution(logits)
        token = chain.sample(logits)
        surprise.append(-math.log2(p[ids.tolist().index(token)]))
        chain.accept(token)
    assert abs(np.mean(surprise[200:]) - 4.0) < 0.3


@pytest.mark.parametrize("n", [1, 5, 259, 9000])
def test_draw_follows_the_probabilities(n: int) -> None:
    logits = np.random.default_rng(n).standard_normal(n).astype(np.float32) * 3
    logits[n // 2 :][1::3] = -np.inf
    rng, p, draws = np.random.default_rng(0), softmax(logits), 4000
    counts = np.zeros(n)
    for _ in range(draws):
        counts[Candidates(logits).draw(rng)] += 1
    assert counts[~np.isfinite(logits)].sum() == 0
    likely = p * draws >= 5
    chi2 = ((counts - p * draws)[likely] ** 2 / (p * draws)[likely]).sum()
    assert chi2 < likely.sum() + 5 * math.sqrt(2 * likely.sum())


def test_bias_and_eos(vocab: Vocab) -> None:
    logits = np.zeros(259, np.float32)
    logits[2] = 50
    chain = SamplerChain(SamplingParams(**OFF, logit_bias={9: 40.0, 2: -20.0}), vocab)
    ids, p = chain.distribution(logits)
    expected = softmax(np.array([{9: 40.0, 2: 30.0}.get(i, 0.0) for i in range(259)]))
    assert np.allclose(p[np.argsort(ids)], expected, atol=1e-6)
    assert SamplerChain(SamplingParams(temp=0), vocab).sample(logits) == 2
    assert SamplerChain(SamplingParams(temp=0, ignore_eos=True), vocab).sample(logits) == 0
    with pytest.raises(SamplerError, match="token 259 is not in the vocabulary"):
        SamplerChain(SamplingParams(logit_bias={259: 1.0}), vocab)


def test_suppressed_tokens(tiny: Path) -> None:
    """What the file suppresses is not sampled, whatever its logit; ids outside the vocabulary are left out."""
    more = {"tokenizer.ggml.suppress_tokens": np.array([7, -1, 9, 259], np.int32)}
    vocab = Vocab.from_gguf(open_gguf(tiny).kv | more)
    assert vocab.suppressed == (7, 9)
    logits = np.zeros(259, np.float32)
    logits[[7, 9, 11]] = 50, 40, 30
    assert SamplerChain(SamplingParams(temp=0), vocab).sample(logits) == 11
    assert SamplerChain(SamplingParams(seed=1, logit_bias={9: 90.0}), vocab).sample(logits) == 11


def test_infill(vocab: Vocab) -> None:
    def run(weights: dict[int, float]) -> dict[int, float]:
        logits = np.full(259, -np.inf, np.float32)
        for t, w in weights.items():
            logits[t] = math.log(w)
        ids, p = SamplerChain(SamplingParams(samplers="top_k;infill", top_k=len(weights)), vocab).distribution(logits)
        return {int(i): round(float(x), 4) for i, x in zip(ids, p, strict=True)}

    assert run({2: 0.2, 40: 0.5, 41: 0.3}) == {2: 1.0}  # 0.2 * 3 * 3 > 0.8
    assert run({40: 0.5, 41: 0.35, 42: 0.15}) == {40: round(0.5 / 0.85, 4), 41: round(0.35 / 0.85, 4)}
    assert run({40 + i: 0.1 for i in range(10)}) == {2: 1.0}  # nothing is likely: the end


def test_guidance() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(50).astype(np.float32) for _ in range(2))
    la, lb = np.log(softmax(a)), np.log(softmax(b))
    assert np.allclose(guided(a, b, 1.7), 1.7 * (la - lb) + lb, atol=1e-5)
    assert np.allclose(guided(a, b, 1.0), la, atol=1e-5)


def test_extreme_parameters_draw_a_token_or_are_refused(vocab: Vocab) -> None:
    floats = (0.0, 5e-324, 1e-45, 1e-38, 1e-6, 1.0, 1e6, 1e30, 3.4e38)
    extreme: list[dict[str, Any]] = [
        {name: x}
        for name in ("temp", "dynatemp_range", "top_n_sigma", "repeat_penalty", "frequency_penalty", "presence_penalty")
        for x in (*floats, *(-x for x in floats))
    ]
    extreme += [{"mirostat": v, "mirostat_tau": x, "mirostat_eta": y} for v in (1, 2) for x in floats for y in floats]
    extreme += [{"dry_multiplier": x, "dry_base": y} for x in floats for y in (1.0, 1 + 1e-15, 2.0, 3e38)]
    extreme += [{"dynatemp_range": 0.5, "dynatemp_exponent": x} for x in (*floats, -1.0)]
    extreme += [{"xtc_probability": 1.0, "xtc_threshold": x} for x in (0.0, 1e-45, 0.5)]
    extreme += [{name: x} for name in ("top_p", "min_p", "typ_p") for x in (5e-324, 1e-45, 1.0)]
    extreme += [{"logit_bias": {5: x}, "temp": t} for x in (1e300, -1e300, -math.inf, math.inf) for t in (1e-45, 2.0)]
    logits = np.random.default_rng(1).standard_normal((4, 259)).astype(np.float32) * 100
    logits[:, 100:200] = -np.inf
    drawn = 0
    for options in extreme:
        try:
            chain = SamplerChain(SamplingParams(seed=1, **options), vocab)
        except SamplerError as e:
            assert "must be" in str(e)
            continue
        chain.prime([1, 2, 3] * 4)
        for row in logits:
            token = chain.sample(row)
            assert np.isfinite(row[token])
            chain.accept(token)
            drawn += 1
    assert drawn > 600
    assert SamplerChain(SamplingParams(temp=1e-30), vocab).sample(logits[0]) == logits[0].argmax()
