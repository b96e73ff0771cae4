"""Speculative decoding: greedy ids, distributions, acceptance, contexts left whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyggml.tools.cli import main

from pyggml.errors import ModelError, SamplerError
from pyggml.llm.generate.drafters import Guess, LookupDrafter, ModelDrafter, common_prefix
from pyggml.llm.generate.generation import Generation, new_generation
from pyggml.llm.generate.long_context import LongContext
from pyggml.llm.generate.speculative import (
    DraftStats,
    SpeculativeGeneration,
    chosen,
    with_draft,
)
from pyggml.llm.model import Model, load_model
from pyggml.llm.samplers import SamplerChain, SamplingParams

from ...tiny_model import write_gguf

PROMPT = "the cat and the dog and the cat"


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model with the same tokens that says other things."""
    return load_model(write_gguf(tmp_path_factory.mktemp("other") / "other.gguf", {"llama.block_count": 1}, seed=8))


def ids_of(g: Generation) -> list[int]:
    list(g)
    return g.ids


@pytest.mark.parametrize("text", ["Once upon a time", "One day, a girl named Lily", "The dog saw a big ball. The dog"])
def test_stories_are_the_same_with_a_draft(shared: Path, text: str) -> None:
    target = load_model(shared / "models" / "stories260K.gguf")
    draft = load_model(shared / "models" / "stories260K-Q4_0.gguf")
    plain = ids_of(new_generation(target, text, 120, temp=0.0))
    for draft_model, at_least in ((draft, 0.8), (None, 0.0)):  # what lookup finds depends on the text
        g = with_draft(new_generation(target, text, 120, temp=0.0), draft_model, 16, draft_p_min=0.75)
        assert ids_of(g) == plain
        assert g.stats.acceptance > at_least
        assert g.stats.n_accepted <= g.stats.n_drafted < 119 * 16
    assert f"{g.stats.n_accepted} accepted / {g.stats.n_drafted} drafted" in str(g.stats)


@pytest.mark.parametrize("drafter", ["itself", "other", "lookup"])
@pytest.mark.parametrize(
    ("n_predict", "draft_max", "draft_min"), [(40, 16, 0), (40, 3, 3), (1, 4, 0), (0, 4, 0), (-1, 16, 2)]
)
def test_greedy_ids_are_those_of_plain_decoding(
    model: Model, other: Model, drafter: str, n_predict: int, draft_max: int, draft_min: int
) -> None:
    def new() -> Generation:
        return new_generation(model, PROMPT, n_predict, temp=0.0, ignore_eos=True, repeat_penalty=1.3, n_threads=1)

    draft_model = {"itself": model, "other": other, "lookup": None}[drafter]
    plain, g = new(), with_draft(new(), draft_model, draft_max, draft_min, 0.0)
    assert ids_of(g) == ids_of(plain)
    assert g.finish_reason == plain.finish_reason == "length"
    assert g.ctx.memory.used == plain.ctx.memory.used
    if drafter == "other" and n_predict > 1:
        assert 0 <= g.stats.acceptance < 1 and g.stats.n_drafts > 0


def test_the_model_itself_is_always_right(model: Model) -> None:
    """Greedy without penalties, which a draft does not know; of 30 tokens the first comes from the prompt."""
    g = with_draft(new_generation(model, PROMPT, 30, temp=0.0, ignore_eos=True), model, 9, 0, 0.0)
    plain = new_generation(model, PROMPT, 30, temp=0.0, ignore_eos=True)
    assert ids_of(g) == ids_of(plain)
    assert (g.stats.n_drafts, g.stats.n_drafted, g.stats.n_accepted) == (3, 26, 26)  # 1 + 3 * (9 + 1) - 1
    assert g.stats.acceptance == 1


def test_an_unsure_draft_stops(model: Model) -> None:
    for p_min, draft_min, n in ((1.0, 0, 0), (1.0, 3, 3), (0.0, 0, 8)):
        drafter = ModelDrafter(model.new_context(64, n_threads=1), SamplingParams(temp=0), draft_min, p_min)
        assert len(drafter.draft(model.tokenize(PROMPT), 8)) == n


def test_a_draft_ends_with_the_text(model: Model) -> None:
    params = SamplingParams(temp=0, logit_bias={2: np.finfo(np.float32).max.item()})
    drafter = ModelDrafter(model.new_context(64, n_threads=1), params, 4, 0.0)
    assert drafter.draft([1, 5, 6], 8) == [Guess(2)]
    g = with_draft(Generation(model.new_context(64), [1, 5], SamplerChain(params, model.vocab), 8), model)
    assert ids_of(g) == [] and g.finish_reason == "eog"


@pytest.mark.parametrize("seed", [1, 2])
def test_lookup_gives_the_text_of_the_seed(model: Model, seed: int) -> None:
    options: dict[str, Any] = {"temp": 0.8, "seed": seed, "top_k": 3, "min_p": 0.0, "n_threads": 1}
    options |= {"xtc_probability": 0.2, "dry_multiplier": 0.5, "logit_bias": {104: 3.0, 36: 3.0}}
    plain = new_generation(model, PROMPT, 60, **options)
    g = with_draft(new_generation(model, PROMPT, 60, **options), None, 16)
    assert ids_of(g) == ids_of(plain)
    assert 0 < g.stats.n_accepted < g.stats.n_drafted


@pytest.mark.parametrize("name", ["llama2-Q2_K", "llama2-Q4_K_M", "llama-yarn-F16", "mixtral-Q4_K_M"])
def test_models_say_the_same_with_guesses_and_without(shared: Path, name: str) -> None:
    model = load_model(shared / "golden" / "llama" / f"{name}.gguf")
    rng = np.random.default_rng(5)
    part = rng.integers(5, model.hparams.n_vocab, 8).tolist()
    greedy: dict[str, Any] = {"temp": 0.0}
    seeded: dict[str, Any] = {"temp": 0.8, "seed": 3, "top_k": 4}
    drafts: tuple[tuple[dict[str, Any], Model | None, int], ...] = (
        (greedy, None, 3),
        (greedy, model, 5),
        ({**greedy, "repeat_penalty": 1.3}, model, 5),
        (seeded, None, 12),
    )
    for prompt, (options, by, n) in product(([*part, *part, *part[:3]], part), drafts):
        plain, g = (new_generation(model, prompt, 24, ignore_eos=True, n_threads=1, **options) for _ in range(2))
        drafted = with_draft(g, by, n)
        assert ids_of(drafted) == ids_of(plain)
        assert drafted.ctx.memory.used == plain.ctx.memory.used


# -- distributions --------------------------------------------------------------------------------------------------


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """The statistic, and that no outcome came that has no probability."""
    assert counts[p == 0].sum() == 0
    expected = counts.sum() * p[p > 0]
    return float(((counts[p > 0] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ((0.1, 0.2, 0.3, 0.4), (0.4, 0.3, 0.2, 0.1)),
        ((0.7, 0.3, 0.0, 0.0), (0.25, 0.25, 0.25, 0.25)),
        ((0.25, 0.25, 0.25, 0.25), (0.0, 0.0, 0.9, 0.1)),
        ((0.5, 0.5, 0.0, 0.0), (0.0, 0.0, 0.5, 0.5)),
        ((0.1, 0.2, 0.3, 0.4), (0.1, 0.2, 0.3, 0.4)),
    ],
)
def test_rejection_keeps_the_distribution(p: Sequence[float], q: Sequence[float]) -> None:
    """11.3 is the 0.99 quantile of 3 degrees of freedom. The guess is kept with the probability sum(min(p, q))."""
    rng, n = np.random.default_rng(3), 6000
    target, draft = np.array(p), np.array(q)
    ids = np.array([3, 1, 2, 0])[target[[3, 1, 2, 0]] > 0]  # in any order, none without probability
    guesses = rng.choice(4, n, p=draft)
    tokens = np.array([chosen(ids, target[ids], int(g), draft, rng) for g in guesses])
    assert chi_square(np.bincount(tokens, minlength=4), target) < 11.3
    kept = float(np.minimum(target, draft).sum())
    assert abs(float((tokens == guesses).mean()) - kept) < 4 * np.sqrt(max(kept * (1 - kept), 1e-9) / n) + 1e-9


@pytest.mark.parametrize("options", [{}, {"temp": 1.3, "presence_penalty": 3.0, "logit_bias": {100: 3.0}}])
def test_sampled_texts_have_the_distribution_of_the_model(model: Model, other: Model, options: dict[str, Any]) -> None:
    """Three tokens of at most three candidates each: the first is sampled from the prompt's logits, the others are
    guessed by another model (all wrong), by the model itself, and by the model with samplers that prefer what its own
    do not (some wrong). Each text has a seed of its own, as users have. 54.1 is the 0.999 quantile of 26 degrees of
    freedom."""
    params = SamplingParams(**{"temp": 1.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0, **options})
    prompt = model.tokenize("ab")
    ctx = model.new_context(32, n_threads=1)
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for ids, p_ids in expected.items():
            ctx.memory.clear()
            ctx.decode([*prompt, *ids])
            chain = SamplerChain(params, model.vocab)
            chain.prime([*prompt, *ids])
            for token, p in zip(*(a.tolist() for a in chain.distribution(ctx.logits[-1])), strict=True):
                longer[(*ids, token)] = p_ids * p
        expected = longer
    assert len(expected) == 27 and not any(model.vocab.is_eog(t) for ids in expected for t in ids)
    texts = list(expected)
    p = np.array([expected[ids] for ids in texts])
    acceptance: list[float] = []
    sharp = replace(params, temp=0.3, top_k=5)
    for draft_model, draft_params in ((other, params), (model, params), (model, sharp)):
        draft_ctx, counts = draft_model.new_context(32, n_threads=1), np.zeros(27)
        n_drafted, n_accepted = 0, 0
        for seed in range(400):
            seeded = replace(params, seed=seed)
            ctx.memory.clear()
            chain = SamplerChain(seeded, model.vocab)
            chain.prime(prompt)
            drafter = ModelDrafter(draft_ctx, replace(draft_params, seed=seed), 0, 0.0)
            g = SpeculativeGeneration(ctx, prompt, chain, 4, drafter=drafter)
            counts[texts.index(tuple(ids_of(g)[:3]))] += 1
            n_drafted, n_accepted = n_drafted + g.stats.n_drafted, n_accepted + g.stats.n_accepted
        assert chi_square(counts, p) < 54.1
        acceptance.append(n_accepted / n_drafted)
    assert acceptance[0] == 0 < acceptance[2] < 0.9
    assert acceptance[1] == 1 if not options else 0 < acceptance[1] < 0.9  # drafts know no penalty for the "a"


# -- contexts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["other", "lookup"])
def test_shifted_contexts(model: Model, other: Model, drafter: str) -> None:
    def new(wrap: Callable[[Generation], Generation]) -> Generation:
        g = wrap(new_generation(model, PROMPT, 150, n_ctx=64, temp=0.0, ignore_eos=True, n_threads=1))
        g.long = LongContext(g.ctx, n_keep=4)
        return g

    plain, g = new(lambda g: g), new(lambda g: with_draft(g, other if drafter == "other" else None, 8, 0, 0.0))
    assert len(ids_of(plain)) == 150 and g.long is not None
    assert ids_of(g) == plain.ids
    assert g.long.moved and g.ctx.memory.seq_pos_max(0) == plain.ctx.memory.seq_pos_max(0)


def test_a_generation_that_is_broken_off_leaves_no_guesses(model: Model) -> None:
    g = with_draft(new_generation(model, PROMPT, 60, temp=0.0, ignore_eos=True), model, 8, 0, 0.0)
    tokens = iter(g)
    for _ in range(5):
        next(tokens)
    assert g.ctx.memory.used > len(g.prompt) + 5
    tokens.close()  # pyright: ignore
    assert g.ctx.memory.used == len(g.prompt) + 4 and len(g.ids) == 5


def test_part_of_the_prompt_may_be_evaluated(model: Model) -> None:
    plain = ids_of(new_generation(model, PROMPT, 20, temp=0.0, ignore_eos=True))
    g = new_generation(model, PROMPT, 20, temp=0.0, ignore_eos=True)
    g.ctx.decode(list(g.prompt[:7]))
    g.n_past = 7
    assert ids_of(with_draft(g, model, 4)) == plain


def test_what_cannot_be_done(model: Model, other: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    g = new_generation(model, PROMPT, 4)
    for numbers in ((0, 0), (4, 5), (4, -1)):
        with pytest.raises(SamplerError, match="make no sense"):
            with_draft(g, None, *numbers)
    with pytest.raises(SamplerError, match="draft_p_min"):
        with_draft(g, other, draft_p_min=1.5)
    with pytest.raises(SamplerError, match="n-grams"):
        LookupDrafter(2, 3)
    with pytest.raises(SamplerError, match="guidance"):
        with_draft(new_generation(model, PROMPT, 4, cfg_scale=2.0), None)
    extended = with_draft(new_generation(model, PROMPT, 4), None)
    extended.long = LongContext(extended.ctx, grp_attn_n=2, grp_attn_w=8)
    with pytest.raises(SamplerError, match="self-extend"):
        list(extended)
    monkeypatch.setattr("tests.tiny_model.TOKENS", ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(250))])
    smaller = load_model(write_gguf(tmp_path / "smaller.gguf"))
    with pytest.raises(ModelError, match="253 tokens, the model 259"):
        with_draft(g, smaller)


# -- lookup ---------------------------------------------------------------------------------------------------------


def test_lookup_goes_on_as_the_last_time() -> None:
    def draft(tokens: Sequence[int], n: int = 3, n_min: int = 0) -> list[int]:
        return [g.token for g in LookupDrafter(3, 2, n_min).draft(tokens, n)]

    assert draft([1, 2, 3, 4, 5, 1, 2]) == [3, 4, 5]
    assert draft([1, 2, 3, 1, 2, 4, 1, 2]) == [4, 1, 2]  # the last time
    assert draft([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]) == [3, 8, 1]  # the longest
    assert draft([1, 2, 3, 4, 5]) == draft([1, 2]) == draft([1]) == []
    assert draft([1, 2, 1, 2], 1) == [1]
    assert draft([1, 2, 1, 2]) == [1, 2] and draft([1, 2, 1, 2], n_min=3) == []


def test_lookup_learns_as_the_text_grows() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 3, 80).tolist()
    drafter = LookupDrafter(4, 1)
    for n in range(1, len(tokens)):
        assert drafter.draft(tokens[:n], 5) == LookupDrafter(4, 1).draft(tokens[:n], 5)
    assert drafter.draft([5, 6, 5], 5) == [Guess(6), Guess(5)]  # another text


def test_common_prefix() -> None:
    for a, b in product([(), (1,), (1, 2), (1, 3), (2,), (1, 2, 3, 4), (1, 2, 3, 5)], repeat=2):
        n = common_prefix(a, b)
        assert a[:n] == b[:n]
        assert n == min(len(a), len(b)) or a[n] != b[n]


# -- command --------------------------------------------------------------------------------------------------------


def test_command(tiny: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def run(*args: object, code: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as e:
            main(
                ["generate", "-m", str(tiny), "-p", PROMPT, "-n", "24", "--temp", "0", "--ignore-eos", *map(str, args)]
            )
        assert e.value.code == code
        return capfd.readouterr()

    plain = json.loads(run("--json")[0])
    for args in (("-md", tiny, "--draft-max", 5, "--draft-p-min", 0), ("--lookup", "--draft-min", 1)):
        out, _ = run("--json", *args)
        got = json.loads(out)
        assert (got["ids"], got["text"]) == (plain["ids"], plain["text"])
        assert 0 <= got["timings"]["draft_n_accepted"] <= got["timings"]["draft_n"]
    assert "draft_n" not in plain["timings"]
    out, err = run("-md", tiny, "--draft-max", 5, "--draft-p-min", 0)
    assert out == f"{PROMPT}{plain['text']}\n" and "draft acceptance = 1.00000 (19 accepted / 19 drafted)" in err
    assert "only one of" in run("-md", tiny, "--lookup", code=2)[1]
    assert "make no sense" in run("--lookup", "--draft-min", 17, code=2)[1]
    out, _ = run("--lookup", "--json", "--prompt-cache", tmp_path / "cache", "--prompt-cache-all")
    assert json.loads(out)["ids"] == plain["ids"]
    out, err = run("--lookup", "--json", "--prompt-cache", tmp_path / "cache")
    assert json.loads(out)["ids"] == plain["ids"] and "exact match" in err


def test_guessing_pauses_where_it_does_not_pay(model: Model) -> None:
    class Wrong:
        def draft(self, tokens: Sequence[int], n: int) -> list[Guess]:
            return [Guess((text[len(tokens)] + 1) % 256)] * n

    plain = new_generation(model, PROMPT, 100, temp=0.0, ignore_eos=True)
    text = [*plain.prompt, *ids_of(plain), 0]
    new = new_generation(model, PROMPT, 100, temp=0.0, ignore_eos=True)
    g = SpeculativeGeneration(new.ctx, new.prompt, new.chain, 100, drafter=Wrong(), n_max=3)
    assert ids_of(g) == plain.ids
    assert g.stats == DraftStats(n_drafts=1, n_drafted=3)  # from then on guesses are on trial


def test_guessing_goes_on_where_it_pays_again(model: Model) -> None:
    """Guesses before token 40 are wrong, and no more of them evaluated than once; those behind it are right."""

    class Late:
        def draft(self, tokens: Sequence[int], n: int) -> list[Guess]:
            wrong = len(tokens) < len(plain.prompt) + 40
            return [Guess((t + wrong) % 256) for t in text[len(tokens) : len(tokens) + n]]

    plain = new_generation(model, PROMPT, 100, temp=0.0, ignore_eos=True)
    text = [*plain.prompt, *ids_of(plain), 0]
    new = new_generation(model, PROMPT, 100, temp=0.0, ignore_eos=True)
    g = SpeculativeGeneration(new.ctx, new.prompt, new.chain, 100, drafter=Late(), n_max=3)
    assert ids_of(g) == plain.ids
    assert g.stats.n_drafted - g.stats.n_accepted == 3
    assert g.stats.n_accepted >= 36  # three of four tokens, from 10 behind the 40th on
