"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ..config import Config
from ..family import Family, Key, NextnLayers, Of
from ..metadata import all_windowed, dense_back, dense_lead, layers_of, of_model, qwen_window, window, window_of
from ..moves import ROW, TRANSPOSED, alternating, alternating_rows, halves_transposed
from .plain import HUNYUAN_KEYS, HUNYUAN_NORMS
from .spelling import APPENDED, BLOCK_SPARSE, mtp_layers, shared

_BIAS = {r"^model\.layers\.(\d+)\.(?:.*\.)?e_score_correction_bias$": r"=blk.\1.exp_probs_b.bias"}
_SHARED_EXPERT = shared("mlp.shared_expert")
_SIGMOID = 2  # `expert_gating_func` of classes that ignore what a config says
_SHARED: dict[str, Key] = {
    "expert_gating_func": _SIGMOID,
    "expert_shared_count": Of(
        lambda c: c.get("n_shared_experts", "num_shared_experts", default=None),
        lambda n, keys: {"n_shared_experts": n, "num_shared_experts": n},
    ),
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": Of(dense_lead, dense_back),
}


def _first(*names: str) -> Of:
    """A number; of a list with one for each layer, the first."""

    def there(c: Config) -> object:
        value = c.get(*names, default=None)
        return value[0] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]

    return Of(there, lambda n, keys: {names[0]: n})


def _not_normed(c: Config) -> bool | None:
    return None if c.get("norm_topk_prob", default=False) is True else False


def _half_roped(c: Config) -> int:
    return int(c.head * float(c.rope.get("partial_rotary_factor", 0.5)))


def _half_roped_back(n: int, keys: Mapping[str, Any]) -> dict[str, object]:
    head = keys.get("attention.key_length") or keys["embedding_length"] // keys["attention.head_count"]
    return {"partial_rotary_factor": n / head}


def _mimo_windows(c: Config) -> list[bool]:
    """For each layer, whether it has the window. Drafting layers always have it."""
    if c.get("hybrid_layer_pattern", default=None) is None:  # the transformers library's name
        return [*layers_of(c, "sliding_attention"), *[True] * c.n_nextn]
    pattern = c.get("hybrid_layer_pattern")
    if not isinstance(pattern, list) or len(cast("list[object]", pattern)) != c.n_layer:
        c.fail(f"hybrid_layer_pattern must have one of {c.n_layer} layers each")
    return [bool(w) for w in cast("list[object]", pattern)] + [True] * c.n_nextn


def _mimo_heads_kv(c: Config) -> list[int]:
    n, n_swa = c.integer("num_key_value_heads"), c.integer("swa_num_key_value_heads")
    return [n_swa if w else n for w in _mimo_windows(c)]


def _mimo_heads_kv_back(n: object, keys: Mapping[str, Any]) -> dict[str, object]:
    windows: list[bool] = np.asarray(keys["attention.sliding_window_pattern"], np.bool_).tolist()
    heads = np.broadcast_to(np.asarray(n), len(windows)).tolist()
    of = dict(zip(windows, heads, strict=True))
    return {"num_key_value_heads": of.get(False, heads[0]), "swa_num_key_value_heads": of.get(True, heads[0])}


def _refuse_mimo(c: Config) -> dict[str, object]:
    """Refuse what a GGUF of MiMo-V2 has no keys for. llama.cpp's converter refuses the same."""
    for name in ("head_dim", "v_head_dim", "num_attention_heads"):
        value = c.get(f"swa_{name}", default=None)
        if value is not None and value != c.get(name):
            c.fail(f"swa_{name} must be {name}, {c.get(name)}, not {value!r:.60}")
    return {}


def _all_sparse(c: Config) -> None:
    """Refuse layers without experts, which no GGUF of the architecture can describe."""
    if c.get("decoder_sparse_step", default=1) != 1:
        c.fail(f"decoder_sparse_step is {c.get('decoder_sparse_step')!r:.60}: only 1 is supported")
    if c.get("mlp_only_layers", default=None):
        c.fail("mlp_only_layers: layers without experts are not supported")


def _qwen2_moe(c: Config) -> dict[str, object]:
    _all_sparse(c)
    if c.get("layer_types", default=None) is not None:
        return qwen_window(c)
    first = c.integer("max_window_layers")  # from there on no layer has it, unlike in other families
    windowed = [il % 2 == 0 and il < first for il in range(c.n_layer)]
    return window_of(c, windowed, said=c.get("use_sliding_window") is True)


def _qwen3_moe(c: Config) -> dict[str, object]:
    _all_sparse(c)
    return qwen_window(c)


def _two(c: Config) -> int:
    n = c.integer("num_experts_per_tok")
    if n != 2:
        c.fail(f"num_experts_per_tok is {n}: a sparse mixer has 2")
    return n


def _last_moe(c: Config) -> dict[str, object]:
    last = c.integer("moe_layer_end_index", default=-1)
    if last not in (-1, c.n_layer - 1):
        c.fail(f"moe_layer_end_index is {last}: only -1 and that of the last layer are supported")
    return {}


def _refuse_llama4(c: Config) -> dict[str, object]:
    """Refuse layers that Llama 4 does not have, which no GGUF of it can describe."""
    n, step = c.n_layer, c.integer("interleave_moe_layer_step")
    interval = c.integer("no_rope_layer_interval", default=4)
    ropes = c.get("no_rope_layers", default=None) or [int((il + 1) % interval != 0) for il in range(n)]
    kinds = ["full_attention" if (il + 1) % 4 == 0 else "chunked_attention" for il in range(n)]
    normed = c.integer("num_local_experts", default=16) != 128  # the model with 128 experts has no norms of Q and K
    for name, said, only in (
        ("moe_layers", c.get("moe_layers", default=None), list(range(step - 1, n, step))),
        ("no_rope_layers", ropes, [int((il + 1) % 4 != 0) for il in range(n)]),
        ("layer_types", c.get("layer_types", default=None), kinds),
        ("use_qk_norm", c.get("use_qk_norm", default=True), normed),
    ):
        if said is not None and said != only:
            c.fail(f"{name} is {said!r:.60}: only {only!r:.60} is supported here")
    return {}


def _afmoe_window(c: Config) -> dict[str, object]:
    """The keys of the window, and of the layers with rope: those with a window, unless they are llama.cpp's."""
    found, usual = window(c), [(il + 1) % 4 != 0 for il in range(c.n_layer)]
    windowed = found.get("attention.sliding_window_pattern", usual)
    return found if windowed == usual else {**found, "attention.rope_pattern": windowed}


FAMILIES = (
    Family(
        arch="qwen2moe",
        types=("qwen2_moe",),
        cls="Qwen2MoeForCausalLM",
        more=_qwen2_moe,
        spelled=_SHARED_EXPERT,
        keys={
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "expert_weights_norm": "norm_topk_prob",
        },
        moves={"ffn_gate_inp_shexp": ROW},
    ),
    Family(
        arch="qwen3moe",
        types=("qwen3_moe",),
        cls="Qwen3MoeForCausalLM",
        more=_qwen3_moe,
        # Files of llama.cpp do not have this key and mean true.
        keys={"expert_weights_norm": Of(_not_normed, lambda normed, keys: {"norm_topk_prob": normed})},
        constants={"norm_topk_prob": True},
    ),
    Family(
        arch="olmoe",
        types=("olmoe",),
        cls="OlmoeForCausalLM",
        keys={"expert_feed_forward_length": "intermediate_size", "expert_weights_norm": "norm_topk_prob"},
    ),
    Family(
        arch="phimoe",
        types=("phimoe",),
        cls="PhimoeForCausalLM",
        more=all_windowed,
        spelled=BLOCK_SPARSE,
        # Only pyggml reads these keys (models/phimoe.py). llama.cpp's norms and router are not those of the authors.
        keys={
            "attention.layer_norm_epsilon": "rms_norm_eps",
            "expert_used_count": Of(_two, lambda n, keys: {"num_experts_per_tok": n}),
            "expert_router_jitter": Of(lambda c: c.number("router_jitter_noise", default=0.01)),
        },
    ),
    Family(
        arch="afmoe",
        types=("afmoe",),
        cls="AfmoeForCausalLM",
        spelled={
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b": "mlp.expert_bias=",
        },
        keys={
            **_SHARED,
            "attention.rope_pattern": Of(lambda c: None, lambda ropes, keys: {}),  # layers with a window
            "leading_dense_block_count": "num_dense_layers",
            "expert_weights_norm": True,
            "expert_weights_scale": "route_scale",
            "embedding_scale": Of(
                lambda c: None if c.get("mup_enabled", default=False) else 1.0,
                lambda scale, keys: {"mup_enabled": False},
            ),
        },
        more=_afmoe_window,
        names={r"mlp\.expert_bias$": "mlp.expert_bias.bias"},
    ),
    Family(arch="dots1", types=("dots1",), cls="Dots1ForCausalLM", keys=_SHARED, names=_BIAS, more=qwen_window),
    Family(
        arch="glm4moe",
        types=("glm4_moe",),
        cls="Glm4MoeForCausalLM",
        by_norm={"use_qk_norm": ("attn_q_norm", True)},
        keys=_SHARED,
        names=_BIAS,
        by_tensors=lambda ne: {"use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in ne)},
        nextn=APPENDED,
    ),
    # Ling 2.0 (arXiv 2510.22115)
    Family(
        arch="bailingmoe2",
        types=("bailing_moe_v2",),
        cls="BailingMoeV2ForCausalLM",
        keys={
            **_SHARED,
            "rope.dimension_count": Of(_half_roped, _half_roped_back),
            "expert_shared_feed_forward_length": ("moe_shared_expert_intermediate_size", "moe_intermediate_size"),
        },
        names={r"mlp\.gate\.expert_bias$": "mlp.gate.expert_bias.bias"},
        spelled={
            "token_embd": "model.word_embeddings",
            "attn_qkv": "attention.query_key_value",
            "attn_q_norm": "attention.query_layernorm",
            "attn_k_norm": "attention.key_layernorm",
            "attn_output": "attention.dense",
            "exp_probs_b": "mlp.gate.expert_bias=",
        },
        nextn=replace(APPENDED, own={**APPENDED.own, "layer_output_norm": "{layer}.final_layernorm"}),
    ),
    # MiMo-V2-Flash (arXiv 2601.02780); later models store Q, K and V together, in parts for several devices
    Family(
        arch="mimo2",
        types=("mimo_v2_flash",),
        cls="MiMoV2FlashForCausalLM",
        told=("layer_types",),  # hybrid_layer_pattern says the same
        keys={
            "attention.head_count_kv": Of(_mimo_heads_kv, _mimo_heads_kv_back),
            "attention.value_length": ("v_head_dim", "head_dim"),
            "attention.value_scale": "attention_value_scale",
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": Of(
                _mimo_windows, lambda n, keys: {"hybrid_layer_pattern": [int(w) for w in of_model(n, keys)]}
            ),
            "attention.layer_norm_rms_epsilon": ("layernorm_epsilon", "rms_norm_eps"),
            "attention.layer_norm_epsilon": None,
            "rope.freq_base_swa": "swa_rope_theta",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_gating_func": _SIGMOID,
        },
        more=_refuse_mimo,
        names={**_BIAS, r"\.attention_sink_bias$": ".sinks"},
        spelled={"attn_sinks": "self_attn.attention_sink_bias="},
        nextn=NextnLayers(
            says="num_nextn_predict_layers",
            own={
                **{f"nextn.{x}": f"{{layer}}.{x}" for x in ("eh_proj", "enorm", "hnorm")},
                "ffn_norm": "{layer}.pre_mlp_layernorm",
                "layer_output_norm": "{layer}.final_layernorm",
            },
            layers="model.mtp.layers",
        ),
    ),
    Family(
        arch="exaone-moe",
        types=("exaone_moe",),
        cls="ExaoneMoeForCausalLM",
        keys=_SHARED,
        names=_BIAS,
        more=window,
        spelled={"exp_probs_b": "mlp.e_score_correction_bias="},
        nextn=mtp_layers("num_nextn_predict_layers"),
    ),
    Family(
        arch="ernie4_5-moe",
        types=("ernie4_5_moe",),
        cls="Ernie4_5_MoeForCausalLM",
        more=_last_moe,
        spelled={"exp_probs_b": "mlp.moe_statics.e_score_correction_bias="},
        keys={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
            "expert_shared_count": "moe_num_shared_experts",
            "expert_shared_feed_forward_length": Of(
                lambda c: c.integer("moe_num_shared_experts", default=0) * c.integer("moe_intermediate_size") or None
            ),
        },
        names=_BIAS,
        skip=(r"^model\.mtp_",),  # drafting layers, which GGUFs of this architecture do not have
        moves={"exp_probs_b": ROW},
    ),
    Family(
        arch="minimax-m2",
        types=("minimax_m2",),
        cls="MiniMaxM2ForCausalLM",
        spelled={**BLOCK_SPARSE, "exp_probs_b": "block_sparse_moe.e_score_correction_bias="},
        keys={"expert_feed_forward_length": "intermediate_size", "expert_gating_func": _SIGMOID},
        names=_BIAS,
    ),
    Family(
        arch="hunyuan-moe",
        types=("hunyuan_v1_moe",),
        cls="HunYuanMoEV1ForCausalLM",
        spelled={**HUNYUAN_NORMS, **shared("mlp.shared_mlp"), "ffn_gate_inp": "mlp.gate.wg"},
        keys={
            **HUNYUAN_KEYS,
            "expert_feed_forward_length": "intermediate_size",
            "expert_used_count": _first("moe_topk"),
            "expert_shared_count": _first("num_shared_expert"),
            "expert_shared_feed_forward_length": "intermediate_size",
        },
    ),
    Family(
        arch="gpt-oss",
        types=("gpt_oss",),
        cls="GptOssForCausalLM",
        act="",
        spelled={
            "ffn_gate_inp": "mlp.router",
            "ffn_down_exps": "mlp.experts.down_proj=",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias=",
        },
        keys={"expert_feed_forward_length": "intermediate_size"},
        more=window,
        names={
            r"^model\.layers\.(\d+)\.mlp\.experts\.down_proj_bias$": r"=blk.\1.ffn_down_exps.bias",
            r"^model\.layers\.(\d+)\.mlp\.experts\.down_proj_blocks$": r"=blk.\1.ffn_down_exps.weight",
        },
        merged={
            "mlp.experts.gate_up_proj": alternating("ffn_gate_exps", "ffn_up_exps", transposed=True),
            "mlp.experts.gate_up_proj_bias": alternating("ffn_gate_exps.bias", "ffn_up_exps.bias", transposed=False),
            "mlp.experts.gate_up_proj_blocks": alternating_rows("ffn_gate_exps", "ffn_up_exps"),  # of MXFP4
        },
        moves={"ffn_down_exps.weight": TRANSPOSED},
    ),
    Family(
        arch="llama4",
        types=("llama4_text", "llama4"),
        cls="Llama4ForCausalLM",
        more=_refuse_llama4,
        spelled={
            **{f"ffn_{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")},
            **shared("feed_forward.shared_expert"),
            "ffn_gate_inp": "feed_forward.router",
            "ffn_down_exps": "feed_forward.experts.down_proj=",
        },
        keys={
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
            # Only pyggml reads this key (models/llama4.py); llama.cpp always takes 8192.
            "attention.chunk_size": "attention_chunk_size",
        },
        merged={"feed_forward.experts.gate_up_proj": halves_transposed("ffn_gate_exps", "ffn_up_exps")},
        moves={"ffn_down_exps.weight": TRANSPOSED},
    ),
)
