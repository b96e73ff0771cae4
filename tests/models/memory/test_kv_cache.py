"""What the cache stores: types, sizes, K moved by positions, cells moved by defragmentation, the picture of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyggml.models.hparams import HParams
from pyggml.models.memory.kv_cache import KVCache
from pyggml.models.memory.kv_rows import kv_rows

from pyggml.dtypes import CACHE_TYPES, DType
from pyggml.errors import ModelError
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, load_model

from ...plain_llama import take
from ...tiny_model import write_gguf

IDS = [1, 70, 68, 80, 111, 35, 114, 100, 103, 35, 120, 115, 33, 97, 108, 44, 52, 10, 9, 71]
# NMSE of logits with K and V in a type: what its rounding alone costs. q8_0 keeps 8 bits, q5 5, q4 4 of each value.
NOISE = {
    DType.F32: 1e-11,
    DType.F16: 1e-6,
    DType.BF16: 1e-4,
    DType.Q8_0: 1e-3,
    DType.Q5_0: 2e-2,
    DType.Q5_1: 2e-2,
    DType.Q4_0: 8e-2,
    DType.Q4_1: 8e-2,
    DType.IQ4_NL: 8e-2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Heads of 32: whole blocks of every type."""
    kv = {"llama.embedding_length": 128}
    return load_model(write_gguf(tmp_path_factory.mktemp("wide") / "wide.gguf", kv))


def new(model: Model, **kwargs: object) -> LlamaContext:
    return model.new_context(**{"n_ctx": 64, "type_k": DType.F32, "type_v": DType.F32, "n_threads": 1, **kwargs})


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a.astype(np.float64) - b) ** 2).sum() / (b.astype(np.float64) ** 2).sum())


def all_logits(ctx: LlamaContext) -> np.ndarray:
    batch = Batch.prompt(IDS)
    batch.logits = [True] * len(IDS)
    ctx.decode(batch)
    return ctx.logits


def test_all_types_of_the_issue_are_there() -> None:
    names = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"]
    assert {t.name for t in CACHE_TYPES} == set(names) == {t.name for t in NOISE}


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("dtype", CACHE_TYPES, ids=lambda t: t.name)
def test_types(model: Model, dtype: DType, flash_attn: bool) -> None:
    expected = all_logits(new(model))
    type_v = DType.F32 if dtype.is_quantized and not flash_attn else dtype
    ctx = new(model, type_k=dtype, type_v=type_v, flash_attn=flash_attn)
    assert nmse(all_logits(ctx), expected) < NOISE[dtype]
    ref = new(model, type_k=dtype, type_v=type_v, flash_attn=flash_attn, backend="ref")
    assert nmse(all_logits(ref), ctx.logits) < max(1e-11, NOISE[dtype] / 10)  # a value may round the other way


def test_types_that_cannot_be_stored(model: Model, tiny: Path) -> None:
    for kwargs, text in (
        ({"type_k": DType.Q4_K}, "type_k = Q4_K: a KV cache stores F32, F16, BF16, Q8_0"),
        ({"type_v": DType.I32}, "type_v = I32: a KV cache stores"),
        ({"type_v": DType.Q4_0}, "type_v = Q4_0: V is transposed without flash_attn=True"),
    ):
        with pytest.raises(ModelError, match=text):
            new(model, **kwargs)
    with pytest.raises(ModelError, match="type_k = Q8_0: heads of 8 are not whole blocks of 32"):
        new(load_model(tiny), type_k=DType.Q8_0)


def test_size_formula() -> None:
    hp = HParams(n_vocab=32000, n_embd=4096, n_layer=32, n_head=32, n_ff=11008, n_ctx_train=4096)
    kv = KVCache(hp, 512)
    assert kv.nbytes == 512 * 32 * (32 * 128 + 32 * 128) * 2 == 256 << 20
    assert kv.report() == "KV size 256.00 MiB: 512 cells, 32 layers, K (F16) 128.00 MiB, V (F16) 128.00 MiB"
    q8 = KVCache(hp, 512, type_k=DType.Q8_0)
    assert q8.nbytes_k == 512 * 32 * 4096 // 32 * 34 and q8.nbytes_v == 128 << 20


# -- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CACHE_TYPES, ids=lambda t: t.name)
def test_moving_a_sequence_costs_no_more_than_storing_k_once_more(model: Model, dtype: DType) -> None:
    """RoPE sees distances only, so that logits must stay. A quantised K is rounded again after it was roped: its error
    then has two independent parts, and the difference to the unmoved one is made of both: at most about twice the
    error that K has anyway (measured against a K in F32)."""
    exact, ctx, moved = new(model), new(model, type_k=dtype), new(model, type_k=dtype)
    for c in (exact, ctx, moved):
        c.decode(IDS)
    moved.memory.seq_add(0, 0, -1, 7)
    for c in (exact, ctx, moved):
        batch = Batch()
        for i in range(8):
            batch.add(50 + i, c.memory.seq_pos_max(0) + 1 + i, 0, True)
        c.decode(batch)
    once, difference = nmse(ctx.logits, exact.logits), nmse(moved.logits, ctx.logits)
    assert difference < max(3 * once, 1e-11)
    assert nmse(moved.logits, exact.logits) < max(3 * once, 1e-11)


def test_shift_and_divide_as_if_decoded_there(model: Model) -> None:
    """Self-extend: positions divided by 3, then the tail moved. The K of the first layer does not depend on what is
    attended to: it must be that of a token decoded at the new position."""
    ctx = new(model)
    ctx.decode(IDS)
    ctx.memory.seq_div(0, 0, 12, 3)
    ctx.memory.seq_add(0, 12, -1, -8)
    pos = [p // 3 if p < 12 else p - 8 for p in range(len(IDS))]
    assert ctx.memory.caches[0].pos[: len(IDS)].tolist() == pos
    ctx.update()
    n = model.hparams.layer(0).n_embd_k_gqa
    for i, t in enumerate(IDS):
        fresh = new(model)
        fresh.decode(Batch.one(t, pos[i]))
        k, expected = (c.memory.caches[0].k_l[0].numpy() for c in (ctx, fresh))
        assert nmse(k[i * n : (i + 1) * n], expected[:n]) < 1e-11


# -- defragmentation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("dtype", CACHE_TYPES, ids=lambda t: t.name)
def test_defrag_moves_k_and_v_as_they_are(model: Model, dtype: DType, flash_attn: bool) -> None:
    type_v = DType.F32 if dtype.is_quantized and not flash_attn else dtype
    ctx, expected = (new(model, n_seq_max=3, type_k=dtype, type_v=type_v, flash_attn=flash_attn) for _ in range(2))
    for c in (ctx, expected):
        batch = Batch()
        for i, t in enumerate(IDS):
            batch.add(t, i // 3, i % 3)
        c.decode(batch)
        c.memory.seq_rm(1)
    ctx.memory.defrag()
    assert ctx.memory.caches[0].wants_defrag and ctx.memory.caches[0].end == 19
    ctx.update()
    m = ctx.memory.caches[0]
    assert (m.used, m.end, m.head, m.wants_defrag) == (13, 13, 13, False)
    order = expected.memory.caches[0].order()
    assert m.cells[:13] == [expected.memory.cells[i] for i in order]
    for moved, rows in zip(kv_rows(m), kv_rows(expected.memory.caches[0]), strict=True):
        assert (moved[:13] == rows[order]).all()
    for c in (ctx, expected):
        batch = Batch()
        for s in (0, 2):
            batch.add(60 + s, c.memory.seq_pos_max(s) + 1, s, True)
        c.decode(batch)
    assert nmse(ctx.logits, expected.logits) < 1e-11  # sums are in another order


def test_defrag_by_threshold(model: Model) -> None:
    ctx = new(model, n_ctx=256, n_seq_max=2, defrag_thold=0.4)
    batch = Batch()
    for i in range(160):
        batch.add(5, i // 2, i % 2)
    ctx.decode(batch)
    assert not ctx.memory.caches[0].wants_defrag
    ctx.memory.seq_rm(1)  # 80 + padding of 160 cells are used: 0.3 are holes
    ctx.decode([7])
    assert not ctx.memory.caches[0].wants_defrag
    ctx.memory.seq_rm(0, 20, 70)
    ctx.decode([7])  # 32 + padding: 0.6
    assert ctx.memory.caches[0].wants_defrag and ctx.memory.caches[0].end > 150
    ctx.decode([8])
    assert not ctx.memory.caches[0].wants_defrag and ctx.memory.caches[0].end == ctx.memory.used == 33


def test_defrag_of_nothing(model: Model) -> None:
    ctx = new(model)
    ctx.memory.defrag()
    ctx.decode(IDS)
    ctx.memory.defrag()
    ctx.decode([5])
    assert ctx.memory.used == ctx.memory.caches[0].end == len(IDS) + 1


# -- several sequences -----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(3, 200), min_size=1, max_size=6), min_size=1, max_size=5),
    n_steps=st.integers(0, 4),
    n_ubatch=st.integers(1, 16),
    flash_attn=st.booleans(),
    seed=st.integers(0, 99),
)
def test_parallel_sequences_equal_separate_runs(
    model: Model, prompts: list[list[int]], n_steps: int, n_ubatch: int, flash_attn: bool, seed: int
) -> None:
    """Prompts in one batch, their tokens in any order, split anywhere; then all sequences a token at a time."""
    n = len(prompts)
    ids = [p + [(s * 31 + i * 7) % 200 for i in range(n_steps)] for s, p in enumerate(prompts)]
    expected = []
    for tokens in ids:
        ctx = new(model)
        batch = Batch.prompt(tokens)
        batch.logits = [True] * len(tokens)
        ctx.decode(batch)
        expected.append(ctx.logits)
    ctx = new(model, n_seq_max=n, n_ubatch=n_ubatch, flash_attn=flash_attn)
    entries = [(s, i) for s, p in enumerate(prompts) for i in range(len(p))]
    np.random.default_rng(seed).shuffle(entries)
    for step in range(n_steps + 1):
        batch = Batch()
        for s, i in entries:
            batch.add(ids[s][i], i, s, (s + i) % 3 > 0)
        ctx.decode(batch)
        wanted = [k for k, (s, i) in enumerate(entries) if (s + i) % 3 > 0]
        assert ctx.outputs.tolist() == wanted
        for row, k in enumerate(wanted):
            s, i = entries[k]
            assert nmse(ctx.logits[row], expected[s][i]) < 1e-11
            assert (ctx.logits_ith(k) == ctx.logits[row]).all()
        entries = [(s, len(p) + step) for s, p in enumerate(prompts)]


# -- to look at ------------------------------------------------------------------------------------------------------


def test_picture(model: Model) -> None:
    ctx = new(model, n_ctx=96, n_seq_max=3)
    ctx.decode(IDS[:8])
    ctx.memory.seq_cp(0, 1, 0, 3)
    ctx.decode(Batch.prompt([5, 6], 0, 2))
    ctx.memory.seq_rm(0, 4, 6)
    text = str(ctx.memory)
    assert text.splitlines() == [
        "KV size 0.09 MiB: 96 cells, 2 layers, K (F32) 0.05 MiB, V (F32) 0.05 MiB",
        "8 of 96 cells in use, 1 hole of 2 cells in all, head 4, n_kv 32",
        "  seq 0: 6 cells, positions 0..7, 3 of them shared",
        "  seq 1: 3 cells, positions 0..2, 3 of them shared",
        "  seq 2: 2 cells, positions 0..1",
        "      0 |+++0..0022......................................................|",
        "     64 |................................|",
        "one character is a cell: . empty, a digit or letter its sequence, + several sequences",
    ]
    html = ctx.memory._repr_html_()
    assert html.count("<rect") == 6 and "cells 0..2: sequence 0, 1, positions 0..2" in html
    assert "cells 4..5: empty" in html and "cells 8..9: sequence 2, positions 0..1" in html
    ctx.memory.clear()
    assert "0 of 96 cells in use, 0 holes, head 0" in str(ctx.memory)
    big = KVCache(model.hparams, 4096, 40)
    take(big, np.arange(6, dtype=np.int32), np.full(6, 39, np.int32))
    assert "      0 |#:" in str(big) and len(str(big).splitlines()) == 3 + 16 + 1
