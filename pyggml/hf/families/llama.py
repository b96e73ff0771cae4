"""Llama, and families whose rope turns neighbours in the GGUF and halves of a head in the checkpoint."""

from __future__ import annotations

from typing import cast

from ..config import Config
from ..family import Family, Key, Of
from ..metadata import layers_of, window, window_of
from ..moves import ROPE_PAIRS, halves
from .spelling import BLOCK_SPARSE

GRANITE_KEYS: dict[str, Key] = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}

GRANITE_MERGED = {
    "block_sparse_moe.input_linear.weight": halves("ffn_gate_exps", "ffn_up_exps"),
    "shared_mlp.input_linear.weight": halves("ffn_gate_shexp", "ffn_up_shexp"),
}
GRANITE_SPELLED = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}


def _roped(c: Config) -> list[bool]:
    every = c.integer("no_rope_layer_interval", default=4)
    layers = c.get("no_rope_layers", default=[int((il + 1) % every != 0) for il in range(c.n_layer)])
    if not isinstance(layers, list) or len(cast("list[object]", layers)) != c.n_layer:
        c.fail(f"no_rope_layers must have one of {c.n_layer} layers each")
    return [bool(layer) for layer in cast("list[object]", layers)]


def _ropes(c: Config) -> list[bool] | None:
    """Which layers have rope, for a key that only pyggml reads (models/plain.py); None when it is all but every fourth,
    as llama.cpp assumes."""
    roped = _roped(c)
    return None if roped == [(il + 1) % 4 != 0 for il in range(c.n_layer)] else roped


def _smollm3_window(c: Config) -> dict[str, object]:
    windowed = [not roped for roped in _roped(c)]
    if c.get("layer_types", default=None):
        windowed = layers_of(c, "sliding_attention")
    return window_of(c, windowed, said=c.get("use_sliding_window", default=False) is True)


FAMILIES = (
    Family(
        arch="llama",
        types=("llama",),
        cls="LlamaForCausalLM",
        keys={"expert_count": None, "expert_used_count": None},
        moves=ROPE_PAIRS,
    ),
    # llama.cpp has no window for `llama`. pyggml reads the key (models/llama.py).
    Family(
        arch="llama",
        types=("mistral",),
        cls="MistralForCausalLM",
        keys={"expert_count": None, "expert_used_count": None},
        moves=ROPE_PAIRS,
        more=window,
    ),
    Family(
        arch="llama",
        types=("mixtral",),
        cls="MixtralForCausalLM",
        moves=ROPE_PAIRS,
        more=window,
        spelled=BLOCK_SPARSE,
    ),
    Family(arch="arcee", types=("arcee",), cls="ArceeForCausalLM", act="relu2", moves=ROPE_PAIRS),
    Family(
        arch="smollm3",
        types=("smollm3",),
        cls="SmolLM3ForCausalLM",
        keys={"attention.rope_pattern": Of(_ropes, lambda ropes, keys: {"no_rope_layers": [int(r) for r in ropes]})},
        more=_smollm3_window,
        moves=ROPE_PAIRS,
    ),
    Family(
        arch="apertus",
        types=("apertus",),
        cls="ApertusForCausalLM",
        act="",
        spelled={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        scalars={
            "act_fn.alpha_n": ("xielu.alpha_n", (1,)),
            "act_fn.alpha_p": ("xielu.alpha_p", (1,)),
            "act_fn.beta": ("xielu.beta", ()),
            "act_fn.eps": ("xielu.eps", ()),
        },
    ),
    Family(arch="granite", types=("granite",), cls="GraniteForCausalLM", keys=GRANITE_KEYS, moves=ROPE_PAIRS),
    Family(
        arch="granitemoe",
        types=("granitemoe", "granitemoeshared"),
        cls="GraniteMoeForCausalLM",
        keys={**GRANITE_KEYS, "expert_shared_feed_forward_length": "shared_intermediate_size"},
        moves=ROPE_PAIRS,
        merged=GRANITE_MERGED,
        spelled=GRANITE_SPELLED,
    ),
)
