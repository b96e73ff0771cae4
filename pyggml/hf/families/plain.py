"""Plain decoders, whose keys follow from the config one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from ..config import Config
from ..family import Family, Key, Of
from ..metadata import all_windowed, qwen_window, window
from ..moves import PLUS_ONE, ROPE_HALVES, ROPE_PAIRS
from .mla import INNER_EPS, NOPE_AND_ROPE
from .spelling import APPENDED

HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


def _hunyuan_base(c: Config) -> float | None:
    """The base of the rope, stretched by `alpha`."""
    rope = c.rope
    base, alpha = rope.get("rope_theta"), rope.get("alpha")
    return base * alpha ** (c.head / (c.head - 2)) if rope["rope_type"] == "dynamic" and alpha else base


HUNYUAN_KEYS: dict[str, Key] = {"rope.freq_base": Of(_hunyuan_base)}


def _stablelm_told(ne: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    return {
        "use_qkv_bias": any(name.endswith(".attn_q.bias") for name in ne),
        "qk_layernorm": any(name.endswith(".attn_q_norm.weight") for name in ne),
        "use_parallel_residual": not any(name.endswith(".ffn_norm.weight") for name in ne),
    }


def _cohere2_scale(c: Config) -> float:
    """The factor of the logits. Aya Vision's class in the transformers library leaves it out."""
    scale = c.number("logit_scale")
    return 1.0 if c.outer.get("model_type") == "aya_vision" else scale


def _n_deepstack(c: Config) -> int | None:
    """How many layers get additions from the tower (a key that llama.cpp reads, too)."""
    vision = cast("dict[str, list[int]]", c.outer.get("vision_config") or {})
    return len(vision.get("deepstack_visual_indexes", [8, 16, 24])) if c.outer else None


def _no_mscale(c: Config) -> dict[str, object]:
    if c.rope["rope_type"] == "yarn" and c.rope.get("mscale_all_dim"):
        c.fail("rope_parameters: mscale_all_dim scales the scores of attention, too: of minicpm3 it is not supported")
    return {}


def _sections(c: Config) -> list[int]:
    """How many pairs of a head turn by each of a token's positions (time, height, width)."""
    usual = {"qwen3_vl_text": [24, 20, 20], "glm4v_text": [8, 12, 12]}.get(c.model_type, [16, 24, 24])
    sections = list(c.rope.get("mrope_section") or usual)
    return [*sections, *[0] * (4 - len(sections))]


THREE_POSITIONS: dict[str, Key] = {
    "rope.dimension_sections": Of(
        _sections, lambda n, keys: {"rope_parameters": {"mrope_section": n[:-1] if n[-1] == 0 else n}}
    )
}
_GLM4 = {
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}

FAMILIES = (
    Family(arch="qwen2", types=("qwen2",), cls="Qwen2ForCausalLM", more=qwen_window),
    Family(arch="qwen3", types=("qwen3",), cls="Qwen3ForCausalLM", more=qwen_window),
    Family(arch="seed_oss", types=("seed_oss",), cls="SeedOssForCausalLM"),
    Family(arch="ernie4_5", types=("ernie4_5",), cls="Ernie4_5ForCausalLM"),
    Family(
        arch="glm4",
        types=("glm4",),
        cls="Glm4ForCausalLM",
        spelled=_GLM4,
        nextn=APPENDED,
    ),
    # The text parts of models that see. In GLM-4.1V's checkpoints a rope turns neighbours; with three positions the
    # GGUF has them half a head apart.
    Family(
        arch="glm4",
        types=("glm4v_text",),
        cls="Glm4vForConditionalGeneration",
        keys=THREE_POSITIONS,
        moves=ROPE_HALVES,
        spelled=_GLM4,
    ),
    Family(arch="qwen2", types=("minicpmv",), cls="MiniCPMV", more=qwen_window),
    Family(arch="qwen2", types=("minicpmo",), cls="MiniCPMO", more=qwen_window),
    Family(
        arch="qwen2vl",
        types=("qwen2_vl_text", "qwen2_vl"),
        cls="Qwen2VLForConditionalGeneration",
        keys=THREE_POSITIONS,
        more=qwen_window,
    ),
    Family(
        arch="qwen2vl",
        types=("qwen2_5_vl_text", "qwen2_5_vl"),
        cls="Qwen2_5_VLForConditionalGeneration",
        keys=THREE_POSITIONS,
        more=qwen_window,
    ),
    Family(
        arch="qwen3vl",
        types=("qwen3_vl_text",),
        cls="Qwen3VLForConditionalGeneration",
        keys={**THREE_POSITIONS, "n_deepstack_layers": Of(_n_deepstack)},
    ),
    Family(
        arch="hunyuan-dense",
        types=("hunyuan_v1_dense",),
        cls="HunYuanDenseV1ForCausalLM",
        keys=HUNYUAN_KEYS,
        spelled=HUNYUAN_NORMS,
    ),
    Family(
        arch="minicpm3",
        types=("minicpm3",),
        cls="MiniCPM3ForCausalLM",
        told=("head_dim",),  # the same as the rope's
        more=_no_mscale,
        keys={
            "attention.inner_rms_epsilon": INNER_EPS,
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.key_length": NOPE_AND_ROPE,
            "attention.value_length": "v_head_dim",
            "rope.dimension_count": "qk_rope_head_dim",
        },
        constants={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},  # models/minicpm3.py has no others
    ),
    Family(
        arch="olmo",
        types=("olmo",),
        cls="OlmoForCausalLM",
        keys={"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": "clip_qkv"},
        moves=ROPE_PAIRS,
    ),
    Family(arch="olmo2", types=("olmo2",), cls="Olmo2ForCausalLM"),
    Family(arch="olmo2", types=("olmo3",), cls="Olmo3ForCausalLM", more=window),
    Family(
        arch="phi3", types=("phi3",), cls="Phi3ForCausalLM", spelled={"ffn_up": "mlp.gate_up_proj"}, more=all_windowed
    ),
    Family(
        arch="phi2",
        types=("phi",),
        cls="PhiForCausalLM",
        by_norm={"qk_layernorm": ("attn_q_norm", True)},
        by_tensors=lambda ne: {"qk_layernorm": any(name.endswith(".attn_q_norm.weight") for name in ne)},
        names={r"^model\.layers\.(\d+)\.self_attn\.([qk])_layernorm\.": r"=blk.\1.attn_\2_norm."},
        act="gelu_new",
        spelled={
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
            "output_norm": "model.final_layernorm",
            **{f"attn_{x}_norm": f"self_attn.{x}_layernorm" for x in "qk"},
        },
    ),
    Family(
        arch="starcoder2",
        types=("starcoder2",),
        cls="Starcoder2ForCausalLM",
        act="gelu_pytorch_tanh",
        spelled={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        more=all_windowed,
    ),
    Family(
        arch="stablelm",
        types=("stablelm",),
        cls="StableLmForCausalLM",
        by_norm={"use_parallel_residual": ("ffn_norm", False), "qk_layernorm": ("attn_q_norm", True)},
        names={r"\.([qk])_layernorm\.norms\.": r".\1_norm."},
        by_tensors=_stablelm_told,
        spelled={f"attn_{x}_norm": f"self_attn.{x}_layernorm.norms.{{}}" for x in "qk"},
    ),
    Family(
        arch="nemotron",
        types=("nemotron",),
        cls="NemotronForCausalLM",
        act="relu2",
        keys={"attention.layer_norm_epsilon": "norm_eps", "attention.layer_norm_rms_epsilon": None},
        moves={"*_norm.weight": PLUS_ONE},
    ),
    Family(arch="jais2", types=("jais2",), cls="Jais2ForCausalLM", act="relu2"),
    Family(
        arch="command-r",
        types=("cohere",),
        cls="CohereForCausalLM",
        by_norm={"use_qk_norm": ("attn_q_norm", True)},
        by_tensors=lambda ne: {"use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in ne)},
        keys={"logit_scale": "logit_scale"},
    ),
    Family(
        arch="cohere2",
        types=("cohere2",),
        cls="Cohere2ForCausalLM",
        keys={"logit_scale": Of(_cohere2_scale, lambda scale, keys: {"logit_scale": scale})},
        more=window,
    ),
    Family(arch="exaone4", types=("exaone4",), cls="Exaone4ForCausalLM", more=window),
)
