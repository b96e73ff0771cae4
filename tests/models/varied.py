"""Models of every architecture with hyperparameters that nobody chose: odd numbers of heads, widths,
experts and windows. The reference says what such a model gives, and the CPU must agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from pyggml.models import get_architecture
from pyggml.models.weights import ShapeOnlyWeights

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.llm.batch import Batch
from pyggml.llm.model import Model, load_model
from pyggml.types import Floats

from . import others
from .archs import ARCH_FILE, SPECS, VARIANTS

Changes = dict[str, Any]
ALL = [*VARIANTS, *others.NAMES]
N_TOKENS = 11
MAX_NMSE = 1e-9
_HEAD = (4, 6, 8, 12, 20, 32, 40, 64)
_WIDTH = (8, 24, 33, 40, 64, 100, 160)
# By the key without its architecture: the values that are drawn. Keys that are missing here keep their value.
INTEGERS: dict[str, tuple[int, ...]] = {
    "block_count": (1, 2, 3, 5),
    "embedding_length": (16, 24, 36, 64, 96, 160),
    "embedding_length_per_layer_input": _WIDTH,
    "feed_forward_length": _WIDTH,
    "attention.head_count": (1, 2, 3, 4, 5, 6, 7, 8),
    "attention.head_count_kv": (1, 2, 3, 4, 5),
    "attention.key_length": _HEAD,
    "attention.value_length": _HEAD,
    "attention.key_length_mla": _HEAD,
    "attention.value_length_mla": _HEAD,
    "attention.kv_lora_rank": _WIDTH,
    "attention.q_lora_rank": _WIDTH,
    "attention.output_lora_rank": _WIDTH,
    "attention.output_group_count": (1, 2, 4),
    "attention.sliding_window": (1, 2, 3, 5, 9, 64),
    "attention.sliding_window_pattern": (1, 2, 3),
    "attention.indexer.head_count": (1, 3, 4),
    "attention.indexer.key_length": (8, 16, 32, 64),
    "attention.indexer.top_k": (1, 2, 5, 64),
    "attention.indexer.block_size": (1, 2, 3),
    "attention.indexer.local_blocks": (1, 2),
    "rope.dimension_count": (2, 4, 8, 16, 32),
    "expert_count": (1, 2, 3, 5, 8, 9),
    "expert_used_count": (1, 2, 3, 5),
    "expert_feed_forward_length": _WIDTH,
    "expert_shared_feed_forward_length": _WIDTH,
    "expert_shared_count": (1, 2, 3),
    "expert_group_count": (1, 2, 4),
    "expert_group_used_count": (1, 2),
    "expert_gating_func": (1, 2),
    "expert_latent_length": _WIDTH,
    "experts_per_group": (1, 2),
    "interleave_moe_layer_step": (1, 2, 3),
    "leading_dense_block_count": (0, 1, 2),
    "hyper_connection.count": (1, 2, 3),
    "hyper_connection.low_rank": (1, 3),
    "hyper_connection.sinkhorn_iterations": (1, 3),
    "hrm.h_cycles": (1, 3),
    "hrm.l_cycles": (1, 3),
    "kda.head_dim": (8, 16, 32),
    "shortconv.l_cache": (2, 3, 4, 5),
    "ssm.conv_kernel": (2, 3, 4, 5),
    "ssm.group_count": (1, 2, 3, 4),
    "ssm.inner_size": (16, 32, 48, 96, 128),
    "ssm.state_size": (4, 8, 16, 20, 32, 64),
    "ssm.time_step_rank": (1, 2, 3, 4, 6),
    "time_decay_extra_dim": _WIDTH,
    "time_mix_extra_dim": _WIDTH,
    "wkv.head_size": (8, 16, 32, 64),
    "vocab_size": (65, 127, 200),
}
# Sizes smaller than the golden data's, so that the reference is quick.
SMALL: Changes = {
    "embedding_length": 48,
    "feed_forward_length": 40,
    "expert_feed_forward_length": 24,
    "expert_shared_feed_forward_length": 24,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 16,
    "attention.kv_lora_rank": 32,
    "attention.q_lora_rank": 40,
    "attention.indexer.key_length": 16,
    "attention.indexer.head_count": 2,
    "rope.dimension_count": 16,
    "rope.dimension_sections": [4, 4, 4, 4],
    "ssm.inner_size": 64,
    "ssm.state_size": 32,
    "kda.head_dim": 32,
    "wkv.head_size": 16,
    "vocab_size": 127,
}
FACTORS = (0.5, 0.8, 1.25, 2.0)  # of what a floating-point key holds
# Keys that files may have though the golden ones do not.
ADDED = ("attention.key_length", "attention.value_length", "rope.dimension_count", "expert_group_count",
         "expert_group_used_count", "attention.sliding_window", "attention.head_count_kv")  # fmt: skip


def spec_of(name: str) -> dict[str, Any]:
    """The description of one of ALL."""
    return SPECS[name] if name in SPECS else others.spec_of(name)


def small(name: str) -> Changes:
    """Changes that make a variant of the golden data small, as far as its architecture takes them."""
    if name not in SPECS:
        return {}
    arch = spec_of(name)["arch"]
    has = {full.removeprefix(f"{arch}."): value for full, _, value in spec_of(name)["kv"]}
    sizes = dict(SMALL)
    if "attention.kv_lora_rank" in has:  # MLA: K is a latent row and what is roped, V the latent row
        rank, roped = SMALL["attention.kv_lora_rank"], SMALL["rope.dimension_count"]
        sizes |= {
            "attention.key_length": rank + roped * bool(has["rope.dimension_count"]),
            "attention.value_length": rank,
        }
    return {k: v for k, v in sizes.items() if k in has and has[k] and isinstance(has[k], list) == isinstance(v, list)}


def changes_of(name: str) -> st.SearchStrategy[Changes]:
    """Draws other values of some keys of a variant: integers of a list, floats times a factor, flags turned over."""
    arch = spec_of(name)["arch"]
    drawn: dict[str, st.SearchStrategy[Any]] = {k: st.sampled_from(INTEGERS[k]) for k in ADDED}
    for full, kind, value in spec_of(name)["kv"]:
        key = full.removeprefix(f"{arch}.")
        if key in INTEGERS:
            each = st.sampled_from(INTEGERS[key])
            drawn[key] = (
                each if kind == "u32" else st.lists(each | st.just(0), min_size=len(value), max_size=len(value))
            )
        elif kind == "f32" and value:
            drawn[key] = st.sampled_from([value * f for f in FACTORS])
        elif kind == "bool":
            drawn[key] = st.just(not value)
    return st.lists(st.sampled_from(sorted(drawn)), min_size=1, max_size=6, unique=True).flatmap(
        lambda keys: st.fixed_dictionaries({k: drawn[k] for k in keys})
    )


def varied(name: str, changes: Changes) -> dict[str, Any] | None:
    """The golden data's description of the variant, small and with `changes`; None when its hyperparameters are
    refused."""
    spec, arch = spec_of(name), spec_of(name)["arch"]
    kv = {full.removeprefix(f"{arch}."): (kind, value) for full, kind, value in spec["kv"]}
    for key, value in {**small(name), **changes}.items():
        kv[key] = (kv[key][0] if key in kv else "u32", value)
    bare = {full for full, _, _ in spec["kv"]}  # `tokenizer.` and a few others have no architecture before them
    full = {k if k in bare else f"{arch}.{k}": v for k, v in kv.items()}
    read = {k: np.array(v) if isinstance(v, list) else v for k, (_, v) in full.items()}
    architecture, optional = get_architecture(arch), {tensor for tensor, _ in spec["tensors"]}
    try:
        hp = architecture.hparams(arch, read)
        asked = architecture.declare(hp, ShapeOnlyWeights(optional)).asked.values()
    except ModelError:
        return None
    tensors = [(s.name, list(s.ne)) for s in asked if not s.optional or s.name in optional]
    return {**spec, "kv": [(k, *v) for k, v in full.items()], "tensors": tensors, "n_vocab": hp.n_vocab}


def logits_of(model: Model, ids: list[int], pieces: tuple[int, ...], **options: Any) -> Floats:
    """The logits of all tokens (of an encoder: their embeddings), evaluated in pieces of these sizes."""
    given = {"n_batch": 64, "n_ubatch": 64, "type_k": DType.F32, "type_v": DType.F32, **options}
    rows, at = list[Floats](), 0
    with model.new_context(64, **given) as ctx:
        for n in pieces:
            batch = Batch()
            for pos in range(at, at + n):
                batch.add(ids[pos], pos, [0], logits=True)
            ctx.decode(batch)
            rows.append((ctx.logits if len(ctx.logits) else ctx.embeddings).copy())
            at += n
    return np.concatenate(rows)


def error(got: Floats, want: Floats) -> float:
    x, y = got.astype(np.float64), want.astype(np.float64)
    return float(((x - y) ** 2).sum() / max((y**2).sum(), 1e-30))


def check_varied(name: str, changes: Changes, folder: Path) -> bool:
    """Compare the CPU with the reference: at once, in pieces, with flash attention; one thread and three give the same
    bits. False when the hyperparameters are refused."""
    assert ARCH_FILE is not None
    spec = varied(name, changes)
    if spec is None:
        return False
    path = folder / "m.gguf"
    ARCH_FILE.write(name, path, spec=spec)
    ids: list[int] = ARCH_FILE.tokens(name, spec=spec).tolist()[:N_TOKENS]
    whole = (N_TOKENS,)
    with load_model(path) as model:
        want = logits_of(model, ids, whole, backend="ref")
        assert np.isfinite(want).all(), "the reference gives no numbers"
        ways: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
            "at once": (whole, {"n_threads": 1}),
            "three threads": (whole, {"n_threads": 3}),
        }
        if model.hparams.causal_attn:
            ways["in pieces"] = ((6, 1, 1, 3), {"n_threads": 2})
            ways["flash attention"] = ((8, 1, 1, 1), {"n_threads": 1, "flash_attn": True})
        got = {way: logits_of(model, ids, pieces, **options) for way, (pieces, options) in ways.items()}
    assert got["at once"].tobytes() == got["three threads"].tobytes()
    for way, logits in got.items():
        assert error(logits, want) <= MAX_NMSE, f"{way}: NMSE {error(logits, want):.3g}"
    return True
