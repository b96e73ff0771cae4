"""DeepSeek-V4's keys of blocks against NumPy, of more tokens than the golden model has; experts by a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyggml.models.block_keys import TokenBlocks, block_inputs

from pyggml.dtypes import DType
from pyggml.errors import BatchError, GGMLError, ModelError
from pyggml.llm.batch import Batch
from pyggml.llm.model import Model, load_model
from pyggml.types import Floats, Ints

from .archs import ARCH_FILE, SPECS, batch_of, equal

NAME = "deepseek4-moe"
TABLE = "blk.0.ffn_gate_tid2eid.weight"
N_TOKENS, HEAD, N_ROT, BASE = 300, 64, 32, 160000.0
pytestmark = pytest.mark.skipif(ARCH_FILE is None, reason="no golden data")


def changed(path: Path, table: Ints | None = None, bias: Floats | None = None, **keys: Any) -> Model:
    """The golden model with other values of some keys, a table of experts, or another bias of them in layer 0."""
    assert ARCH_FILE is not None
    spec: dict[str, Any] = dict(SPECS[NAME])
    spec["kv"] = [(key, kind, keys.get(key.rsplit(".", 1)[-1], value)) for key, kind, value in spec["kv"]]
    if table is not None:
        spec["tensors"] = [*spec["tensors"], (TABLE, list(table.shape[::-1]))]
    values = ARCH_FILE.values

    def other(seed: int, arch: str, name: str, ne: list[int]) -> Any:
        if name == TABLE:
            return table
        return bias if name == "blk.0.exp_probs_b.bias" and bias is not None else values(seed, arch, name, ne)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ARCH_FILE, "values", other)
        ARCH_FILE.write(NAME, path, spec=spec)
    return load_model(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return changed(tmp_path_factory.mktemp("v4") / "m.gguf")


def roped(x: Floats, pos: int) -> Floats:
    """The last N_ROT elements of a row turned, neighbours together."""
    angle = pos * BASE ** (-np.arange(0, N_ROT, 2) / N_ROT)
    a, b = x[-N_ROT::2].copy(), x[1 - N_ROT :: 2].copy()
    out = x.copy()
    out[-N_ROT::2], out[1 - N_ROT :: 2] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    return out


@pytest.mark.parametrize(("il", "size"), [(2, 4), (3, 128)])
def test_keys_of_blocks(model: Model, il: int, size: int) -> None:
    """Batches of many and of few tokens, which end anywhere in a block."""
    ids = np.random.default_rng(1).integers(0, 128, N_TOKENS)
    ctx = model.new_context(512, n_batch=200, n_ubatch=64, type_k=DType.F32, type_v=DType.F32)
    with model.tap(f"block_kv-{il}", f"block_score-{il}") as tap:
        for part in np.split(ids, [1, 131, 132, 135, 200, 206]):
            ctx.decode(part.tolist())
    value, score = (np.concatenate(tap[f"{name}-{il}"]).astype(np.float64) for name in ("block_kv", "block_score"))
    w = {name: model.tensors[f"blk.{il}.attn_compressor_{name}.weight"].numpy() for name in ("ape", "norm")}
    score += w["ape"][np.arange(N_TOKENS) % size]
    cache = ctx.memory.caches[0]
    keys = cache.k_l[cache.index[4 + il]].numpy().reshape(-1, HEAD)
    for first in range(0, N_TOKENS - size + 1, size):
        v, s = value[first : first + size, -HEAD:], score[first : first + size, -HEAD:]
        if size == 4 and first:
            before = slice(first - size, first)
            v, s = np.concatenate([value[before, :HEAD], v]), np.concatenate([score[before, :HEAD], s])
        p = np.exp(s - s.max(axis=0))
        key = (p / p.sum(axis=0) * v).sum(axis=0)
        key = key / np.sqrt((key**2).mean() + 1e-5) * w["norm"]
        cell = int(np.flatnonzero(cache.pos == first + size - 1)[0])
        np.testing.assert_allclose(keys[cell], roped(key, first), rtol=1e-4, atol=1e-4)


def test_tokens_in_any_parts(model: Model) -> None:
    """Of two sequences in turns, and one token at a time, beyond a large block."""
    ids = np.random.default_rng(2).integers(0, 128, (2, 150)).tolist()
    options: Any = {"type_k": DType.F32, "type_v": DType.F32}
    both = model.new_context(512, n_seq_max=2, n_ubatch=48, **options)
    both.decode(batch_of((ids[s][pos], pos, s) for pos in range(140) for s in (0, 1)))
    for pos in range(140, 150):
        both.decode(batch_of((ids[s][pos], pos, s) for s in (0, 1)))
    for s in (0, 1):
        alone = model.new_context(512, n_ubatch=150, **options)
        alone.decode(ids[s])
        equal(both.logits[[s]], alone.logits)


@pytest.mark.parametrize("size", [1, 3, 4, 128])
def test_blocks_that_tokens_end(size: int) -> None:
    t = TokenBlocks(size, 2 * size)
    for begin in range(2 * size + 1):
        for n in {1, 2, size - 1, size, size + 1, 2 * size - 1, 2 * size, 3 * size} - {0}:
            pos = np.array([[begin], [0]], np.int32) + np.arange(n, dtype=np.int32)
            rows, mask, first, of, at, end = block_inputs(t, pos, np.arange(9, dtype=np.int32))
            assert rows.shape == mask.shape and rows.min() >= 0
            assert rows.max() < 2 * (n + t.n_read - 1)
            assert of.max() < first.size
            np.testing.assert_array_equal(at, pos % size)
            np.testing.assert_array_equal(end == 0, (np.arange(9) + 1) % size == 0)
            for seq, i in np.argwhere((pos + 1) % size == 0):
                block = divmod(int(of[seq, i]), n // size + 1)
                assert block[0] == seq and first.reshape(2, -1)[block] == pos[seq, i] - size + 1
                read = rows.reshape(2, -1, t.n_read)[block] - seq * (n + t.n_read - 1)
                np.testing.assert_array_equal(read, i + np.arange(t.n_read))
                hidden = np.isneginf(mask.reshape(2, -1, t.n_read)[block])
                np.testing.assert_array_equal(hidden, pos[seq, i] - np.arange(t.n_read)[::-1] < 0)


def test_experts_by_token(tmp_path: Path) -> None:
    table = np.random.default_rng(3).permuted(np.tile(np.arange(4, dtype=np.int32), (128, 1)), axis=1)[:, :2]
    hashed = changed(tmp_path / "h.gguf", np.ascontiguousarray(table), hash_layer_count=1)
    for token in (3, 77):
        bias = np.zeros(4, np.float32)
        bias[table[token]] = 100
        forced = changed(tmp_path / f"{token}.gguf", bias=bias)
        a, b = (m.new_context(64) for m in (hashed, forced))
        a.decode([token])
        b.decode([token])
        equal(a.logits, b.logits)
    ctx = hashed.new_context(64)
    batch = Batch()
    batch.add_embd(np.ones(512, np.float32), 0, [0], logits=True)
    ctx.decode(batch)
    assert np.isfinite(ctx.logits).all()


def test_what_cannot_be(model: Model, tmp_path: Path) -> None:
    ctx = model.new_context(64)
    with pytest.raises(BatchError, match="must begin at position 0"):
        ctx.decode(batch_of([(1, 5, 0)]))
    ctx.decode([1, 2, 3])
    with pytest.raises(GGMLError, match="blocks of tokens begin at multiples"):
        ctx.memory.seq_add(0, 0, -1, 1)
    assert ctx.memory.seq_pos_max(0) == 2
    with pytest.raises(ModelError, match="it must hold 0, 4 or 128"):
        changed(tmp_path / "m.gguf", compress_ratios=[0, 0, 4, 64])
