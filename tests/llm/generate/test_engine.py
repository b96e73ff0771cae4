"""An engine with several generations in flight: submitted and cancelled while others are under way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyggml.llm.context import LlamaContext
from pyggml.llm.generate.engine import Engine
from pyggml.llm.generate.generation import Generation
from pyggml.llm.generate.long_context import LongContext
from pyggml.llm.model import Model, load_model
from pyggml.llm.samplers import SamplerChain, SamplingParams

PROMPTS = ["a", "the quick brown fox", "hello", "xyz" * 9, "what is it?"]
N = 12  # tokens of each


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


@pytest.fixture
def ctx(model: Model) -> Iterator[LlamaContext]:
    with model.new_context(256, n_seq_max=3, n_batch=8, n_threads=1) as ctx:
        yield ctx


def generation(ctx: LlamaContext, prompt: str, n: int = N) -> Generation:
    """A generation that may have its place beside others."""
    ids = ctx.model.tokenize(prompt)
    chain = SamplerChain(SamplingParams(temp=0.0, ignore_eos=True), ctx.model.vocab)
    return Generation(ctx, ids, chain, n, n_cells=len(ids) + n)


def alone(model: Model, prompt: str, n: int = N) -> list[int]:
    return [t.id for t in model.stream(prompt, n, temp=0.0, ignore_eos=True, n_threads=1)]


def test_a_generation_may_be_submitted_at_any_time(model: Model, ctx: LlamaContext) -> None:
    gs = [generation(ctx, p) for p in PROMPTS]
    engine = Engine(ctx, gs[:1])
    later = iter(gs[1:])
    for n, _ in enumerate(engine.run()):
        if n % 5 == 1 and (g := next(later, None)) is not None:  # the others come while the first ones are under way
            engine.submit(g)
    assert [g.ids for g in gs] == [alone(model, p) for p in PROMPTS] and not engine.busy


def test_an_idle_engine_takes_up_what_is_submitted(model: Model, ctx: LlamaContext) -> None:
    engine = Engine(ctx)
    assert not engine.busy and not list(engine.run()) and not list(engine.step())
    for prompt in PROMPTS:
        g = generation(ctx, prompt)
        engine.submit(g)
        assert engine.busy and [t.id for _, t in engine.run()] == g.ids == alone(model, prompt)
    again = generation(ctx, PROMPTS[-1] + " no")  # what an ended one has evaluated alike is there
    engine.submit(again)
    assert [t.id for _, t in engine.run()] == alone(model, PROMPTS[-1] + " no")
    assert again.n_past == len(model.tokenize(PROMPTS[-1]))


@pytest.mark.parametrize("which", range(3))
def test_a_generation_that_is_cancelled_frees_its_cells(model: Model, ctx: LlamaContext, which: int) -> None:
    """The others go on as if it had not been there, and its sequence is given to one that waits."""
    gs = [generation(ctx, p) for p in PROMPTS]
    engine = Engine(ctx, gs)
    got = 0
    for g, _ in engine.run():
        got += g is gs[which]
        if g is gs[which] and got == 4:  # it has just chosen its fourth token
            seq = g.seq
            engine.cancel(g)
            assert ctx.memory.seq_pos_max(seq) == -1 and not any(seq in c.seq_id for c in ctx.memory.cells)
    assert got == 4 and gs[which].finish_reason is None and gs[which].ids == alone(model, PROMPTS[which])[:4]
    for i, g in enumerate(gs):
        if i != which:
            assert g.ids == alone(model, PROMPTS[i]) and g.finish_reason == "length"


def test_cancelling_others_in_the_midst_of_a_step(model: Model, ctx: LlamaContext) -> None:
    """Those whose turn is still to come get none; those that wait never begin; one that has ended stays as it is."""
    gs = [generation(ctx, p, 3 if i == 0 else N) for i, p in enumerate(PROMPTS)]
    engine = Engine(ctx, gs)
    told: list[int] = []
    for g, token in engine.run():
        told.append(gs.index(g))
        if g is gs[0] and token.finish_reason is not None:
            for other in (gs[1], gs[3], gs[4], g):
                engine.cancel(other)
            engine.cancel(gs[1])  # again
            told.clear()
    assert set(told) == {2} and gs[2].ids == alone(model, PROMPTS[2])
    assert len(gs[1].ids) < N and not gs[3].ids and not gs[4].ids and gs[0].finish_reason == "length"
    assert ctx.memory.seq_pos_max(1) == -1


def test_any_number_may_be_cancelled(model: Model, ctx: LlamaContext) -> None:
    """A server lives long, and clients leave all the time: nothing stays of what was cancelled."""
    engine, left = Engine(ctx), weakref.WeakSet[Generation]()
    for _ in range(20):
        g = generation(ctx, "a")
        left.add(g)
        engine.submit(g)
        engine.cancel(g)
    for _ in range(100_000):  # each of them was asked again when the engine looked for more: as many calls in C
        engine.cancel(g)
    last = generation(ctx, "hello")
    engine.submit(last)
    assert [t.id for _, t in engine.run()] == alone(model, "hello")
    del g
    gc.collect()
    assert not left


def test_a_prompt_is_cancelled_between_its_batches(model: Model, ctx: LlamaContext) -> None:
    long, short = generation(ctx, "xyz" * 20), generation(ctx, "a")
    engine = Engine(ctx, [long])
    for _ in range(4):  # it begins, and three batches of eight are evaluated
        assert not list(engine.step())
    assert long.n_done == ctx.memory.used == 24
    engine.cancel(long)
    assert ctx.memory.used == 0 and not engine.busy
    engine.submit(short)
    while engine.busy:
        assert all(g is short for g, _ in engine.step())
    assert not long.ids and short.ids == alone(model, "a")


def test_nobody_waits_for_a_beginning_that_was_cancelled(model: Model, ctx: LlamaContext) -> None:
    """The text of a cancelled generation stands in its slot, but nobody evaluates it any more."""
    first, again = generation(ctx, "xyz" * 20), generation(ctx, "xyz" * 20)
    engine = Engine(ctx, [first])
    for _ in range(4):
        list(engine.step())
    engine.cancel(first)
    engine.submit(again)
    for _ in range(40):
        list(engine.step())
    assert not engine.busy and again.ids == alone(model, "xyz" * 20)


def test_nobody_waits_for_a_beginning_that_was_dropped(model: Model, ctx: LlamaContext) -> None:
    """A text that is shifted never holds its beginning again: one that begins alike would wait until it ends, and
    all behind it."""
    endless, again = generation(ctx, "xyz" * 10, 150), generation(ctx, "xyz" * 10)
    endless.n_cells = 64
    endless.long = LongContext(ctx, n_cells=64)
    engine = Engine(ctx, [endless])
    while not endless.long.moved:
        list(engine.step())
    engine.submit(again)
    for _ in range(30):
        list(engine.step())
    assert again.ids == alone(model, "xyz" * 10) and endless.finish_reason is None


def test_a_prompt_comes_to_its_turn_however_many_others_come(model: Model, ctx: LlamaContext) -> None:
    """Prompts that fill a batch, one after the other in a slot before it, hold a prompt up by half."""
    engine, patient, n_steps = Engine(ctx), generation(ctx, "xyz" * 10), 0
    patient.wants_seq = 1
    while patient.finish_reason is None:
        if not engine.slots or engine.slots[0].ended:
            engine.submit(g := generation(ctx, "x" * 60, 1))
            g.wants_seq, g.reuses, g.prompt = 0, False, g.prompt[:48]
        if n_steps == 1:
            engine.submit(patient)
        list(engine.step())
        n_steps += 1
        assert n_steps < 100
    assert patient.ids == alone(model, "xyz" * 10)


def test_one_that_has_the_context_to_itself_leaves_what_it_evaluated(model: Model, ctx: LlamaContext) -> None:
    chain = SamplerChain(SamplingParams(temp=0.0, ignore_eos=True), model.vocab)
    g = Generation(ctx, model.tokenize("hello"), chain, N)
    engine = Engine(ctx, [g])
    for _ in engine.run():
        if len(g.ids) == 3:
            engine.cancel(g)
    assert g.ids == alone(model, "hello")[:3]
    assert ctx.memory.seq_pos_max(0) + 1 == len(g.prompt) + 2


def test_any_order_of_submissions_and_cancellations(model: Model, ctx: LlamaContext) -> None:
    """Whatever is done in between, a generation has the tokens that it has alone, all of them if not cancelled."""
    rng = np.random.default_rng(8)
    expected = {p: alone(model, p) for p in PROMPTS}
    for _ in range(10):
        engine, gs, cancelled = Engine(ctx), list[tuple[str, Generation]](), set[Generation]()
        for _ in range(40):
            act = rng.random()
            if act < 0.3:
                prompt = PROMPTS[rng.integers(len(PROMPTS))]
                gs.append((prompt, generation(ctx, prompt)))
                engine.submit(gs[-1][1])
            elif act < 0.4 and gs:
                g = gs[rng.integers(len(gs))][1]
                if g.finish_reason is None:
                    cancelled.add(g)
                engine.cancel(g)
            else:
                assert not cancelled & {g for g, _ in engine.step()}
        assert not cancelled & {g for g, _ in engine.run()}
        for prompt, g in gs:
            whole = expected[prompt]
            assert g.ids == (whole[: len(g.ids)] if g in cancelled else whole)
        ctx.memory.clear()


def test_prompts_in_company_need_few_graphs(model: Model) -> None:
    """A graph serves a range of sizes: of one token, of 2, of 3 and 4, ..., of up to 128."""
    with model.new_context(1024, n_seq_max=6, n_threads=1, n_ubatch=128) as ctx:
        texts = [("quick brown foxes and hens"[: 3 + i] * (1 + i % 4), 3 + i % 5) for i in range(24)]
        gs = [generation(ctx, *text) for text in texts]
        for _ in Engine(ctx, gs).run():
            pass
        assert [g.ids for g in gs] == [alone(model, *text) for text in texts]
        assert ctx.n_graphs <= 8
