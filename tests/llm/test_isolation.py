"""Numbers of one sequence that are not finite stay with it: the others of its batch, and those that take its cells
after it, are computed as if it had not been there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from pyggml.dtypes import DType
from pyggml.errors import BatchError
from pyggml.gguf_io.read import open_gguf
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, load_model

from ..tiny_model import write_gguf

BAD = {7: np.nan, 8: np.inf, 9: 3e38}  # tokens, and what their embeddings hold
CONTEXTS: dict[str, dict[str, Any]] = {
    "fused": {},
    "nodes one by one": {"fuse": "none"},
    "flash": {"flash_attn": True},
    "f32": {"type_k": DType.F32, "type_v": DType.F32, "fuse": "none"},
    "bf16": {"type_k": DType.BF16, "type_v": DType.BF16, "fuse": "none"},
    "flash q8_0": {"flash_attn": True, "type_k": DType.Q8_0, "type_v": DType.Q8_0},
    "flash q4_0": {"flash_attn": True, "type_k": DType.F16, "type_v": DType.Q4_0},
    "ref": {"backend": "ref"},
    "ref flash": {"backend": "ref", "flash_attn": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    kv = {"llama.embedding_length": 128, "llama.feed_forward_length": 64}
    path = write_gguf(tmp_path_factory.mktemp("bad") / "m.gguf", kv=kv)
    t = open_gguf(path).tensors["token_embd.weight"]
    data = np.memmap(path, np.float32, "r+", t.offset, (t.ne[1], t.ne[0]))
    for token, value in BAD.items():
        data[token] = value
    data.flush()
    return load_model(path)


@contextmanager
def context(model: Model, kind: str) -> Iterator[LlamaContext]:
    options = dict(CONTEXTS[kind])
    with pytest.MonkeyPatch.context() as patch:
        if "fuse" in options:
            patch.setenv("PYGGML_FUSE", options.pop("fuse"))
        with model.new_context(n_ctx=96, n_seq_max=4, n_threads=2, n_ubatch=32, **options) as ctx:
            yield ctx


def decode(ctx: LlamaContext, texts: dict[int, list[int]]) -> dict[int, np.ndarray]:
    """The last logits of each sequence, the tokens of all evaluated in turns."""
    batch = Batch()
    for i in range(max(map(len, texts.values()))):
        for s, tokens in texts.items():
            if i < len(tokens):
                batch.add(tokens[i], ctx.memory.seq_pos_max(s) + 1 + i, s, i == len(tokens) - 1)
    ctx.decode(batch)
    return {batch.seq_ids[i][0]: row for i, row in zip(ctx.outputs.tolist(), ctx.logits, strict=True)}


@pytest.mark.parametrize("n", [1, 12])
@pytest.mark.parametrize("token", BAD)
@pytest.mark.parametrize("kind", CONTEXTS)
def test_sequences_do_not_poison_each_other(model: Model, kind: str, token: int, n: int) -> None:
    good = {0: [20, 21, 22][:n], 1: list(range(30, 30 + n)), 3: [40]}
    bad = {2: [*range(50, 50 + n // 2), token, *range(60, 60 + n // 2)]}
    with context(model, kind) as alone, context(model, kind) as ctx:
        for _ in range(3):
            want, got = decode(alone, good | {2: [5] * len(bad[2])}), decode(ctx, good | bad)
            for s in good:
                assert np.isfinite(got[s]).all()
                assert np.abs(got[s] - want[s]).max() <= 1e-3 * np.abs(want[s]).max()
            if token == 7 and CONTEXTS[kind].get("type_k") is not DType.Q8_0:  # blocks do not store NaN
                assert np.isnan(got[2]).all()
        ctx.memory.clear()
        alone.memory.clear()
        want, got = decode(alone, good), decode(ctx, good)
        for s in good:
            assert np.isfinite(got[s]).all()
            assert np.abs(got[s] - want[s]).max() <= 1e-3 * np.abs(want[s]).max()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
def test_embeddings_must_be_finite(model: Model, value: float) -> None:
    row = np.zeros(128)
    row[5] = value
    batch = Batch()
    with pytest.raises(BatchError, match="position 3 holds numbers that are not finite"):
        batch.add_embd(row, 3)
    batch.add_embd(np.zeros(128), 0)
    batch.add_embd(np.zeros(128), 1)
    with np.errstate(over="ignore"):
        batch.embd[1][5] = value
    with context(model, "fused") as ctx, pytest.raises(BatchError, match="embedding 1 of the batch"):
        ctx.decode(batch)
