"""Prompt lookup that nobody asked for changes nothing but the time that a text takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.llama_cpp import Llama
from pyggml.llm.context import LlamaContext
from pyggml.llm.generate.chat import ChatSession
from pyggml.llm.generate.generation import Generation, new_generation
from pyggml.llm.generate.long_context import LongContext
from pyggml.llm.generate.lookup import LookupGeneration, _Copy, with_lookup
from pyggml.llm.generate.speculative import DraftStats
from pyggml.llm.generate.templates import find_template
from pyggml.llm.model import Model, load_model
from pyggml.llm.samplers import SamplerChain, SamplingParams

from ...random_model import write_random

PROMPT = "the cat and the dog and the cat"


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs cost nothing, and any batch takes as long: tiny models would need thousands of right guesses."""
    monkeypatch.setattr(LlamaContext, "seconds_to_build", lambda *_: 0.0)
    monkeypatch.setattr("pyggml.llm.generate.lookup.perf_counter", count().__next__)


def text_of(g: Generation) -> dict[str, Any]:
    """Everything that a user can see of a text."""
    tokens = list(g)
    seen = {"tokens": tokens, "ids": g.ids, "reason": g.finish_reason, "stop": g.stop_string, "stats": g.draft_stats}
    perf = g.ctx.perf()
    seen |= {"n": (g.timings.n_prompt, g.timings.n_eval, g.timings.n_sample), "used": g.ctx.memory.used}
    seen |= {"perf": (perf.n_p_eval, perf.n_eval, perf.n_sample), "times": perf.t_p_eval_ms > 0 < perf.t_eval_ms}
    seen |= {"pos": g.ctx.memory.seq_pos_max(0), "logits": g.ctx.logits.tobytes(), "outputs": g.ctx.outputs.tolist()}
    return seen | {"cells": g.ctx.memory.cells, "n_done": g.n_done}


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_texts_are_the_same(model: Model, data: st.DataObject) -> None:
    draw = data.draw
    words = draw(st.lists(st.sampled_from(["the cat ", "and ", "a dog", "!"]), min_size=1, max_size=6))
    options: dict[str, Any] = {"temp": draw(st.sampled_from((0.0, 0.8))), "seed": draw(st.integers(0, 99)), "top_k": 3}
    options |= draw(
        st.sampled_from(
            (
                {},
                {"repeat_penalty": 1.1, "stop": ["cat", "o d"]},
                {"logit_bias": {36: 8.0, 104: 8.0, 50: 8.0}, "n_probs": 3},
                {"grammar": 'root ::= ("ab" | "cd" "e"*)*', "n_probs": 0},
                {"mirostat": 2, "stopping_criteria": lambda ids, logits: len(ids) > 60 and logits[5] > 0},
                {"dry_multiplier": 0.5, "special": True, "n_ctx": 96},
                {"context": {"type_k": gg.BF16}, "flash_attn": True},
            )
        )
    )
    options |= {"ignore_eos": draw(st.booleans()), "n_threads": 1, "n_predict": draw(st.sampled_from((1, 7, 60)))}
    shifts = draw(st.booleans()) and "n_ctx" in options

    def new(lookup: bool) -> Generation:
        g = new_generation(model, "".join(words), lookup=lookup, **options)
        if shifts:
            g.long = LongContext(g.ctx, n_keep=4)
        return g

    assert type(new(False)) is Generation and type(new(True)) is LookupGeneration
    assert text_of(new(True)) == text_of(new(False))


def forced(model: Model, prompt: Sequence[int], text: Sequence[int], **options: Any) -> LookupGeneration:
    """A generation that is made to say `text`."""

    def force(ids: Any, logits: Any) -> Any:
        logits[:] = -1e9
        logits[text[len(ids) - len(prompt)]] = 1e3
        return logits

    g = new_generation(model, prompt, len(text), temp=0.0, ignore_eos=True, logits_processor=force, **options)
    assert list(g) and g.ids == list(text) and isinstance(g, LookupGeneration)
    return g


def test_wrong_guesses_are_not_evaluated(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [t for i in range(30) for t in (5, 6, 20 + i)]
    assert forced(model, wrong[:30], wrong[30:]).stats.n_drafted == 0
    rare = [*range(20, 60), *range(30, 34), 7, *range(40, 44), 8]  # as many as it takes, and then no more
    assert forced(model, rare[:40], rare[40:]).stats.n_drafted == 0
    copied = forced(model, range(20, 80), range(20, 80))
    assert copied.stats == DraftStats(7, 46, 46)  # as soon as four were right four, then seven, and seven ...
    assert forced(model, [5, 6, 7], [5, 6, 7] * 9).stats.n_accepted >= 12  # a copy that reaches its own tokens
    monkeypatch.setattr(LlamaContext, "seconds_to_build", lambda *_: 1e9)  # it never pays
    assert forced(model, range(20, 80), range(20, 80)).stats.n_drafted == 0


def test_a_text_that_waits_takes_no_memory(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may ask for many texts of one long prompt; an index of it has 110 bytes for each token."""
    made: list[int] = []

    def copy(text: Sequence[int]) -> _Copy:
        made.append(len(text))
        return _Copy(text)

    monkeypatch.setattr("pyggml.llm.generate.lookup._Copy", copy)
    g = new_generation(model, range(20, 50), 2, ignore_eos=True, n_threads=1)
    assert type(g) is LookupGeneration and not made
    assert len(list(g)) == 2 and made == [30]


def test_it_stops_where_batches_take_long(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times as long for each token as a token alone: twice as many guesses must be right each time."""
    seconds, decode = [0.0], LlamaContext.decode

    def slow(self: LlamaContext, batch: Any, *more: Any) -> None:
        decode(self, batch, *more)
        seconds[0] += 1 if len(batch) == 1 else 10 * len(batch)

    monkeypatch.setattr(LlamaContext, "decode", slow)
    monkeypatch.setattr("pyggml.llm.generate.lookup.perf_counter", lambda: seconds[0])
    assert 0 < forced(model, range(20, 220), range(20, 220)).stats.n_drafts <= 5


def test_where_nothing_is_guessed(model: Model, tmp_path: Path) -> None:
    """Beside other texts, while nodes are watched, with guidance, self-extend, pictures, windows, states,
    and where tokens see those behind them."""
    given: dict[str, Any] = {"temp": 0.0, "ignore_eos": True, "n_threads": 1}
    seen: list[list[Any]] = []
    for lookup in (True, False):
        with model.tap("l_out-0") as t:
            text = "".join(model.generate(PROMPT, 40, lookup=lookup, **given))
        seen.append([text, *(x.tobytes() for x in t["l_out-0"])])
    assert seen[0] == seen[1] and len(seen[0]) == 41
    with model.edit("l_out-0", lambda x: x * 0.5):
        texts = ["".join(model.generate(PROMPT, 40, lookup=lookup, **given)) for lookup in (True, False)]
    assert texts[0] == texts[1]
    g, plain = (new_generation(model, PROMPT, 40, lookup=b, n_ctx=128, **given) for b in (True, False))
    for each in (g, plain):
        each.long = LongContext(each.ctx, grp_attn_n=2, grp_attn_w=8)
    assert text_of(g) == text_of(plain) and isinstance(g, LookupGeneration) and g.stats.n_drafted == 0
    assert type(new_generation(model, PROMPT, 4, cfg_scale=2.0)) is Generation
    assert type(new_generation(model, PROMPT, 4, context={"backend": "ref"})) is Generation
    assert type(new_generation(model, PROMPT, 4, context={"n_ubatch": 7})) is Generation
    window = {"attention.sliding_window": 16, "attention.key_length": 8, "attention.value_length": 8}
    states = {"ssm.conv_kernel": 4, "ssm.inner_size": 32, "ssm.state_size": 8, "ssm.time_step_rank": 4}
    for arch, kv in (("gemma3", window), ("mamba", states), ("dream", {})):
        other = load_model(write_random(tmp_path / f"{arch}.gguf", arch, kv, tokens=[f"{i:02d}" for i in range(64)]))
        assert type(new_generation(other, [5, 6, 7], 4)) is Generation
    batch = model.stream_batch([PROMPT, PROMPT + "s"], 40, n_probs=None, **given)
    assert "".join(t.text for i, t in batch if i == 0) == "".join(model.generate(PROMPT, 40, **given))


def test_broken_off(model: Model) -> None:
    """Nothing is left of guesses after any number of tokens."""
    for n in range(1, 40, 8):
        left: list[Any] = []
        for lookup in (True, False):
            g = new_generation(model, PROMPT, 60, temp=0.0, ignore_eos=True, n_threads=1, lookup=lookup)
            tokens = iter(g)
            got = [next(tokens).id for _ in range(n)]
            logits = g.ctx.logits.tobytes()
            tokens.close()
            left.append((got, g.ids, logits, g.ctx.memory.used, g.ctx.memory.seq_pos_max(0), g.rest()))
        assert left[0] == left[1]


def test_a_context_that_changes_between_tokens_holds_no_guesses(model: Model, tmp_path: Path) -> None:
    """Whoever reads, saves or changes it, or watches nodes, finds it as without lookup."""
    words, n_prompt = range(70, 82), len(model.tokenize(PROMPT))

    def periodic(ids: Any, logits: Any) -> Any:
        logits[words[(len(ids) - n_prompt) % 12]] += 30
        return logits

    def texts(at: Callable[[Generation, ExitStack], object], after: Callable[[Generation], object]) -> None:
        seen: list[Any] = []
        n_held: list[int] = []
        for lookup in (True, False):
            g = new_generation(
                model, PROMPT, 60, 2, temp=0.0, n_threads=1, n_ctx=128, lookup=lookup, logits_processor=periodic
            )
            with ExitStack() as stack:
                text = iter(g)
                tokens = [next(text) for _ in range(33)]
                n_held.append(len(g._guesses) if isinstance(g, LookupGeneration) else 0)
                found = at(g, stack)
                seen.append([found, [*tokens, *text], g.ids, g.ctx.memory.cells, g.ctx.logits.tobytes(), after(g)])
        assert seen[0] == seen[1] and n_held[0] > n_held[1]

    reads: tuple[Callable[[Any], object], ...] = (
        *(lambda m: m.used, lambda m: m.cells, lambda m: m.pos_max.tolist(), lambda m: m.seq_pos_max(0)),
        *(lambda m: str(m.seq_pos_min(0)), lambda m: m.can_remove(0, 30), str, lambda m: m._repr_html_()),
        *(lambda m: m.caches[0].pos.tolist(), lambda m: m.stores[0].used),
    )
    for read in reads:
        texts(lambda g, _, read=read: read(g.ctx.memory), lambda g: None)
    path = tmp_path / "state"
    vector = np.ones((1, 32), np.float32)
    texts(lambda g, _: g.ctx.save_state(path), lambda g: path.read_bytes())
    texts(lambda g, _: g.ctx.memory.seq_rm(0, 20), lambda g: None)
    texts(lambda g, _: g.ctx.decode([5, 6]), lambda g: None)
    texts(lambda g, _: g.ctx.set_control_vector(vector), lambda g: None)
    texts(lambda g, _: g.ctx.keep_hidden(), lambda g: g.ctx.hidden.tobytes())
    texts(lambda g, stack: stack.enter_context(model.edit("l_out-0", lambda x: x * 0.5)) and None, lambda g: None)


@pytest.mark.parametrize("kind", ["stopping", "processor"])
def test_who_looks_while_a_token_is_chosen_finds_no_guesses(model: Model, tmp_path: Path, kind: str) -> None:
    """A stopping criterion, or a logits processor, which reads or saves the context."""
    seen: list[Any] = []
    for lookup in (True, False):
        ctx, path, found = model.new_context(128, n_threads=1), tmp_path / "state", list[Any]()

        def periodic(ids: Any, logits: Any) -> Any:
            logits[70 + len(ids) % 12] += 30
            return logits

        def look(ids: Any, logits: Any, ctx: Any = ctx, path: Any = path, found: Any = found) -> Any:
            if len(ids) % 7 == 0:
                ctx.save_state(path)
                found.append((ctx.memory.used, ctx.memory.seq_pos_max(0), path.read_bytes()))
            return logits if kind == "processor" else False

        processors = [periodic, look] if kind == "processor" else [periodic]
        chain = SamplerChain(SamplingParams(temp=0.0), model.vocab, processors)
        g = Generation(ctx, [5, 6], chain, 60, stopping=[look] if kind == "stopping" else [])
        seen.append((list(with_lookup(g) if lookup else g), found))
    assert seen[0] == seen[1]


def test_texts_that_take_turns_in_one_context(model: Model) -> None:
    """A text that goes on, or ends, leaves it to the other one to take its guesses back."""
    seen: list[Any] = []

    def periodic(ids: Any, logits: Any) -> Any:
        logits[70 + len(ids) % 12] += 30
        return logits

    for lookup in (True, False):
        ctx = model.new_context(128, n_threads=1)
        chains = [SamplerChain(SamplingParams(temp=0.0), model.vocab, [periodic]) for _ in range(2)]
        both = [Generation(ctx, [5, 6], chain, 40) for chain in chains]
        a, b = (iter(with_lookup(g) if lookup else g) for g in both)
        tokens = [[next(text) for _ in range(n)] for text, n in ((a, 28), (b, 28), (a, 3), (b, 2))]
        a.close()
        ctx.memory.seq_add(0, 0, -1, 1)
        seen.append([tokens, list(b), ctx.memory.cells, ctx.logits.tobytes()])
    assert seen[0] == seen[1]


def test_chats_look_up_all_that_was_said(model: Model) -> None:
    chats: list[Any] = []
    for lookup in (True, False):
        chain = SamplerChain(SamplingParams(temp=0.0, ignore_eos=True), model.vocab)
        chat = ChatSession(model.new_context(400, n_threads=1), chain, find_template("chatml", {}), "Be brief.", 40)
        chat.lookup = lookup
        chats.append([[t.text for t in chat.say("the cat and the dog")] for _ in range(2)])
        assert chat.generation is not None and isinstance(chat.generation, LookupGeneration) is lookup
        assert not lookup or len(chat.generation.before) > 40
    assert chats[0] == chats[1]


def test_llama(tiny: Path) -> None:
    answers: list[Any] = []
    for lookup in (True, False):
        llama = Llama(str(tiny), n_ctx=256, seed=3, verbose=False)
        got = [llama(PROMPT + " " + " dog" * i, max_tokens=50, temperature=0.0, lookup=lookup) for i in range(3)]
        answers.append([[a["choices"] for a in got], llama.n_tokens, np.array(llama.eval_logits).tobytes()])
    assert answers[0] == answers[1]


def test_it_never_leaves_its_cells(model: Model) -> None:
    """Of a text that shares the context with others, which have all the rest."""
    ids = []
    for lookup in (True, False):
        ctx = model.new_context(96, n_seq_max=2, n_threads=1)
        ctx.memory.seq_rm(1)
        chain = SamplerChain(SamplingParams(temp=0.0, ignore_eos=True), model.vocab)
        g = Generation(ctx, model.tokenize(PROMPT), chain, -1, n_cells=64)
        g = with_lookup(g) if lookup else g
        text = list(g)
        ids.append((g.ids, g.finish_reason, [t.text for t in text], ctx.memory.used, g.n_done))
    assert ids[0] == ids[1] and ids[0][1] == "length"


def test_not_twice(model: Model) -> None:
    with pytest.raises(gg.BatchError, match="the prompt is empty"):
        list(new_generation(model, [], 4))
    g = new_generation(model, PROMPT, 4)
    assert isinstance(g, LookupGeneration) and with_lookup(g) is g
