"""Context shift and self-extend, against lists of tokens and their positions.

The model has one layer: K and V of a token depend on nothing before it, so that what was dropped can be left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml.dtypes import DType
from pyggml.errors import GGMLError, KVCacheFull
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.generate.generation import Generation
from pyggml.llm.generate.long_context import LongContext, tokens_to_keep
from pyggml.llm.model import Model, load_model
from pyggml.llm.samplers import SamplerChain, SamplingParams

from ...plain_llama import Plain, nmse
from ...tiny_model import write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_gguf(tmp_path_factory.mktemp("one") / "m.gguf", kv={"llama.block_count": 1}))


def new(model: Model, n_ctx: int = 32, **kwargs: Any) -> LlamaContext:
    return model.new_context(n_ctx, type_k=DType.F32, type_v=DType.F32, n_threads=1, **kwargs)


def tokens(n: int) -> list[int]:
    return np.random.default_rng(3).integers(3, 259, n).tolist()


@pytest.mark.parametrize(("n_keep", "n_discard"), [(0, 0), (4, 0), (4, 7), (1, 100)])
def test_context_shift(model: Model, n_keep: int, n_discard: int) -> None:
    ctx, plain, text, shifts = new(model), Plain(model), list[int](), 0
    long = LongContext(ctx, n_keep, n_discard)
    for token in tokens(150):
        if len(text) + 1 >= 32:
            end = n_keep + min(n_discard or (len(text) - n_keep) // 2, len(text) - n_keep)
            text, shifts = text[:n_keep] + text[end:], shifts + 1
        assert long.make_room()
        ctx.decode([token])
        text.append(token)
        assert ctx.memory.used == len(text) == ctx.memory.seq_pos_max(0) + 1
        assert nmse(ctx.logits[0], plain.logits(np.array(text), np.arange(len(text)))[-1]) < 1e-11
    assert shifts >= 4 and long.moved


@pytest.mark.parametrize(("n", "w"), [(2, 8), (4, 8), (3, 12), (8, 8)])
def test_self_extend(model: Model, n: int, w: int) -> None:
    """With N tokens there are N // w complete windows, whose tokens have their place divided by n as position."""
    ctx, whole, plain, text = new(model, 96), new(model, 96), Plain(model), tokens(80)
    long, other = (LongContext(c, grp_attn_n=n, grp_attn_w=w) for c in (ctx, whole))
    for i, token in enumerate(text):
        assert long.make_room()
        windows = i // w
        pos = [p // n if p < windows * w else p - windows * (w - w // n) for p in range(i + 1)]
        ctx.decode([token])
        assert ctx.memory.caches[0].pos[: i + 1].tolist() == pos
        assert nmse(ctx.logits[0], plain.logits(np.array(text[: i + 1]), np.array(pos))[-1]) < 1e-11
    for part in other.parts(text):
        whole.decode(part)
    assert whole.memory.cells == ctx.memory.cells and nmse(whole.logits, ctx.logits) < 1e-11


def test_where_there_is_no_room(model: Model) -> None:
    ctx = new(model)
    ctx.decode(tokens(30))
    assert LongContext(ctx, context_shift=False).make_room()
    ctx.decode([5])
    for long in (LongContext(ctx, context_shift=False), LongContext(ctx, n_keep=31), LongContext(ctx, n_keep=30)):
        assert not long.make_room() and not long.moved
    assert not LongContext(ctx).make_room(20) and LongContext(ctx).make_room(10)
    full = new(model)
    full.decode(tokens(32))
    assert not LongContext(full, grp_attn_n=2, grp_attn_w=8).make_room()  # grouping frees no cells
    with pytest.raises(KVCacheFull):
        list(Generation(new(model), tokens(33), greedy(model), long=LongContext(new(model))))


def greedy(model: Model) -> SamplerChain:
    return SamplerChain(SamplingParams(temp=0, ignore_eos=True), model.vocab)


def test_generation_without_end(model: Model) -> None:
    ctx = new(model)
    assert len(list(Generation(ctx, tokens(8), greedy(model), 100))) < 32
    ctx = new(model)
    g = Generation(ctx, tokens(8), greedy(model), 100, long=LongContext(ctx, n_keep=8))
    assert len(list(g)) == 100 and g.finish_reason == "length"
    assert ctx.memory.used < 32
    ctx = new(model)
    g = Generation(ctx, tokens(8), greedy(model), -1, long=LongContext(ctx, context_shift=False))
    assert len(list(g)) == 24 and g.finish_reason == "length"


@pytest.mark.parametrize(
    ("n_keep", "n_prompt", "add_bos", "expected"),
    [(0, 5, True, 1), (0, 5, False, 0), (2, 5, True, 3), (5, 5, True, 5), (-1, 5, True, 5), (9, 5, False, 5)],
)
def test_tokens_to_keep(n_keep: int, n_prompt: int, add_bos: bool, expected: int) -> None:
    assert tokens_to_keep(n_keep, n_prompt, add_bos) == expected


@pytest.mark.parametrize(
    "options", [{"grp_attn_n": 0}, {"grp_attn_n": 3, "grp_attn_w": 8}, {"grp_attn_n": 4, "grp_attn_w": 0}]
)
def test_bad_windows(model: Model, options: dict[str, int]) -> None:
    with pytest.raises(GGMLError, match="is not a multiple of the group size"):
        LongContext(new(model), **options)


def test_bad_sizes(model: Model) -> None:
    with pytest.raises(GGMLError, match="must not be negative"):
        LongContext(new(model), n_keep=-1)


def test_parallel_sequences_with_a_shared_prompt(tiny: Path) -> None:
    """n sequences decoded together say what n separate contexts say."""
    model = load_model(tiny)
    prompt, ctx = tokens(20), model.new_context(128, n_seq_max=8, type_k=DType.F32, type_v=DType.F32, n_threads=1)
    ctx.decode(prompt)
    for s in range(1, 8):
        ctx.memory.seq_cp(0, s)
    assert ctx.memory.used == 20
    alone = [new(model, 64) for _ in range(8)]
    for c in alone:
        c.decode(prompt)
    for i in range(10):
        batch = Batch()
        for s in range(8):
            batch.add(3 + 10 * s + i, 20 + i, s, True)
        ctx.decode(batch)
        for s, c in enumerate(alone):
            c.decode([3 + 10 * s + i])
            assert nmse(ctx.logits[s], c.logits[0]) < 1e-12
