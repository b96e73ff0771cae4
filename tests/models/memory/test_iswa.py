"""Interleaved caches: layers with a sliding window beside layers that see everything, on a synthetic model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pyggml.models import graph_of_hparams
from pyggml.models.memory.kv_cache import KVCache

from pyggml.dtypes import DType
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, load_model
from pyggml.sched import Scheduler

from ...tiny_model import write_gguf

IDS = [(i * 37 + 11) % 250 + 3 for i in range(60)]


def windowed(path: Path, n_swa: int, pattern: int) -> Model:
    model = load_model(path)
    model.__dict__["hparams"] = replace(model.hparams, n_swa=n_swa, swa_pattern=pattern)
    return model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("four") / "four.gguf", {"llama.block_count": 4})


def new(model: Model, **kwargs: object) -> LlamaContext:
    return model.new_context(**{"n_ctx": 128, "type_k": DType.F32, "type_v": DType.F32, "n_threads": 1, **kwargs})


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a.astype(np.float64) - b) ** 2).sum() / (b.astype(np.float64) ** 2).sum())


def all_logits(ctx: LlamaContext, ids: list[int] = IDS, seq: int = 0) -> np.ndarray:
    batch = Batch.prompt(ids, ctx.memory.seq_pos_max(seq) + 1, seq)
    batch.logits = [True] * len(ids)
    ctx.decode(batch)
    return ctx.logits


def caches(ctx: LlamaContext) -> tuple[KVCache, KVCache]:
    """That of the layers that see everything, and that of those with a window."""
    base, swa = ctx.memory.caches
    return base, swa


def test_layers(path: Path) -> None:
    ctx = new(windowed(path, 8, 3), n_batch=32)
    base, swa = caches(ctx)
    assert (base.layers, swa.layers) == ((2,), (0, 1, 3))
    assert (base.size, swa.size) == (128, 64)  # 8 + 32, padded
    assert ctx.memory.nbytes == base.nbytes + swa.nbytes
    g = new(windowed(path, 8, 3), n_batch=32).build_graph(5)
    names = {t.name: t.ne for t in g.leafs}
    assert names["KQ_mask"][0] == names["KQ_mask_swa"][0] == 32
    hp = windowed(path, 8, 0).hparams
    assert all(hp.is_swa(il) for il in range(4)) and not replace(hp, swa_pattern=1).is_swa(2)
    assert graph_of_hparams(load_model(path).hparams, 4).get_tensor("KQ_mask_swa") is None


def test_a_window_wider_than_the_text_changes_nothing(path: Path) -> None:
    expected = all_logits(new(load_model(path)))
    assert nmse(all_logits(new(windowed(path, 60, 2))), expected) < 1e-12
    assert nmse(all_logits(new(windowed(path, 20, 2))), expected) > 1e-4


def test_a_window_of_one_sees_no_other_token(path: Path) -> None:
    got = all_logits(new(windowed(path, 1, 0)))
    for i in (0, 7, 59):
        assert nmse(got[i : i + 1], all_logits(new(load_model(path)), IDS[i : i + 1])) < 1e-11


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("pattern", [0, 2])
def test_cells_outside_the_window_are_dropped_and_not_missed(path: Path, flash_attn: bool, pattern: int) -> None:
    """One batch for all, where nothing is dropped on the way, against small steps in a cache that turns round."""
    expected = all_logits(new(windowed(path, 9, pattern)))
    ctx = new(windowed(path, 9, pattern), n_batch=16, n_ubatch=5, flash_attn=flash_attn)
    rows = [all_logits(ctx, IDS[:16]), all_logits(ctx, IDS[16:32])]
    rows += [all_logits(ctx, IDS[i : i + 1]) for i in range(32, 60)]
    assert nmse(np.concatenate(rows), expected) < 1e-11
    base, swa = caches(ctx)
    assert base.used == 60 and swa.used == 8  # what the next token sees besides itself
    assert (ctx.memory.seq_pos_min(0), ctx.memory.seq_pos_max(0)) == (52, 59)


def test_one_graph_for_all_sizes_of_both_caches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = new(windowed(path, 40, 2), n_batch=16, n_ctx=160)
    with monkeypatch.context() as m:
        m.setattr(Scheduler, "varies", False)
        plain = new(windowed(path, 40, 2), n_batch=16, n_ctx=160)
    for t in (*IDS, *IDS):
        for c in (ctx, plain):
            c.decode([t])
        assert (ctx.logits == plain.logits).all()
    assert ctx.n_graphs == 1 and plain.n_graphs > 3


def test_sequences_in_parallel(path: Path) -> None:
    model = windowed(path, 5, 2)
    a, b = IDS[:30], IDS[20:45]
    expected = [all_logits(new(model), ids) for ids in (a, b)]
    ctx = new(model, n_seq_max=2, n_batch=8)
    got: list[list[np.ndarray]] = [[], []]
    for i in range(30):
        batch = Batch()
        for s, ids in enumerate((a, b)):
            if i < len(ids):
                batch.add(ids[i], i, s, True)
        ctx.decode(batch)
        for row, s in enumerate([s for s, ids in enumerate((a, b)) if i < len(ids)]):
            got[s].append(ctx.logits[row])
    for s in range(2):
        assert nmse(np.array(got[s]), expected[s]) < 1e-11


def test_operations_go_to_both(path: Path) -> None:
    model = windowed(path, 20, 2)
    ctx, expected = new(model, n_seq_max=2), new(model)
    ctx.decode(IDS[:12])
    expected.decode(IDS[:12])
    ctx.memory.seq_cp(0, 1)
    ctx.memory.seq_keep(1)
    ctx.memory.seq_add(1, 0, -1, 5)
    assert all(c.has_shift and c.seq_pos_max(1) == 16 for c in ctx.memory.caches)
    assert nmse(all_logits(ctx, [7, 8], 1), all_logits(expected, [7, 8])) < 1e-11
    ctx.memory.defrag()
    ctx.update()
    assert "window of 20" in str(ctx.memory) and str(ctx.memory).count("KV size") == 2
    assert ctx.memory._repr_html_().count("<svg") == 2
    ctx.memory.clear()
    assert [c.used for c in caches(ctx)] == [0, 0]


def test_removing_back_to_where_the_window_was_dropped_is_refused(path: Path) -> None:
    ctx = new(windowed(path, 6, 2))
    ctx.decode(IDS[:30])
    before = str(ctx.memory)
    assert not ctx.memory.seq_rm(0, 20)
    assert str(ctx.memory) == before
    assert ctx.memory.seq_rm(0, 30)
    assert ctx.memory.seq_rm(0)
    assert ctx.memory.used == 0
    ctx = new(windowed(path, 6, 2))
    ctx.decode(IDS[:5])
    assert ctx.memory.seq_rm(0, 3)
    assert nmse(all_logits(ctx, [9]), all_logits(new(windowed(path, 6, 2)), [*IDS[:3], 9])[-1:]) < 1e-11
