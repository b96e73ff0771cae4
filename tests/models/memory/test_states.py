"""Contexts of models with recurrent layers: what a decode that fails leaves, how far back a sequence goes, sequences
that share a state, generation with guesses, graphs that are used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyggml.models.memory.recurrent import RecurrentCells

from pyggml.dtypes import DType
from pyggml.errors import BatchError, GGMLError, KVCacheFull, ModelError
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.generate.drafters import Guess, ModelDrafter
from pyggml.llm.generate.prompt_cache import open_session, save_session
from pyggml.llm.generate.speculative import SpeculativeGeneration
from pyggml.llm.model import Model, load_model
from pyggml.llm.samplers import SamplerChain, SamplingParams
from pyggml.sched import Schedule

from ...random_model import write_random

SSM: dict[str, Any] = {"ssm.inner_size": 64, "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.time_step_rank": 4}
HEADS = {"attention.head_count": [4, 0, 0, 4], "attention.head_count_kv": [2, 0, 0, 2]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "recurrent": ("mamba2", {**SSM, "ssm.group_count": 2}),
    "hybrid": ("jamba", {**SSM, **HEADS}),
    "window": ("lfm2", {**HEADS, "shortconv.l_cache": 3, "attention.sliding_window": 6}),
}
IDS = [(i * 37 + 11) % 64 for i in range(30)]


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    arch, kv = MODELS[request.param]
    return load_model(write_random(tmp_path_factory.mktemp(arch) / "m.gguf", arch, kv), repack=False)


def new(model: Model, **kwargs: Any) -> LlamaContext:
    given = {"n_ctx": 64, "type_k": DType.F32, "type_v": DType.F32, "n_threads": 1, **kwargs}
    return model.new_context(given.pop("n_ctx"), **given)


def decode(ctx: LlamaContext, ids: list[int], seq: int = 0) -> np.ndarray:
    batch = Batch.prompt(ids, ctx.memory.seq_pos_max(seq) + 1, seq)
    batch.logits = [True] * len(ids)
    ctx.decode(batch)
    return ctx.logits.copy()


def equal(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def states_of(ctx: LlamaContext) -> RecurrentCells:
    assert ctx.memory.states is not None
    return ctx.memory.states


def test_the_end_of_the_last_decode_can_be_removed(model: Model) -> None:
    want = decode(new(model), IDS)
    ctx = new(model)
    decode(ctx, IDS[:12])
    decode(ctx, [5, 6, 7])
    before = str(ctx.memory)
    assert not ctx.memory.seq_rm(0, 13)
    assert not ctx.memory.seq_rm(0, 2, 5)
    assert not ctx.memory.seq_rm(-1, 5)
    assert str(ctx.memory) == before
    with pytest.raises(BatchError, match="continues at position 15"):
        ctx.decode(Batch.prompt([1], 13))
    if not ctx.memory.caches or not ctx.memory.caches[-1].n_swa:  # else the window has moved on, too
        assert ctx.memory.seq_rm(0, 12)
        equal(decode(ctx, IDS[12:20]), want[12:20])
        assert not ctx.memory.seq_rm(0, 11), "one decode back, and no further"
    assert ctx.memory.seq_rm(0)
    equal(decode(ctx, IDS[:5]), want[:5])


def test_a_decode_that_fails_changes_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    want = decode(new(model), IDS)
    ctx = new(model, n_ubatch=4, n_seq_max=2)
    decode(ctx, IDS[:10])
    before, states = str(ctx.memory), [rows[states_of(ctx).tail].copy() for rows in states_of(ctx).rows()]
    run, calls = Schedule.run, [0]

    def breaks(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return run(*args, **kwargs)

    monkeypatch.setattr(Schedule, "run", breaks)
    with pytest.raises(KeyboardInterrupt):
        decode(ctx, IDS[10:22])
    monkeypatch.undo()
    assert str(ctx.memory).partition(", kept")[0] == before.partition(", kept")[0]
    for rows, old in zip(states_of(ctx).rows(), states, strict=True):
        np.testing.assert_array_equal(rows[states_of(ctx).tail], old)
    with pytest.raises(KVCacheFull):
        ctx.decode(Batch.prompt([1] * 65, 10))
    with pytest.raises(BatchError, match="share tokens, but their states"):
        batch = Batch()
        batch.add(1, 10, [0])
        batch.add(2, 11, [0, 1])
        batch.pos[1], batch.seq_ids[0], batch.seq_ids[1] = 11, (0,), (0, 1)
        ctx.memory.seq_cp(0, 1)
        ctx.decode(Batch.prompt([3], 10, 1))
        ctx.decode(batch)
    equal(decode(ctx, IDS[10:]), want[10:])


def test_sequences_share_a_state_until_they_go_on(model: Model) -> None:
    ctx = new(model, n_seq_max=3)
    batch = Batch()
    for pos, token in enumerate(IDS[:8]):
        batch.add(token, pos, [0, 1])
    ctx.decode(batch)
    ctx.memory.seq_cp(1, 2)
    assert len(set(states_of(ctx).tail.tolist())) == 1
    texts = {0: [*IDS[:8], 1, 2, 3], 1: [*IDS[:8], 4], 2: [*IDS[:8], 5, 6]}
    batch = Batch()
    for seq, text in texts.items():
        for pos in range(8, len(text)):
            batch.add(text[pos], pos, seq, True)
    ctx.decode(batch)
    want = np.concatenate([decode(new(model), text)[8:] for text in texts.values()])
    equal(ctx.logits, want)
    assert len(set(states_of(ctx).tail.tolist())) == 3
    with pytest.raises(GGMLError, match="have no state"):
        ctx.memory.seq_cp(0, 2, 0, 5)
    ctx.memory.seq_keep(1)
    equal(decode(ctx, [9], 1), decode(new(model), [*texts[1], 9])[-1:])


def test_saved_sequence(model: Model, tmp_path: Path) -> None:
    first, second = new(model, n_seq_max=2), new(model, n_seq_max=3)
    decode(first, IDS[:6])
    decode(first, IDS[:9], 1)
    first.save_seq(tmp_path / "seq", 1)
    decode(second, IDS[5:10])
    assert second.load_seq(tmp_path / "seq", 2) == 2
    equal(decode(second, [3], 2), decode(first, [3], 1))
    first.save_state(tmp_path / "all")
    with pytest.raises(GGMLError, match="n_seq_max is 1"):
        new(model).load_state(tmp_path / "all")
    second.load_state(tmp_path / "all")
    equal(decode(second, [7]), decode(first, [7]))


def test_graphs_are_used_again(model: Model) -> None:
    ctx = new(model, n_seq_max=2)
    decode(ctx, IDS[:5])
    for token in IDS[5:9]:
        decode(ctx, [token])
    n = ctx.n_graphs
    for token in IDS[9:25]:
        decode(ctx, [token])
    assert ctx.n_graphs == n


class Guesses:
    """The right continuation, with errors."""

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def draft(self, tokens: Any, n: int) -> list[Guess]:
        at = len(tokens)
        ids = [t if i % 5 else (t + 1) % 64 for i, t in enumerate(self.text[at : at + n], at)]
        return [Guess(t) for t in ids]


def test_guesses_change_nothing(model: Model) -> None:
    def chain() -> SamplerChain:
        return SamplerChain(SamplingParams(temp=0.0), model.vocab)

    text = IDS[:7] + [t.id for t in model.stream(IDS[:7], 24, temp=0.0)]
    ctx = new(model)
    g = SpeculativeGeneration(ctx, IDS[:7], chain(), 24, drafter=Guesses(text), n_max=3)
    assert IDS[:7] + [t.id for t in g] == text
    assert 5 < g.stats.n_accepted < g.stats.n_drafted
    with pytest.raises(ModelError, match="cannot draft"):
        ModelDrafter(new(model), SamplingParams())


def test_several_generations(model: Model) -> None:
    prompts = [IDS[:5], IDS[3:12], IDS[:5], IDS[7:9]]
    got: list[list[int]] = [[] for _ in prompts]
    for i, token in model.stream_batch(prompts, 6, n_parallel=2, temp=0.0):
        got[i].append(token.id)
    assert got == [[t.id for t in model.stream(p, 6, temp=0.0)] for p in prompts]


def test_session_file(model: Model, tmp_path: Path) -> None:
    ctx = new(model)
    decode(ctx, IDS[:10])
    save_session(ctx, tmp_path / "s", IDS[:10])
    session = open_session(new(model), tmp_path / "s", IDS[:14])
    assert (session.n_matched, session.n_past) == (10, 10)
    session = open_session(new(model), tmp_path / "s", [*IDS[:8], 1])  # a state does not go back
    assert (session.n_matched, session.n_past) == (0, 0)
