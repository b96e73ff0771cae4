"""Turn config.json into the keys of a GGUF: the keys that llama.cpp's converter writes, by gguf's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from pyggml.models.metadata import ACTIVATIONS

from .config import Config
from .family import Array, Family, Key, Of, float32

_GATING = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}  # values of `expert_gating_func`

_ACTIVATION = ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act")
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # all are written: classes know one each


def _n_nextn(keys: Mapping[str, Any]) -> int:
    return int(keys.get("nextn_predict_layers", 0))


def of_model(values: Sequence[Any], keys: Mapping[str, Any]) -> list[Any]:
    """The values of the model's own layers as a list for a config, from values of all blocks of a file or of the
    layers."""
    return list(values[: keys["block_count"] - _n_nextn(keys)])


def _groups_used(c: Config) -> int | None:
    n = c.get("topk_group", default=None)
    if n == 0 and c.get("n_group", default=None):
        c.fail("topk_group is 0: there must be groups of experts to choose of")
    return n


def _n_rot(c: Config) -> int:
    n = int(c.head * float(c.rope.get("partial_rotary_factor", 1.0)))
    if n % 2:
        c.fail(f"head_dim = {c.head}: pairs of elements turn, not {n} elements (partial_rotary_factor)")
    return n


COMMON: dict[str, Key] = {
    "vocab_size": "vocab_size",
    "context_length": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"),
    "embedding_length": Of(lambda c: c.n_embd, lambda n, keys: {"hidden_size": n, "n_embd": n}),
    "block_count": Of(lambda c: c.n_layer + c.n_nextn, lambda n, keys: {"num_hidden_layers": n - _n_nextn(keys)}),
    "nextn_predict_layers": Of(lambda c: c.n_nextn or None),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "attention.head_count_kv": ("num_key_value_heads", "n_kv_heads"),
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "expert_count": Of(lambda c: c.get(*_EXPERTS, default=None), lambda n, keys: dict.fromkeys(_EXPERTS, n)),
    "expert_used_count": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    "expert_group_count": "n_group",
    "expert_group_used_count": Of(_groups_used, lambda n, keys: {"topk_group": n}),
    "expert_feed_forward_length": "moe_intermediate_size",
    # A key that only pyggml writes (`activation`). Files without it have the activation `Family.act`, as in llama.cpp.
    "hidden_activation": Of(lambda c: None, lambda name, keys: said_activation(name)),
    "rope.dimension_count": Of(_n_rot),
}


def activation(family: Family, c: Config) -> str | None:
    """The activation of the networks; None when it is the one that files without the key have."""
    if not family.act:
        return None
    keys = [n for n in _ACTIVATION if c.knows(n)]
    name = c.get(*keys, default=family.act) if keys else family.act
    if name not in ACTIVATIONS:
        c.fail(f"the activation {name!r:.60} is not known; known are {', '.join(ACTIVATIONS)}")
    return None if ACTIVATIONS[name] == ACTIVATIONS[family.act] else name


def said_activation(name: str) -> dict[str, object]:
    """The activation under the names that configs have for it; classes differ."""
    return dict.fromkeys(_ACTIVATION, name)


def gating(c: Config) -> int | None:
    """The function that makes weights of a router's logits; None when the config names none."""
    name = c.get("score_function", "scoring_func", "score_func", "moe_router_activation_func", default=None)
    if name is not None and name not in _GATING:
        c.fail(f"the router's {name!r} is not known; known are {', '.join(_GATING)}")
    return None if name is None else _GATING[name]


def layers_of(c: Config, kind: str) -> list[bool]:
    """For each layer, whether its entry of `layer_types` is `kind`."""
    types = c.get("layer_types")
    if not isinstance(types, list) or len(types) != c.n_layer:  # pyright: ignore[reportUnknownArgumentType]
        c.fail(f"layer_types must have one of {c.n_layer} layers each")
    return [t == kind for t in types]  # pyright: ignore[reportUnknownVariableType]


def dense_lead(c: Config) -> int | None:
    """How many dense layers come before the first mixture of experts. The config lists the kinds of layers, or gives a
    number."""
    n, kinds = c.get("first_k_dense_replace", default=None), c.get("mlp_layer_types", default=None)
    if kinds is None:
        return n
    n = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if kinds != ["dense"] * n + ["sparse"] * (c.n_layer - n):
        c.fail("mlp_layer_types must be dense for the first layers and sparse for all others")
    return n


def dense_back(n: int, keys: Mapping[str, Any]) -> dict[str, object]:
    """The entries that `dense_lead` reads."""
    kinds = ["dense" if il < n else "sparse" for il in range(keys["block_count"] - _n_nextn(keys))]
    return {"first_k_dense_replace": n, "mlp_layer_types": kinds}


def window_of(c: Config, windowed: list[bool], *, said: bool = True) -> dict[str, object]:
    """Two keys for a sliding window in an architecture that has none in llama.cpp; empty without a window. llama.cpp's
    files may have the first key, never the second, which only pyggml writes and reads (`read_own_window`)."""
    n = c.integer("sliding_window", default=0)
    if not n or not said or not any(windowed):
        return {}
    return {"attention.sliding_window": n, "attention.sliding_window_pattern": windowed}


def all_windowed(c: Config) -> dict[str, object]:
    """The keys of `window_of` when all layers have the window."""
    return window_of(c, [True] * c.n_layer)


def qwen_window(c: Config) -> dict[str, object]:
    """The keys of `window_of` when `layer_types` tells the layers with the window, or all from `max_window_layers` on
    have it."""
    first = c.integer("max_window_layers") if c.knows("max_window_layers") else 0
    windowed = [il >= first for il in range(c.n_layer)]
    if c.get("layer_types", default=None):
        windowed = layers_of(c, "sliding_attention")
    said = c.get("use_sliding_window", default=not c.knows("use_sliding_window")) is True
    if c.get("layer_types", default=None) and any(windowed) and not (said and c.get("sliding_window", default=0)):
        c.fail(
            "layer_types: some layers are to have a sliding window, but sliding_window or use_sliding_window is unset"
        )
    return window_of(c, windowed, said=said)


def window(c: Config, kind: str = "sliding_attention") -> dict[str, object]:
    """The keys of the sliding window and of the layers that have it; empty without a window."""
    patterns = [name for name in _PATTERNS if name[0] == "_" or c.knows(name)]
    n, every = c.integer("sliding_window", default=0), c.get(*patterns, default=None)
    if c.get("layer_types", default=None):
        pattern = layers_of(c, kind)
    elif isinstance(every, str):  # EXAONE's: L stands for a local layer, G for a global one
        pattern = [every[il % len(every)] == "L" and il < c.n_layer - 1 for il in range(c.n_layer)]
    elif every is not None:
        pattern = [(il + 1) % c.integer(*patterns) != 0 for il in range(c.n_layer)]
    else:
        return {"attention.sliding_window": n} if n else {}
    return {"attention.sliding_window": n, "attention.sliding_window_pattern": pattern} if n else {}


def read_metadata(family: Family, c: Config) -> dict[str, Any]:
    """The keys of the architecture, `llama.block_count` ...; floats are rounded to F32."""
    found = {
        **_said(c, {key: spec for key, spec in COMMON.items() if key not in family.keys}),
        **_rope(family, c),
        "hidden_activation": activation(family, c),
        **_said(c, {"expert_gating_func": Of(gating), **family.keys}),
        **family.more(c),
    }
    return {f"{family.arch}.{key}": _stored(c, key, value) for key, value in found.items() if value is not None}


def _said(c: Config, keys: Mapping[str, Key]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, spec in keys.items():
        if isinstance(spec, Of):
            found[key] = spec.there(c)
        elif isinstance(spec, str | tuple):
            found[key] = c.get(*((spec,) if isinstance(spec, str) else spec), default=None)
        else:
            found[key] = spec
    return found


def _stored(c: Config, key: str, value: Any) -> Any:
    """A value as it is read back from a file."""
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float32(value)
    if isinstance(value, list | tuple) and value:
        array = np.asarray(cast("Sequence[Any]", value))
        if array.ndim == 1 and array.dtype.kind in "biuf":
            if len(set(array.tolist())) == 1 and array.dtype.kind == "i" and key == "feed_forward_length":
                return int(array[0])
            return array.astype({"b": np.bool_, "f": np.float32}.get(array.dtype.kind, np.int32))
    return c.fail(f"{value!r:.60} cannot be {key}")


def _rope(family: Family, c: Config) -> dict[str, object]:
    """Base and scaling of the rope."""
    rope = c.rope
    kind = str(rope["rope_type"]).lower()
    keys: dict[str, object] = {"rope.freq_base": rope.get("rope_theta")}
    if c.rope_swa.get("rope_type", "default") != "default":
        c.fail(f"{c.last}: the rope type {c.rope_swa['rope_type']!r} is not supported in layers with a sliding window")
    if c.rope_swa.get("rope_theta") is not None:
        keys["rope.freq_base_swa"] = c.rope_swa["rope_theta"]
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": rope.get("factor")}
    own_original = c.get("original_max_position_embeddings", default=None)  # takes precedence over the rope's
    if kind == "yarn":
        if not rope.get("truncate", True):
            keys["rope.scaling.yarn_truncate"] = False  # only pyggml reads this key; llama.cpp always truncates
        original = own_original or rope.get("original_max_position_embeddings") or c.get("max_position_embeddings")
        keys["rope.scaling.original_context_length"] = original
        for name, key in (
            ("extrapolation_factor", "yarn_ext_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            keys[f"rope.scaling.{key}"] = rope.get(name)
        attention = rope.get("attention_factor", rope.get("attn_factor"))
        mscale, of_all = float(rope.get("mscale") or 0.0), float(rope.get("mscale_all_dim") or 0.0)
        if attention is None and mscale and of_all and "rope.scaling.yarn_log_multiplier" not in family.keys:
            log_factor = 0.1 * math.log(rope["factor"])
            attention = (1.0 + mscale * log_factor) / (1.0 + of_all * log_factor)
        if attention is not None:  # a checkpoint has the whole factor, a GGUF what multiplies 1 + 0.1 log(factor)
            attention /= 1.0 + 0.1 * math.log(rope["factor"])
        keys["rope.scaling.yarn_attn_factor"] = attention
    elif kind in ("longrope", "su"):
        original = own_original or rope.get("original_max_position_embeddings") or c.get("max_position_embeddings")
        keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": original}
        factor = rope.get("factor") or c.get("max_position_embeddings") / original
        if rope.get("short_mscale") != rope.get("long_mscale"):
            c.fail("short_mscale and long_mscale of the rope differ: files have one for both")
        attention = (
            rope.get("short_mscale")  # Phi-3.5-MoE has it
            or rope.get("attention_factor")
            or (math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0)
        )
        keys["rope.scaling.attn_factor"] = attention
    elif kind not in ("default", "llama3", "linear", "proportional", "dynamic"):
        c.fail(f"the rope type {kind!r} is not known")
    return keys


def rope_tensors(c: Config) -> dict[str, Array]:
    """The tensors that follow from the rope's scaling: Llama 3's frequency factors, or the long and short factors."""
    rope = c.rope
    kind = str(rope["rope_type"]).lower()
    if kind in ("longrope", "su"):
        return {
            f"rope_factors_{name}.weight": np.asarray(rope[f"{name}_factor"], np.float32) for name in ("long", "short")
        }
    if kind != "llama3":
        return {}
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    n_rot = int(c.head * float(rope.get("partial_rotary_factor", 1.0)))
    if n_rot > c.head:
        c.fail(f"partial_rotary_factor = {rope['partial_rotary_factor']}: at most all of a head turns")
    wavelength = 2 * math.pi * float(rope["rope_theta"]) ** (np.arange(0, n_rot, 2) / n_rot)
    smooth = (original / wavelength - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, between))
    return {"rope_freqs.weight": factors.astype(np.float32)}
