"""The cells of each sequence ascend in position after whatever happened, and its logits have the bits of a context in
which it was alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyggml.errors import KVCacheFull
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, load_model
from pyggml.llm.state.save_load import load_seq_bytes, load_state_bytes, seq_bytes, state_bytes

from ...tiny_model import write_gguf
from .test_iswa import windowed

N_SEQ = 3
seqs = st.integers(0, N_SEQ - 1)
steps = st.one_of(
    st.tuples(st.just("decode"), seqs, st.sampled_from([1, 1, 1, 2, 5, 17])),
    st.tuples(st.just("decode"), seqs, st.sampled_from([1, 3, 30])),
    st.tuples(st.just("rm"), seqs, st.integers(0, 12)),
    st.tuples(st.just("cp"), seqs, seqs),
    st.tuples(st.just("shift"), seqs),
    st.tuples(st.just("divide"), seqs),
    st.tuples(st.just("forget"), seqs),
    st.tuples(st.just("fail"), seqs),
    st.tuples(st.just("save"), st.booleans(), seqs),
    st.tuples(st.just("defrag")),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("two") / "two.gguf", {"llama.block_count": 2})


def new(model: Model, flash_attn: bool) -> LlamaContext:
    return model.new_context(n_ctx=64, n_batch=32, n_ubatch=8, n_seq_max=N_SEQ, n_threads=1, flash_attn=flash_attn)


def run(ctx: LlamaContext, seq: int, op: tuple[Any, ...]) -> None:
    """An operation on one sequence."""
    m = ctx.memory
    match op:
        case ("decode", first, n):
            batch = Batch.prompt([(first + 7 * i) % 250 + 3 for i in range(n)], m.seq_pos_max(seq) + 1, seq)
            ctx.decode(batch)
        case ("rm", p0):
            m.seq_rm(seq, p0)
        case ("shift", n):
            m.seq_rm(seq, 2, 2 + n)
            m.seq_add(seq, 2 + n, -1, -n)
        case _:
            m.seq_div(seq, 4, 8, 2)


def in_order(ctx: LlamaContext) -> None:
    ctx.update()
    for cache in ctx.memory.caches:
        for row in cache.seq:
            assert (np.diff(cache.pos[row]) >= 0).all()


@pytest.mark.parametrize("kind", ["all", "flash", "window"])
def test_sequences_stay_in_order_and_results_are_those_of_a_sequence_alone(path: Path, kind: str) -> None:
    model, flash = windowed(path, 12, 2) if kind == "window" else load_model(path), kind == "flash"

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(st.lists(steps, min_size=4, max_size=14))
    def of_any_history(history: list[tuple[Any, ...]]) -> None:
        ctx = new(model, flash)
        done: list[list[tuple[Any, ...]]] = [[] for _ in range(N_SEQ)]  # what happened to each sequence

        def apply(seq: int, *op: Any) -> None:
            try:
                run(ctx, seq, op)
            except KVCacheFull:
                return
            done[seq].append(op)

        for number, (name, *args) in enumerate(history):
            match name, *args:
                case "decode", seq, n:
                    apply(seq, "decode", number, n)
                case "rm", seq, back:
                    p0 = max(ctx.memory.seq_pos_max(seq) + 1 - back, 0)
                    if ctx.memory.can_remove(seq, p0):
                        apply(seq, "rm", p0)
                case "cp", src, dst:
                    if src != dst and ctx.memory.seq_rm(dst):
                        ctx.memory.seq_cp(src, dst)
                        done[dst] = list(done[src])
                case "shift", seq:
                    shared = (ctx.memory.caches[0].seq[:, ctx.memory.caches[0].seq[seq]].sum(axis=0) > 1).any()
                    if kind != "window" and not shared and ctx.memory.seq_pos_max(seq) > 8:
                        apply(seq, "shift", 4)
                case "divide", seq:
                    shared = (ctx.memory.caches[0].seq[:, ctx.memory.caches[0].seq[seq]].sum(axis=0) > 1).any()
                    if kind != "window" and not shared:
                        apply(seq, "divide")
                case "forget", seq:
                    ctx.memory.seq_rm(seq)
                    done[seq] = []
                case "fail", seq:
                    cells = ctx.memory.cells
                    if ctx.memory.size - ctx.memory.used >= ctx.n_batch:
                        continue
                    with pytest.raises(KVCacheFull):
                        run(ctx, seq, ("decode", 1, ctx.memory.size - ctx.memory.used + 1))
                    assert ctx.memory.cells == cells
                case "save", whole, seq:
                    if whole:
                        data, ctx = state_bytes(ctx), new(model, flash)
                        load_state_bytes(ctx, data)
                    else:
                        data = seq_bytes(ctx, seq)
                        ctx.memory.seq_rm(seq)
                        load_seq_bytes(ctx, data, seq)
                case _:
                    ctx.memory.defrag()
            in_order(ctx)
        for seq in range(N_SEQ):
            apply(seq, "decode", 99, 3)
            in_order(ctx)
            if not done[seq] or done[seq][-1] != ("decode", 99, 3):
                continue
            alone = new(model, flash)
            for op in done[seq]:
                run(alone, 1, op)
                alone.update()  # K is turned after each shift, as it was there
            assert alone.logits.tobytes() == ctx.logits.tobytes(), (seq, done[seq])

    of_any_history()


def test_an_order_that_is_lost_is_restored(path: Path) -> None:
    """Sequence 1 gets the beginning of sequence 0, whose cells lie behind its own."""
    ctx = new(load_model(path), False)
    ctx.decode(Batch.prompt([5, 6], 4, 1))
    ctx.decode([7, 8, 9, 10])
    ctx.memory.seq_cp(0, 1)
    assert ctx.memory.caches[0].wants_defrag
    in_order(ctx)
    assert ctx.memory.caches[0].pos[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert ctx.memory.caches[0].owner[:6].tolist() == [-2, -2, -2, -2, 1, 1]
