"""A model in stages, each loaded with its layers alone, gives what it gives as a whole, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.errors import BatchError, ModelError, StateError
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, default_model_path, load_model

from ..random_model import write_random

MIXTURE = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
WINDOW = {"attention.sliding_window": 12, "attention.key_length": 8, "attention.value_length": 8}
MAMBA = {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 8, "ssm.time_step_rank": 4}
ARCHS = {"qwen3moe": MIXTURE, "gemma2": WINDOW, "gpt2": {"attention.layer_norm_epsilon": 1e-5}, "mamba": MAMBA}


def evaluate(stages: Sequence[LlamaContext], batch: gg.Batch) -> np.ndarray:
    """The logits of a batch that goes through all of them."""
    hidden = np.empty(0)
    for ctx, after in zip(stages, [*stages[1:], None], strict=True):
        part = gg.Batch()
        part.pos, part.seq_ids = batch.pos, batch.seq_ids
        part.logits = batch.logits if after is None else [True] * len(batch)
        if ctx is stages[0]:
            part.tokens = batch.tokens
        else:
            part.embd = list(hidden)
        ctx.decode(part)
        hidden = ctx.embeddings.copy()
    return stages[-1].logits.copy()


def logits(models: Sequence[Model], **options: Any) -> np.ndarray:
    """Of prompts of two sequences, in ubatches, then of both token by token."""
    stages = [m.new_context(n_ctx=96, n_ubatch=6, n_seq_max=2, n_threads=1, **options) for m in models]
    rows: list[np.ndarray] = []
    for seq, n in ((0, 9), (1, 5)):
        batch = gg.Batch()
        for pos in range(n):
            batch.add(5 + 7 * pos % 50, pos, [seq], pos % 4 == 0 or pos == n - 1)
        rows.append(evaluate(stages, batch))
    for i in range(12):
        batch = gg.Batch()
        for seq, n in ((0, 9), (1, 5)):
            batch.add(3 + i, n + i, [seq], True)
        rows.append(evaluate(stages, batch))
    return np.concatenate(rows)


def stages(path: Path, *cuts: int, **options: Any) -> list[Model]:
    n = load_model(path, vocab_only=True).hparams.n_layer
    return [load_model(path, layers=(a, b), **options) for a, b in zip((0, *cuts), (*cuts, n), strict=True)]


@pytest.mark.parametrize("arch", ARCHS)
def test_architectures(tmp_path: Path, arch: str) -> None:
    path = write_random(tmp_path / "m.gguf", arch, ARCHS[arch])
    assert np.array_equal(logits(stages(path, 1, 3)), logits([load_model(path)]))


def test_options() -> None:
    path, whole = default_model_path(), load_model()
    for options in ({}, {"flash_attn": True, "type_k": gg.Q8_0}):
        assert np.array_equal(logits(stages(path, 2), **options), logits([whole], **options))
    assert np.array_equal(logits(stages(path, 1, ram="4MiB")), logits([whole]))


def test_each_has_its_own_weights_and_cache_alone() -> None:
    whole, parts = load_model(), stages(default_model_path(), 2, 3)
    sizes = [m.weight_stream.pinned for m in parts if m.weight_stream is not None]
    kv = [m.new_context(n_ctx=64).memory.nbytes for m in (whole, *parts)]
    assert kv[1:] == [kv[0] * n // 6 for n in (2, 1, 3)]
    one = sizes[1]
    assert sizes[0] == 2 * one and 3 * one < sizes[2] < 3 * one + 2 * whole.tensors["token_embd.weight"].nbytes


def test_holes_are_closed_and_k_is_moved() -> None:
    found: list[np.ndarray] = []
    for models in ([load_model()], stages(default_model_path(), 2)):
        contexts = [m.new_context(n_ctx=32, n_seq_max=3, n_threads=1) for m in models]
        rows: list[np.ndarray] = []
        for seq, tokens in ((0, range(3, 11)), (1, range(20, 28)), (2, range(5, 13)), (0, range(40, 56))):
            batch = gg.Batch.prompt(tokens, 0, seq)
            if len(tokens) > 8:
                for ctx in contexts:
                    ctx.memory.seq_rm(0)
                    ctx.memory.seq_rm(2, 4, -1)
                    ctx.memory.seq_add(1, 4, -1, -2)
            rows.append(evaluate(contexts, batch))
        found.append(np.concatenate(rows))
    assert np.array_equal(*found)


def test_states_of_stages(tmp_path: Path) -> None:
    first, second = stages(default_model_path(), 2)
    ctx = first.new_context(n_ctx=32, n_seq_max=2)
    ctx.decode([3, 4, 5])
    ctx.save_state(tmp_path / "s")
    ctx.save_seq(tmp_path / "q", 0)
    ctx.decode(gg.Batch.prompt([6], 3))
    want = ctx.embeddings.copy()
    again = first.new_context(n_ctx=32, n_seq_max=2)
    again.load_state(tmp_path / "s")
    again.decode(gg.Batch.prompt([6], 3))
    assert np.array_equal(again.embeddings, want)
    assert again.load_seq(tmp_path / "q", 1) == 1
    for other in (second, load_model()):
        with pytest.raises(StateError, match="of another model"):
            other.new_context(n_ctx=32, n_seq_max=2).load_state(tmp_path / "s")
    for stage in (first, second):
        with pytest.raises(ModelError, match=r"layers \d to \d of 6 are a stage, which gives no text"):
            list(stage.generate("Once", 3))


NOT_SPLIT: dict[str, tuple[dict[str, Any], str]] = {
    "bert": ({"attention.layer_norm_epsilon": 1e-5}, "encoder"),
    "talkie": ({"logit_scale": 1.0}, "layers from 2 on read the tokens too"),
}


@pytest.mark.parametrize("arch", NOT_SPLIT)
def test_architectures_that_cannot(tmp_path: Path, arch: str) -> None:
    kv, text = NOT_SPLIT[arch]
    path = write_random(tmp_path / "m.gguf", arch, kv)
    with pytest.raises(ModelError, match=text):
        load_model(path, layers=(2, 4))


def test_what_cannot_be() -> None:
    for layers in ((0, 0), (3, 2), (0, 7), (-1, 2), (0, 1.5), (0,), (0, 1, 2)):
        with pytest.raises(ModelError, match="layers"):
            load_model(layers=layers)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="use_mmap"):
        load_model(layers=(0, 2), use_mmap=False)
    first, second = stages(default_model_path(), 2)
    with pytest.raises(ModelError, match="layers up to 2"):
        first.new_context(n_ctx=32, pooling="mean", embeddings=True)
    ctx = second.new_context(n_ctx=32)
    ctx.warmup()
    for _ in range(2):
        with pytest.raises(BatchError, match="not tokens"):
            ctx.decode([3, 4])
