"""Multi-head latent attention: DeepSeek-V2 and its successors."""

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
    """The multiplier of YaRN's logarithm in the scale of scores. Refuses ropes that a GGUF with latent attention cannot
    describe."""
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
    """The epsilon of the norms inside attention: 1e-6 in the transformers library, whatever a config says."""
    return None if c.number("rms_norm_eps") == _INNER_EPS else _INNER_EPS


INNER_EPS = Of(_inner_eps)  # only pyggml reads this key (models/metadata.py); llama.cpp takes the other norms' epsilon


NOPE_AND_ROPE = Of(
    lambda c: c.integer("qk_nope_head_dim") + c.integer(_N_ROT),
    lambda n, keys: {"qk_nope_head_dim": n - keys["rope.dimension_count"]},
)
_MLA: dict[str, Key] = {
    # All heads read one latent row.
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
    """The rank of queries on the way back. Small models compute queries in one step and have none."""
    return {"q_lora_rank": None} if "blk.0.attn_q.weight" in ne else {}


_V3: dict[str, Key] = {**_MLA, "expert_gating_func": 2}  # always sigmoid, whatever the config says
_MERGED = {"self_attn.kv_b_proj.weight": KV_B}
_BIAS = {r"^model\.layers\.(\d+)\.(?:.*\.)?e_score_correction_bias$": r"=blk.\1.exp_probs_b.bias"}
_DSA: dict[str, Key] = {
    **_V3,
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
_TOLD = ("num_key_value_heads", "head_dim", "layer_types")  # follow from other keys
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
    """For each layer, whether it has an indexer of its own. llama.cpp wants no entries for drafting layers."""
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
        merged=_MERGED,
        told=(*_TOLD, "norm_topk_prob"),
        constants={"topk_method": "greedy"},
    ),
    Family(
        arch="deepseek2",
        types=("deepseek_v3",),
        cls="DeepseekV3ForCausalLM",
        by_tensors=_told_q,
        keys=_V3,
        merged=_MERGED,
        told=_TOLD,
        names=_BIAS,
        nextn=APPENDED,
    ),
    Family(
        arch="deepseek32",
        types=("deepseek_v32",),
        cls="DeepseekV32ForCausalLM",
        keys=_DSA,
        merged=_MERGED,
        told=_TOLD,
        names={**_BIAS, **_INDEXER},
        table="deepseek2",
        spelled=_INDEXER_SPELLED,
        nextn=APPENDED,
    ),
    # GLM-5 (huggingface.co/zai-org/GLM-5): a layer without an indexer uses the choice of the last indexer before it.
    Family(
        arch="glm-dsa",
        types=("glm_moe_dsa",),
        cls="GlmMoeDsaForCausalLM",
        keys={**_DSA, "attention.indexer.types": Of(_indexers, _indexers_back)},
        merged=_MERGED,
        told=_TOLD,
        names={**_BIAS, **_INDEXER},
        spelled=_INDEXER_SPELLED,
        nextn=APPENDED,
    ),
)
