"""Whenever a signal comes, an operation on a context is complete or was never begun."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.generate.generation import Generation
from pyggml.llm.generate.long_context import LongContext
from pyggml.llm.generate.prompt_cache import open_session, save_session
from pyggml.llm.generate.speculative import with_draft
from pyggml.llm.interrupt import uninterrupted
from pyggml.llm.model import Model, load_model
from pyggml.llm.samplers import SamplerChain, SamplingParams

from ..models.memory.test_iswa import windowed
from ..tiny_model import write_gguf
from .interrupts import N_SEQ, Lockstep, alarm, ctrl_c, interrupted


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("signals") / "m.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return load_model(path)


def new(model: Model, **kwargs: object) -> LlamaContext:
    return model.new_context(
        **{"n_ctx": 64, "n_ubatch": 7, "n_batch": 64, "n_seq_max": N_SEQ, "n_threads": 1, **kwargs}
    )


@pytest.mark.parametrize("come", [ctrl_c, alarm])
@pytest.mark.parametrize("kind", ["plain", "flash", "window"])
def test_operations(path: Path, model: Model, kind: str, come: Callable[[], None]) -> None:
    window = windowed(path, 8, 2)
    make = {
        "plain": lambda: new(model),
        "flash": lambda: new(model, flash_attn=True),
        "window": lambda: new(window, n_ctx=128),
    }[kind]
    steps = Lockstep(make, random.Random(f"{kind} {come}"), plain=kind != "window")
    for _ in range(60):
        steps.step(come)
    assert steps.n_interrupted > 10


def test_generations(model: Model) -> None:
    """What is evaluated is the prompt and all ids, or all but the last; a broken one can be gone on with."""
    rng = random.Random(5)
    params = SamplingParams(temp=0, ignore_eos=True)
    want = [t.id for t in Generation(new(model), [1, 5, 6], SamplerChain(params, model.vocab), 12)]
    n_broken = 0
    for i in range(40):
        ctx = new(model, n_seq_max=1)
        g = Generation(ctx, [1, 5, 6], SamplerChain(params, model.vocab), 12)
        if i % 2:
            g = with_draft(g, model if i % 4 == 1 else None, draft_max=4)
        broken, _ = interrupted(lambda g=g: list(g), rng.randrange(1, 30000), ctrl_c)
        n_broken += broken
        g.rest()
        assert g.ids == want[: len(g.ids)]
        n_past = ctx.memory.seq_pos_max(0) + 1
        ids = [1, 5, 6, *g.ids]
        assert n_past in (0, 3, len(ids) - 1, len(ids))
        if n_past >= 3:
            rest = Generation(
                ctx,
                want[n_past - 3 : n_past - 2] if n_past - 3 < len(want) else [],
                SamplerChain(params, model.vocab),
                3,
            )
            if rest.prompt and n_past - 3 + 4 <= len(want):
                assert [t.id for t in rest] == want[n_past - 2 : n_past + 1]
    assert n_broken > 10


def test_context_shift_and_self_extend(model: Model) -> None:
    """Positions are those before or those after."""
    rng = random.Random(6)

    def cells(make: dict[str, int], at: int) -> tuple[bool, list[tuple[int, int]]]:
        ctx = new(model, n_seq_max=1)
        ctx.decode(list(range(3, 62)))
        long = LongContext(ctx, **make)
        broken, n = interrupted(lambda: long.make_room(6), at, ctrl_c)
        seen.append(n)
        return broken, [(i, c.pos) for i, c in enumerate(ctx.memory.cells) if c.pos >= 0]

    for make in ({"n_keep": 4}, {"grp_attn_n": 4, "grp_attn_w": 8}):
        seen: list[int] = []
        _, after = cells(make, 0)
        before = [(i, i) for i in range(59)]
        for _ in range(25):
            broken, now = cells(make, rng.randrange(1, seen[0]))
            if "n_keep" in make or not broken:
                assert now in (before, after)
            assert len({p for _, p in now}) == len(now) or "grp_attn_n" in make


def test_sessions(model: Model, tmp_path: Path) -> None:
    """After an interrupted load the context holds what it held, the whole session, or its beginning."""
    tokens = list(range(3, 33))
    first = new(model, n_seq_max=1)
    first.decode(tokens)
    save_session(first, tmp_path / "s", tokens)
    rng, n = random.Random(7), 4000
    for _ in range(25):
        ctx = new(model, n_seq_max=1)
        ctx.decode([9, 8])
        broken, seen = interrupted(
            lambda ctx=ctx: open_session(ctx, tmp_path / "s", [*tokens[:20], 99]), rng.randrange(1, n), ctrl_c
        )
        n = n if broken else seen
        assert ctx.memory.used in (2, 30, 20)
        pos = ctx.memory.used
        ctx.decode(Batch.one(5, pos))
        if pos > 2:
            other = new(model, n_seq_max=1)
            other.decode([*tokens[:pos], 5])
            assert abs(ctx.logits - other.logits).max() < 1e-2


def test_a_signal_that_waited_is_told_once() -> None:
    """The reader of set_wakeup_fd (asyncio) hears of it as it comes; the handler is called behind the block."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    came: list[int] = []
    old, fd = signal.signal(signal.SIGINT, lambda number, _: came.append(number)), signal.set_wakeup_fd(write)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert not came
        assert came == [signal.SIGINT]
        assert os.read(read, 8) == bytes([signal.SIGINT])
    finally:
        signal.set_wakeup_fd(fd)
        signal.signal(signal.SIGINT, old)
        os.close(read)
        os.close(write)
