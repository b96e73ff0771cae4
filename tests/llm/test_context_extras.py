"""What a context has beside decoding: embeddings as input, counters, warming up, models that are not causal."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyggml.errors import BatchError
from pyggml.graph import Graph
from pyggml.llm.batch import Batch
from pyggml.llm.model import Model, load_model
from pyggml.sched import Schedule, Scheduler

from .test_context import IDS, ROUNDING, all_logits, new, nmse, state


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


@pytest.mark.parametrize("n_ubatch", [5, 64])
def test_embeddings_as_input(model: Model, n_ubatch: int) -> None:
    """The rows of token_embd in the place of the tokens give the tokens' logits."""
    expected = all_logits(new(model), IDS)
    table = model.tensors["token_embd.weight"].numpy()
    ctx = new(model, n_ubatch=n_ubatch)
    batch = Batch()
    for i, t in enumerate(IDS):
        batch.add_embd(table[t], i, 0, i % 2 == 1)
    ctx.decode(batch)
    assert nmse(ctx.logits, expected[1::2]) < ROUNDING
    ctx.decode([9])  # tokens and embeddings may take turns
    tokens = new(model)
    tokens.decode([*IDS, 9])
    assert nmse(ctx.logits, tokens.logits) < ROUNDING
    batch.clear()
    batch.add_embd(np.ones(31), 13)
    with pytest.raises(BatchError, match="embeddings of 31 numbers, but n_embd is 32"):
        ctx.decode(batch)
    assert ctx.memory.used == 13


def test_the_graph_of_embeddings_has_them_as_a_leaf(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = new(model)
    graphs: list[Graph] = []
    alloc = Scheduler.alloc

    def noted(self: Scheduler, graph: Graph) -> Schedule:
        graphs.append(graph)
        return alloc(self, graph)

    monkeypatch.setattr(Scheduler, "alloc", noted)
    batch = Batch()
    for i in range(4):
        batch.add_embd(np.ones(32), i, logits=i == 3)
    ctx.decode(batch)
    (g,) = graphs
    ctx.memory.clear()
    leaf = g.get_tensor("inp_embd")
    assert leaf is not None and leaf.op == "none" and leaf.ne[0] == 32 and int(leaf.ne[1]) == 4
    assert g.get_tensor("inp_tokens") is None
    assert g.n_nodes == ctx.build_graph(4).n_nodes - 1


# -- counters --------------------------------------------------------------------------------------------------------


def test_counters(model: Model) -> None:
    ctx = new(model)
    ctx.warmup()
    p = ctx.perf()
    assert (p.n_p_eval, p.n_eval, p.n_sample, p.n_queued, p.t_load_ms) == (0, 0, 0, 0, 0)
    ctx.decode(IDS)
    for t in range(3):
        start = time.perf_counter()
        ctx.decode([t])
        ctx.perf_sampled(start)
    with pytest.raises(BatchError):
        ctx.decode([-1])
    p = ctx.perf()
    assert (p.n_p_eval, p.n_eval, p.n_sample, p.n_queued) == (12, 3, 3, 0)
    assert 0 < p.t_eval_ms < 1e4 and 0 < p.t_p_eval_ms <= p.t_load_ms and p.t_sample_ms >= p.t_eval_ms
    lines = str(p).splitlines()
    assert [line.split()[0] for line in lines] == ["load", "sampling", "prompt", "eval", "total"]
    assert "12 tokens" in lines[2] and "3 runs" in lines[3] and "15 tokens" in lines[4]
    ctx.decode([1])
    assert p.n_eval == 3 and ctx.perf().n_eval == 4
    ctx.perf_reset()
    assert ctx.perf().n_p_eval == ctx.perf().n_eval == 0


def test_warmup_leaves_everything_as_it_was(model: Model) -> None:
    ctx, expected = new(model, n_ctx=32), new(model, n_ctx=32)
    for c in (ctx, expected):
        c.decode(IDS)
    before, logits = state(ctx), ctx.logits.copy()
    ctx.warmup()
    assert state(ctx) == before and (ctx.logits == logits).all()
    for c in (ctx, expected):
        c.decode([7] * 20)
    assert nmse(ctx.logits, expected.logits) < ROUNDING
    ctx.warmup()  # no room: nothing to do
    assert ctx.memory.used == 32


def test_non_causal(model: Model) -> None:
    """Every token sees all of the batch: with all tokens alike, so are all rows of the first layers' K q."""
    other = load_model(model.path)
    other.__dict__["hparams"] = replace(other.hparams, causal_attn=False)
    ctx = new(other, n_ubatch=8)
    got = all_logits(ctx, IDS[:8])
    swapped = all_logits(new(other, n_ubatch=8), [*IDS[:7], 99])
    assert nmse(got[:1], swapped[:1]) > 1e-4  # the first token sees the last
    assert nmse(all_logits(new(model), IDS[:8])[:1], all_logits(new(model), [*IDS[:7], 99])[:1]) < ROUNDING
    with pytest.raises(BatchError, match="9 tokens that all see each other"):
        ctx.decode(IDS[:9])


@pytest.mark.parametrize("flash_attn", [False, True])
def test_alibi(model: Model, flash_attn: bool) -> None:
    """Distances enter: logits differ from those without, do not depend on where the sequence starts, nor on splits."""
    other = load_model(model.path)
    other.__dict__["hparams"] = replace(other.hparams, f_max_alibi_bias=8.0)
    whole = all_logits(new(other), IDS)
    assert nmse(whole, all_logits(new(model), IDS)) > 1e-4
    assert nmse(all_logits(new(other, flash_attn=flash_attn, n_ubatch=5), IDS), whole) < 1e-11
    assert nmse(all_logits(new(other), IDS, 0, 20), whole) < 1e-10
