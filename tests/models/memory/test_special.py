"""Memories of other shapes: windows with heads and ropes of their own, chunks, latent rows, values that lie in K."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, load_model

from ...random_model import random_weights, write_random

YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
EXPERTS = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 16,
    "leading_dense_block_count": 1,
    "expert_shared_count": 1,
}
LATENT = {
    **YARN,
    **EXPERTS,
    "rope.scaling.yarn_log_multiplier": 0.08,
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 64,
    "attention.value_length": 32,
    "attention.key_length_mla": 44,
    "attention.value_length_mla": 12,
    "rope.dimension_count": 32,
}
WINDOW = {"attention.sliding_window": 7, "attention.sliding_window_pattern": [1, 0, 1, 1]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "latent": ("deepseek2", LATENT),
    "heads": ("deepseek2", {}),  # see `_heads`
    "sizes": (
        "mimo2",
        {
            **WINDOW,
            "attention.head_count_kv": [1, 2, 4, 1],
            "attention.key_length": 24,
            "attention.value_length": 16,
            "attention.key_length_swa": 16,
            "attention.value_length_swa": 8,
            "rope.dimension_count": 12,
            "rope.dimension_count_swa": 8,
            "rope.freq_base": 5000.0,
            "rope.freq_base_swa": 100.0,
            "expert_count": 4,
            "expert_used_count": 2,
            "attention.value_scale": 0.7,
        },
    ),
    "ropes": ("laguna", {**WINDOW, **YARN, **EXPERTS, "rope.dimension_count": 4, "rope.dimension_count_swa": 8}),
    "unrounded": ("llama", {**YARN, "rope.scaling.yarn_truncate": False, "rope.scaling.yarn_attn_factor": 0.7}),
    "windows": (  # one of the two caches has no layers
        "laguna",
        {**WINDOW, **YARN, **EXPERTS, "attention.sliding_window_pattern": [1, 1, 1, 1], "rope.dimension_count_swa": 8},
    ),
    "chunks": ("llama4", {**EXPERTS, "leading_dense_block_count": 0, "interleave_moe_layer_step": 2}),
    "softcaps": ("gemma2", {"attention.sliding_window": 7}),
}
IDS = [(i * 37 + 11) % 64 for i in range(30)]
SPLIT = 22


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name: str = request.param
    arch, kv = MODELS[name]
    path = tmp_path_factory.mktemp(name) / "m.gguf"
    model = load_model(_heads(path) if name == "heads" else write_random(path, arch, kv), repack=False)
    if name == "chunks":
        assert model.hparams.attn_temperature is not None
        temperature = model.hparams.attn_temperature._replace(floor_scale=8)
        hp = replace(model.hparams, n_swa=8, attn_temperature=temperature)
        model.__dict__["hparams"] = hp
    return model


def _heads(path: Path) -> Path:
    """The model of latent rows as older files have it: a weight that makes K and V of each head."""
    weights = random_weights("deepseek2", LATENT)
    for il in range(4):
        k_b, v_b = (weights.pop(f"blk.{il}.attn_{x}_b.weight") for x in "kv")
        both = np.concatenate([k_b.transpose(0, 2, 1), v_b], axis=1)
        weights[f"blk.{il}.attn_kv_b.weight"] = both.reshape(-1, both.shape[2])
    kv = {k: v for k, v in LATENT.items() if not k.endswith("_mla")}
    sizes = {"attention.head_count_kv": 4, "attention.key_length": 44, "attention.value_length": 12}
    return write_random(path, "deepseek2", {**kv, **sizes}, weights)


def new(model: Model, **kwargs: object) -> LlamaContext:
    return model.new_context(**{"n_ctx": 128, "type_k": DType.F32, "type_v": DType.F32, "n_threads": 1, **kwargs})


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a.astype(np.float64) - b) ** 2).sum() / (b.astype(np.float64) ** 2).sum())


def logits(ctx: LlamaContext, ids: list[int], seq: int = 0) -> np.ndarray:
    batch = Batch.prompt(ids, ctx.memory.seq_pos_max(seq) + 1, seq)
    batch.logits = [True] * len(ids)
    ctx.decode(batch)
    return np.array(ctx.logits)


def rest(ctx: LlamaContext, seq: int = 0) -> np.ndarray:
    return np.concatenate([logits(ctx, [i], seq) for i in IDS[SPLIT:]])


def test_latent_rows_and_heads_are_the_same_model(tmp_path: Path) -> None:
    latent = load_model(write_random(tmp_path / "latent.gguf", "deepseek2", LATENT), repack=False)
    heads = load_model(_heads(tmp_path / "heads.gguf"), repack=False)
    a, b = new(latent), new(heads)
    assert nmse(logits(a, IDS), logits(b, IDS)) < 1e-10
    assert not a.memory.caches[0].v_l and "V in K" in str(a.memory)
    assert a.memory.nbytes == 4 * 128 * 64 * 4


@pytest.mark.parametrize("flash_attn", [False, True])
def test_steps(model: Model, flash_attn: bool) -> None:
    """A batch at once, against ubatches of 5 and single tokens in a cache that drops what is outside of windows."""
    expected = logits(new(model), IDS)
    ctx = new(model, n_batch=SPLIT, n_ubatch=5, flash_attn=flash_attn)
    got = np.concatenate([logits(ctx, IDS[:SPLIT]), rest(ctx)])
    assert nmse(got, expected) < 1e-10


def test_sequences_holes_and_states(model: Model, tmp_path: Path) -> None:
    expected = logits(new(model), IDS)[SPLIT:]
    ctx = new(model, n_seq_max=2)
    for i in range(SPLIT):
        batch = Batch()
        batch.add(IDS[-1 - i], i, 1)
        batch.add(IDS[i], i, 0)
        ctx.decode(batch)
    ctx.save_state(tmp_path / "state")
    ctx.save_seq(tmp_path / "seq", 0)
    assert ctx.memory.seq_rm(1)
    ctx.memory.defrag()
    assert nmse(rest(ctx), expected) < 1e-10
    ctx.load_state(tmp_path / "state")
    assert ctx.memory.seq_rm(1)
    ctx.memory.seq_cp(0, 1)
    assert nmse(rest(ctx, 1), expected) < 1e-10
    ctx = new(model, n_seq_max=2)
    assert nmse(rest(ctx, ctx.load_seq(tmp_path / "seq", 1)), expected) < 1e-10


def test_moved(model: Model) -> None:
    """Only how far tokens are apart matters, where Q is not scaled by its position."""
    if model.hparams.attn_temperature:
        pytest.skip("Q is scaled by its position")
    ctx = new(model)
    expected = logits(new(model), IDS)[SPLIT:]
    logits(ctx, IDS[:SPLIT])
    ctx.memory.seq_add(0, 0, -1, 16)
    assert nmse(rest(ctx), expected) < 1e-10


@pytest.mark.parametrize("flash_attn", [False, True])
def test_quantised_latent_rows(tmp_path: Path, flash_attn: bool) -> None:
    """Moved, which stores them anew. The type of V does not matter: there is none."""
    model = load_model(write_random(tmp_path / "m.gguf", "deepseek2", LATENT), repack=False)
    ctx = new(model, type_k=DType.Q8_0, type_v=DType.Q4_0, flash_attn=flash_attn)
    logits(ctx, IDS[:SPLIT])
    ctx.memory.seq_add(0, 0, -1, 16)
    assert nmse(rest(ctx), logits(new(model), IDS)[SPLIT:]) < 1e-2
    with pytest.raises(ModelError, match=r"type_k = Q8_0: heads of 44 are not whole blocks of 32"):
        new(load_model(_heads(tmp_path / "heads.gguf")), type_k=DType.Q8_0)
