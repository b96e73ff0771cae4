"""Multi-head latent attention: DeepSeek-V2 and what came after it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..config import Config
from ..family import Family, Key, Of
from ..metadata import dense_back, dense_lead, of_model
from ..moves import KV_B
from .spelling import APPENDED

_INNER_EPS = 1e-6
_N_ROT = "qk_rope_head_dim"


def _log_mul(c: Config) -> float | None:
    """What YaRN multiplies the logarithm of its factor with, for the scores of attention. Refuses ropes that no GGUF of
    latent attention says."""
    rope = c.rope
    kind, mscale = rope["rope_type"], rope.get("mscale_all_dim")
    if kind in ("default", "dynamic"):
        return None
    if kind != "yarn" or not mscale or mscale != rope.get("mscale") or rope.get("attention_factor") is not None:
        c.fail(
            f"rope_parameters: with latent attention only YaRN is supported, with the same mscale and mscale_all_dim, "
            f"not {kind!r:.60} with {rope.get('mscale')!r:.60} and {mscale!r:.60}"
        )
    return 0.1 * float(mscale)


def _inner_eps(c: Config) -> float | None:
    """The transformers library's classes have 1e-6 for these norms whatever a config says."""
    return None if c.number("rms_norm_eps") == _INNER_EPS else _INNER_EPS


INNER_EPS = Of(_inner_eps)  # of pyggml alone (models/metadata.py): llama.cpp has that of the other norms


NOPE_AND_ROPE = Of(
    lambda c: c.integer("qk_nope_head_dim") + c.integer(_N_ROT),
    lambda n, keys: {"qk_nope_head_dim": n - keys["rope.dimension_count"]},
)
_MLA: dict[str, Key] = {
    # All heads read the same latent row.
    "attention.head_count_kv": Of(lambda c: 1, lambda n, keys: {"num_key_value_heads": keys["attention.head_count"]}),
    "attention.inner_rms_epsilon": INNER_EPS,
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length": Of(lambda c: c.integer("kv_lora_rank") + c.integer(_N_ROT)),
    "attention.value_length": "kv_lora_rank",
    "attention.key_length_mla": NOPE_AND_ROPE,
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": _N_ROT,
    "rope.scaling.yarn_log_multiplier": Of(_log_mul),
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": Of(lambda c: dense_lead(c) or 0, dense_back),
}


def _told_q(ne: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """The small ones make queries in one step."""
    return {"q_lora_rank": None} if "blk.0.attn_q.weight" in ne else {}


_V3: dict[str, Key] = {**_MLA, "expert_gating_func": 2}  # always sigmoid, whether the config says so or not
_SPLITS = {"self_attn.kv_b_proj.weight": KV_B}
_BIAS = {r"^model\.layers\.(\d+)\.(?:.*\.)?e_score_correction_bias$": r"=blk.\1.exp_probs_b.bias"}
_DSA: dict[str, Key] = {
    **_V3,
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
_TOLD = ("num_key_value_heads", "head_dim", "layer_types")  # which follow from others
_INDEXER_SPELLED = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_INDEXER = {
    rf"^model\.layers\.(\d+)\.{re.escape(name)}\.": rf"=blk.\1.{role}." for role, name in _INDEXER_SPELLED.items()
}


def _indexers(c: Config) -> list[bool] | None:
    """Of each layer of the model whether it has an indexer of its own; of heads llama.cpp wants no word."""
    types = c.get("indexer_types", default=None)
    return None if types is None else [kind == "full" for kind in types[: c.n_layer]]


def _indexers_back(own: list[bool], keys: Mapping[str, Any]) -> dict[str, object]:
    return {"indexer_types": ["full" if i else "shared" for i in of_model(own, keys)]}


FAMILIES = (
    Family(
        arch="deepseek2",
        types=("deepseek_v2",),
        cls="DeepseekV2ForCausalLM",
        by_tensors=_told_q,
        keys={
            **_MLA,
            "expert_gating_func": Of(lambda c: None),
            "expert_weights_norm": Of(lambda c: False),  # whatever norm_topk_prob says
        },
        splits=_SPLITS,
        told=(*_TOLD, "norm_topk_prob"),
        constants={"topk_method": "greedy"},
    ),
    Family(
        arch="deepseek2",
        types=("deepseek_v3",),
        cls="DeepseekV3ForCausalLM",
        by_tensors=_told_q,
        keys=_V3,
        splits=_SPLITS,
        told=_TOLD,
        names=_BIAS,
        heads=APPENDED,
    ),
    Family(
        arch="deepseek32",
        types=("deepseek_v32",),
        cls="DeepseekV32ForCausalLM",
        keys=_DSA,
        splits=_SPLITS,
        told=_TOLD,
        names={**_BIAS, **_INDEXER},
        table="deepseek2",
        spelled=_INDEXER_SPELLED,
        heads=APPENDED,
    ),
    # GLM-5 (huggingface.co/zai-org/GLM-5): layers without an indexer attend to what the last one before chose.
    Family(
        arch="glm-dsa",
        types=("glm_moe_dsa",),
        cls="GlmMoeDsaForCausalLM",
        keys={**_DSA, "attention.indexer.types": Of(_indexers, _indexers_back)},
        splits=_SPLITS,
        told=_TOLD,
        names={**_BIAS, **_INDEXER},
        spelled=_INDEXER_SPELLED,
        heads=APPENDED,
    ),
)
