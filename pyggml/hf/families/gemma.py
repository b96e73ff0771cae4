"""Gemma. Up to Gemma 3 the weights of norms are stored minus one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any, cast

import numpy as np

from ..config import Config
from ..family import Array, Family, Key, Of, float32
from ..metadata import layers_of, window
from ..moves import PLUS_ONE
from .spelling import SANDWICH

_TANH = "gelu_pytorch_tanh"
_NORMS = {"*_norm.weight": PLUS_ONE}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_CAPS_2: dict[str, Key] = {  # null means no cap; a missing key means the class's default
    name: Of(lambda c, name=name: c.number(name, default=0.0), lambda cap, keys, name=name: {name: cap or None})
    for name in _CAPS
}
_TABLE = "per_layer_token_embd"  # may lack tokens at the end, which are not text: they get the first one's row
_UNROPED = 1e30  # the frequency factor of dimensions that do not turn
_EXPERT_SCALES = {
    r"^model\.layers\.(\d+)\.router\.scale$": r"=blk.\1.ffn_gate_inp.scale",
    r"^model\.layers\.(\d+)\.router\.per_expert_scale$": r"=blk.\1.ffn_down_exps.scale",
}
_PER_LAYER = {
    **SANDWICH,
    _TABLE: "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}


def _tanh(c: Config) -> None:
    """The activation. Gemma's first configs say gelu and mean its tanh form, as the transformers library knows."""
    name = c.get("hidden_act", default="gelu")
    if name not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
        c.fail(f"hidden_act is {name!r:.60}: of gemma only gelu_pytorch_tanh is supported")


def _prefix(c: Config) -> None:
    """PaliGemma's text model says that attention is bidirectional. It is among the tokens of picture and prompt, see
    `pyggml/llm/media_prompt.py`; what is written behind them is causal."""
    if c.outer.get("model_type") == "paligemma":
        c.get("use_bidirectional_attention", default=None)


def _theta(kind: str, old: str, default: float) -> Callable[[Config], float]:
    """The base of the rope in layers of one kind; `old`: the key of older configs."""

    def there(c: Config) -> float:
        old_names = (old,) if c.knows(old) else ()
        return c.number(f"rope_parameters.{kind}.rope_theta", *old_names, default=default)

    return there


_BOTH: dict[str, Key] = {
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "rope.freq_base": Of(_theta("full_attention", "rope_theta", 1e6)),
    "rope.freq_base_swa": Of(_theta("sliding_attention", "rope_local_base_freq", 1e4)),
}

# -- Gemma 3n ----------------------------------------------------------------------------------------------------------


def _deviations(share: float) -> float:
    """The quantile of the normal distribution at `share`, in standard deviations; -inf for 0. Each step rounds to F32,
    as in the transformers library."""
    p = float32(share)
    if not 0 <= p < 1:
        raise ValueError(f"an activation sparsity of {share}")
    if p == 0:
        return -math.inf
    inverse = NormalDist().inv_cdf((float32(2 * p - 1) + 1) / 2) / math.sqrt(2)  # inverse error function
    return float32(float32(inverse) * float32(math.sqrt(2)))


def _sparsity(c: Config) -> list[float]:
    pattern = c.get("activation_sparsity_pattern", default=None)
    if pattern is None:
        n = 10 if c.n_layer > 10 else 0
        pattern = [0.95] * n + [0.0] * (c.n_layer - n)
    if not isinstance(pattern, list) or len(cast("list[float]", pattern)) != c.n_layer:
        c.fail(f"activation_sparsity_pattern must have a number for each of {c.n_layer} layers")
    return [_deviations(share) for share in cast("list[float]", pattern)]


def _shares(deviations: Array, keys: Mapping[str, Any]) -> dict[str, object]:
    shares = [float(str(np.float32(NormalDist().cdf(d)))) if math.isfinite(d) else 0.0 for d in deviations]
    return {"activation_sparsity_pattern": shares}


def _window_3n(c: Config) -> dict[str, object]:
    if c.get("altup_correct_scale", default=True) is not True:
        c.fail("altup_correct_scale: only true is supported")
    if c.get("layer_types", default=None) is not None:
        return window(c)
    pattern = [(il + 1) % 5 != 0 for il in range(c.n_layer)]
    return {**window(c), "attention.sliding_window_pattern": pattern}


# -- Gemma 4 -----------------------------------------------------------------------------------------------------------


def _windowed(c: Config) -> list[bool]:
    """For each layer, whether it has the window. The last layer never has it."""
    if c.get("layer_types", default=None) is None:
        flags = [(il + 1) % 6 != 0 for il in range(c.n_layer)]
    else:
        flags = layers_of(c, "sliding_attention")
    return [*flags[:-1], False]


def _full(c: Config, name: str) -> int:
    """A value of layers without the window: from `per_layer_config`, or from one key for all of them."""
    layers = c.get("per_layer_config", default=None)
    if layers is None:
        if name == "head_dim":
            return c.integer("global_head_dim", default=512)
        return c.integer(*(("num_global_key_value_heads",) if _k_is_v(c) else ()), name)
    common = c.integer(name)
    found: list[int] = [layers.get(str(il), {}).get(name, common) for il in range(c.n_layer)]
    of_full = {n for n, w in zip(found, _windowed(c), strict=True) if not w}
    if len(of_full) != 1 or any(n != common for n, w in zip(found, _windowed(c), strict=True) if w):
        c.fail(f"per_layer_config: {name} must be one in layers with the window, and one in those without")
    return of_full.pop()


def _k_is_v(c: Config) -> bool:
    return c.get("attention_k_eq_v", default=False) is True


def _heads_kv(c: Config) -> object:
    swa, full = c.integer("num_key_value_heads"), _full(c, "num_key_value_heads")
    return swa if swa == full else [swa if w else full for w in _windowed(c)]


def _heads_kv_back(n: object, keys: Mapping[str, Any]) -> dict[str, object]:
    if not isinstance(n, list):
        return {"num_key_value_heads": n}
    windowed = keys["attention.sliding_window_pattern"].tolist()
    of = dict(zip(windowed, cast("list[int]", n), strict=True))
    return {"num_key_value_heads": of.get(True, of[False]), "num_global_key_value_heads": of[False]}


def _head_full_back(n: int, keys: Mapping[str, Any]) -> dict[str, object]:
    """Written twice: under the key that published configs have, and by layer, as the library writes it now."""
    heads = keys["attention.head_count_kv"]
    windowed = keys["attention.sliding_window_pattern"].tolist()
    per_layer: dict[str, dict[str, int]] = {}
    for il, w in enumerate(windowed):
        if not w:
            per_layer[str(il)] = {"head_dim": n}
            if isinstance(heads, np.ndarray):
                per_layer[str(il)]["num_key_value_heads"] = int(heads[il])
    return {"global_head_dim": n, "per_layer_config": per_layer}


def _n_ff(c: Config) -> object:
    n, own = c.integer("intermediate_size"), c.n_layer - c.integer("num_kv_shared_layers", default=0)
    if c.get("use_double_wide_mlp", default=False) is not True:
        return n
    return [n if il < own else 2 * n for il in range(c.n_layer)]


def _n_ff_back(n: object, keys: Mapping[str, Any]) -> dict[str, object]:
    if not isinstance(n, list):
        return {"intermediate_size": n}
    return {"intermediate_size": cast("list[int]", n)[0], "use_double_wide_mlp": True}


def _experts(*names: str) -> Of:
    """Keys that count only in models with experts."""

    def there(c: Config) -> object:
        return c.get(*names, default=None) if c.get("enable_moe_block", default=False) is True else None

    return Of(there, lambda n, keys: {names[0]: n, "enable_moe_block": True})


def _window_4(c: Config) -> dict[str, object]:
    if c.get("use_bidirectional_attention", default=None) == "all":
        c.fail("use_bidirectional_attention: text whose tokens see those after them is not supported")
    n = c.integer("sliding_window", default=512)
    return {"attention.sliding_window": n, "attention.sliding_window_pattern": _windowed(c)}


def _per_layer_size(c: Config) -> int:
    return c.integer("hidden_size_per_layer_input", default=0 if "unified" in c.model_type else 256)


def _frequencies(c: Config) -> dict[str, Array]:
    """The frequency factors of layers without the window. A part of each head turns, at the speed it would have if the
    whole head turned."""
    half = _full(c, "head_dim") // 2
    default = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    rope: Mapping[str, Any] = c.get("rope_parameters.full_attention", default=default)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "proportional"):
        c.fail(f"the rope type {kind!r} is not supported in layers without the window")
    share = float(rope.get("partial_rotary_factor", 1.0)) if kind == "proportional" else 1.0
    factor = float(rope.get("factor", 1.0)) if kind == "proportional" else 1.0
    n = int(share * 2 * half // 2)
    return {"rope_freqs.weight": np.asarray([factor] * n + [_UNROPED] * (half - n), np.float32)}


def _tokens_of_table(ne: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    table = f"{_TABLE}.weight"
    return {"vocab_size_per_layer_input": ne[table][1]} if table in ne else {}


def _told_3n(ne: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    return {**_tokens_of_table(ne), "laurel_rank": ne["blk.0.laurel_l.weight"][1]}


def _told_4(ne: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    layers = [name.removesuffix("attn_k.weight") for name in ne if name.endswith(".attn_k.weight")]
    return {**_tokens_of_table(ne), "attention_k_eq_v": any(f"{layer}attn_v.weight" not in ne for layer in layers)}


def scores(n_layer_27b: int = 0) -> dict[str, Key]:
    """The keys for the scale of scores and the size of a head. Files have no key for the usual scale: by the size of a
    head; in the model with `n_layer_27b` layers by the size of embeddings over the number of heads."""

    def there(c: Config) -> float | None:
        scalar = c.number("query_pre_attn_scalar", default=256)
        usual = c.n_embd // c.n_head if c.n_layer == n_layer_27b else c.head
        return None if scalar == usual else scalar**-0.5

    def back(n: int, keys: Mapping[str, Any]) -> dict[str, object]:
        usual = keys["embedding_length"] // keys["attention.head_count"] if keys["block_count"] == n_layer_27b else n
        scale = keys.get("attention.scale")
        return {"head_dim": n, "query_pre_attn_scalar": usual if scale is None else round(1 / scale**2)}

    return {"attention.scale": Of(there), "attention.key_length": Of(lambda c: c.get("head_dim", default=None), back)}


FAMILIES = (
    Family(
        arch="gemma",
        types=("gemma",),
        cls="GemmaForCausalLM",
        act=_TANH,
        keys={"hidden_activation": Of(_tanh), "attention.causal": Of(_prefix)},
        moves=_NORMS,
    ),
    Family(
        arch="gemma2",
        types=("gemma2",),
        cls="Gemma2ForCausalLM",
        act=_TANH,
        keys={**_CAPS_2, **scores(46), "attention.causal": Of(_prefix)},
        moves=_NORMS,
        more=window,
        spelled=SANDWICH,
    ),
    Family(
        arch="gemma3",
        types=("gemma3_text", "gemma3"),
        cls="Gemma3ForCausalLM",
        act=_TANH,
        keys={**_CAPS, **scores(62)},
        moves=_NORMS,
        more=window,
        spelled=SANDWICH,
    ),
    Family(
        arch="gemma3n",
        types=("gemma3n_text", "gemma3n"),
        cls="Gemma3nForCausalLM",
        told=("laurel_rank", "vocab_size_per_layer_input", "altup_coef_clip"),
        act=_TANH,
        keys={
            **_BOTH,
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "activation_sparsity_scale": Of(_sparsity, _shares),
        },
        more=_window_3n,
        by_tensors=_told_3n,
        padded=(_TABLE,),
        spelled={
            **_PER_LAYER,
            "altup_proj": "model.altup_projections.{}",
            "altup_unembd_proj": "model.altup_unembed_projections.{}",
            "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale": "altup.correct_output_scale=",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
    ),
    Family(
        arch="gemma4",
        types=("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
        cls="Gemma4ForCausalLM",
        told=(
            *("vocab_size_per_layer_input", "attention_k_eq_v", "global_head_dim", "num_global_key_value_heads"),
            *("per_layer_config", "num_experts", "top_k_experts", "moe_intermediate_size"),
        ),
        act=_TANH,
        keys={
            **_BOTH,
            "embedding_length_per_layer_input": Of(_per_layer_size, lambda n, keys: {"hidden_size_per_layer_input": n}),
            "attention.key_length": Of(lambda c: _full(c, "head_dim"), _head_full_back),
            "attention.value_length": Of(lambda c: _full(c, "head_dim")),
            "attention.key_length_swa": "head_dim",
            "attention.value_length_swa": Of(lambda c: c.head),
            "attention.head_count_kv": Of(_heads_kv, _heads_kv_back),
            "feed_forward_length": Of(_n_ff, _n_ff_back),
            "rope.dimension_count": Of(lambda c: _full(c, "head_dim")),
            "rope.dimension_count_swa": Of(lambda c: c.head),
            "expert_count": _experts("num_experts"),
            "expert_used_count": _experts("top_k_experts"),
            "expert_feed_forward_length": _experts("moe_intermediate_size", "expert_intermediate_size"),
        },
        more=_window_4,
        made=_frequencies,
        by_tensors=_told_4,
        padded=(_TABLE,),
        untrained=("layer_output_scale",),
        names=_EXPERT_SCALES,
        spelled={
            **_PER_LAYER,
            "layer_output_scale": "layer_scalar=",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale=",
            "ffn_down_exps.scale": "router.per_expert_scale=",
            "ffn_gate_up_exps": "experts.gate_up_proj=",
            "ffn_down_exps": "experts.down_proj=",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
    ),
)
