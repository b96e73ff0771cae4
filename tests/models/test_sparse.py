"""Indexers that have to choose: against NumPy in float64, against llama.cpp, and in all ways of running them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyggml.models.indexer import ChosenBlocks, Indexer, chosen_block_inputs

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model
from pyggml.types import Floats

from .archs import ARCH_FILE, at_once, batch_of, equal, one_by_one
from .sparse_models import N_TOKENS, SPARSE, load_sparse, scores, sparse_tokens, write_sparse

pytestmark = pytest.mark.skipif(ARCH_FILE is None, reason="no golden data")
GOLDEN = Path(__file__).parent / "sparse_logits.npz"
N_DECODE = 8
Load = Callable[[str], Model]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    return cache(lambda name: load_sparse(name, tmp_path_factory.mktemp("sparse")))


def context(model: Model, n_ctx: int = 64, **options: Any) -> LlamaContext:
    return model.new_context(n_ctx, **{"n_batch": 128, "type_k": DType.F32, "type_v": DType.F32, **options})


@pytest.mark.parametrize("name", SPARSE)
def test_what_is_chosen(name: str, load: Load) -> None:
    """The least score of what is chosen is no less than the largest of what is not, but for the rounding of f32; and
    so many are chosen as are asked for, whatever the parts that tokens come in."""
    model, size = load(name), SPARSE[name].size
    hp: Any = model.hparams
    k = hp.n_chosen // size if name in ("glm5-next-moe", "qwen4exp-moe") else hp.n_chosen
    with model.tap("kq_mask_chosen-*", "attn_norm-*", "hc_attn_mixed-*") as tap:
        ctx, ids = context(model, n_ubatch=9), sparse_tokens(name)
        for part in np.split(np.array(ids), [30, 31, 32, 33, 34]):
            at_once_from(ctx, part.tolist())
    for il, of in SPARSE[name].layers.items():
        if il != of:
            assert f"kq_mask_chosen-{il}" not in tap
            continue
        inputs = tap[f"hc_attn_mixed-{il}"] if name == "qwen4exp-moe" else tap[f"attn_norm-{il}"]
        cur = np.concatenate([np.atleast_2d(x) for x in inputs]).astype(np.float64)
        got = np.full((hp.n_indexer_head if name == "minimax-m3-moe" else 1, N_TOKENS, 64), -np.inf)
        first = 0
        for m in tap[f"kq_mask_chosen-{il}"]:
            n = m.size // len(got) // m.shape[-1]
            got[:, first : first + n, : m.shape[-1]] = m.reshape(len(got), n, -1)
            first += n
        want = scores(name, model, il, cur)
        eps = 1e-5 * np.abs(want[np.isfinite(want)]).max()
        for head, pos in np.ndindex(len(want), N_TOKENS):
            seen = np.flatnonzero(got[head, pos] == 0)
            assert (seen <= pos).all()
            if name == "deepseek4-moe":  # in the cells of the tokens that end a block
                assert ((seen + 1) % size == 0).all()
                chosen, there = seen // size, np.arange((pos + 1) // size)
            elif name == "minimax-m3-moe":
                chosen, there = np.unique(seen // size), np.arange(pos // size + 1)
                assert pos // size in chosen
                want[head, pos, pos // size] = np.inf
            elif size > 1:  # the tokens of the last block, where that is not full, beside
                tail = np.arange((pos + 1) // size * size, pos + 1)
                assert np.isin(tail, seen).all()
                chosen, there = np.unique(np.setdiff1d(seen, tail) // size), np.arange((pos + 1) // size)
            else:
                chosen, there = seen, np.arange(pos + 1)
            if size > 1 and name != "deepseek4-moe":  # blocks are seen as a whole
                tokens = (chosen[:, None] * size + np.arange(size)).ravel()
                assert np.isin(tokens[tokens <= pos], seen).all()
            assert len(chosen) == min(k, len(there))
            rest, row = np.setdiff1d(there, chosen), want[head, pos]
            assert not len(rest) or row[chosen].min() >= row[rest].max() - eps


def at_once_from(ctx: LlamaContext, ids: list[int], seq: int = 0) -> Floats:
    """The logits of all, after what a sequence has."""
    first = ctx.memory.seq_pos_max(seq) + 1
    ctx.decode(batch_of((token, first + i, seq) for i, token in enumerate(ids)))
    return ctx.logits.copy()


@pytest.mark.parametrize("name", ["deepseek32-moe", "glm-dsa-moe", "hy_v4-moe", "deepseek4-moe", "glm5-next-moe",
                                  "qwen4exp-moe"])  # fmt: skip
def test_logits_are_llama_cpps(name: str, load: Load) -> None:
    """Of the last tokens of one batch, and of single ones. llama.cpp sees as many tokens whether or not the last block
    of qwen4exp is full, transformers does not, nor do we: only where all but one are there that is the same."""
    ctx, ids = context(load(name)), sparse_tokens(name)
    got = np.concatenate((at_once(ctx, ids[:-N_DECODE]), one_by_one(ctx, ids[-N_DECODE:])))
    with np.load(GOLDEN) as golden:
        want = golden[name]
    rows = np.arange(N_TOKENS - len(want), N_TOKENS)
    rows = rows[rows % 4 == 2] if name == "qwen4exp-moe" else rows
    equal(got[rows], want[rows - N_TOKENS])


@pytest.mark.parametrize("name", SPARSE)
def test_ways_of_running(name: str, load: Load, tmp_path: Path) -> None:
    model, ids = load(name), sparse_tokens(name)
    want = at_once(context(model), ids)
    assert np.isfinite(want).all()

    equal(at_once(context(model, n_ubatch=5), ids), want)
    equal(one_by_one(context(model), ids), want)
    equal(at_once(context(model, flash_attn=True), ids), want)
    equal(at_once(context(model, flash_attn=True, n_ubatch=7), ids), want)

    both = context(model, 128, n_seq_max=2, n_ubatch=24)
    both.decode(batch_of((ids[pos], pos, s) for pos in range(40) for s in (0, 1) if s == 0 or pos < 33))
    for s, n in ((0, 40), (1, 33)):
        for pos in range(n, 44):
            both.decode(batch_of([(ids[pos], pos, s)]))
            equal(both.logits, want[[pos]])

    first, second = context(model), context(model, 96)
    at_once(first, ids[:40])
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    equal(one_by_one(second, ids[40:]), want[40:])


@pytest.mark.parametrize("name", SPARSE)
def test_sequences(name: str, load: Load) -> None:
    """What the indexer knows goes where K and V go: into copies, with what is removed, and to other cells."""
    model, ids, other = load(name), sparse_tokens(name), sparse_tokens(name)[::-1]
    want, moves = at_once(context(model), ids), SPARSE[name].moves
    ctx = context(model, 192, n_seq_max=3)
    at_once_from(ctx, other[:21], 2)
    at_once_from(ctx, ids[:40])
    ctx.memory.seq_cp(0, 1)
    equal(at_once_from(ctx, ids[40:], 1), want[40:])
    equal(at_once_from(ctx, ids[40:42]), want[40:42])
    if moves and ctx.memory.seq_rm(1, 35):  # states forget nothing, nor do windows come back
        equal(at_once_from(ctx, ids[35:], 1), want[35:])
    ctx.memory.seq_rm(2)
    ctx.memory.defrag()
    equal(at_once_from(ctx, ids[42:]), want[42:])
    if moves:
        move = 8 * SPARSE[name].size
        alone = context(model)
        at_once(alone, ids[:40])
        alone.memory.seq_add(0, 0, -1, move)
        equal(at_once_from(alone, ids[40:]), want[40:], 1e-8)


@pytest.mark.parametrize(("dtype", "limit"), [(DType.F16, 1e-6), (DType.Q8_0, 1e-3), (DType.Q4_0, 0.05)])
def test_types_of_the_cache(dtype: DType, limit: float, load: Load) -> None:
    """Keys of the indexer are stored as K is; those of few bits are rotated, which products do not show."""
    name = "deepseek32-moe"
    model, ids = load(name), sparse_tokens(name)
    found: list[Floats] = []
    for type_k in (dtype, DType.F32):
        ctx = context(model, type_k=type_k, type_v=DType.F16)
        with model.tap("indexer_score-0") as tap:  # the first layer reads the same
            at_once(ctx, ids)
        found.append(np.tril(tap["indexer_score-0"][0][:, :N_TOKENS]))
        (cache,), hp = ctx.memory.caches, model.hparams
        assert isinstance(hp, Indexer)
        assert (cache.rotation_k(hp.index_layer(0)) is None) == (type_k is not DType.Q4_0)
        assert cache.rotation_k(0) is None  # which holds V
    equal(*found, limit)


@pytest.mark.parametrize("size", [1, 4])
def test_blocks_of_cells(size: int) -> None:
    cells = np.array([0, 5, 6, 7, 11, -1, 3, -1], np.int32)
    pos = np.array([7, 11, 5], np.int32)
    of, own = chosen_block_inputs(ChosenBlocks(size, 2), pos, cells)
    far, far_own = chosen_block_inputs(
        ChosenBlocks(size, 2), pos + 1000 * size, np.where(cells < 0, -1, cells + 1000 * size)
    )
    held = cells >= 0
    assert of.max() < 8 and far.max() < 8 and of.dtype == own.dtype == np.int32
    for found, blocks in ((of, own), (far, far_own)):
        same = found[held][:, None] == found[held]
        np.testing.assert_array_equal(same, (cells[held] // size)[:, None] == cells[held] // size)
        for i, p in enumerate(pos):
            for back in range(2):
                cell = np.flatnonzero(held & (cells // size == p // size - back))
                assert blocks[i, back] < 0 or not len(cell) or (found[cell] == blocks[i, back]).all()
                assert blocks[i, back] >= 0 or not len(cell)
    tail = chosen_block_inputs(ChosenBlocks(4, tail=True), pos, cells)[1]
    np.testing.assert_array_equal(tail[:, 0] < 0, [True, True, False])


def test_files_without_an_indexer(tmp_path: Path) -> None:
    """Old files lack its weights: all tokens are seen where that is all that an indexer would choose."""
    assert ARCH_FILE is not None
    with pytest.MonkeyPatch.context() as patch:
        from . import sparse_models as module

        specs = {
            n: {**s, "tensors": [t for t in s["tensors"] if "indexer" not in t[0]]} for n, s in module.SPECS.items()
        }
        patch.setattr(module, "SPECS", specs)
        patch.setitem(module.SPARSE, "glm-dsa-moe", module.Sparse({"attention.indexer.top_k": ("u32", 64)}, {}))
        write_sparse("glm-dsa-moe", tmp_path / "glm-dsa-moe.gguf")
        old = load_sparse("glm-dsa-moe", tmp_path)
    assert np.isfinite(at_once(context(old, 64), [1, 2, 3])).all()
    with pytest.raises(ModelError, match=r"blk\.0\.indexer\.attn_k\.weight"):
        context(old, 96)
