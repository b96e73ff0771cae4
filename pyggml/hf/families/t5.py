"""T5 and its relatives: encoder-decoders, and encoders alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pyggml.models.metadata import ACTIVATIONS

from ..config import Config
from ..family import Family, Key, Of

_N_CTX = 512  # for configs that name no length. Positions are relative, so texts of any length can be encoded
_MAX_DISTANCE = 128  # llama.cpp knows only this one, and all T5 models have it
_NETWORKS = ("relu", "gated-gelu", "gated-gelu_new")


def _checked(c: Config, n: int) -> int:
    network = c.get("feed_forward_proj", default="relu")
    if network not in _NETWORKS:
        c.fail(f"feed_forward_proj: the network {network!r} is not known; known are {', '.join(_NETWORKS)}")
    gated = network != "relu"
    for key, usual in (("dense_act_fn", "gelu_new" if gated else "relu"), ("is_gated_act", gated)):
        said = c.values.get(key, usual)
        if ACTIVATIONS.get(str(said), bool(said)) != ACTIVATIONS.get(str(usual), usual):
            c.fail(f"{key} is {said!r:.60}: of the network {network!r} only {usual!r} is supported")
    return n


def _max_distance(c: Config) -> int | None:
    n = c.integer("relative_attention_max_distance", default=_MAX_DISTANCE)
    return None if n == _MAX_DISTANCE else n


def _logit_scale(c: Config) -> float | None:
    """The factor of the output's input. The first T5 shares the output's weights with the embeddings and scales their
    input. transformers 5 calls every T5 tied, and has a key of its own for the scale."""
    tied = c.get("tie_word_embeddings", default=True)
    scaled = c.values.get("scale_decoder_outputs", tied)  # null: no scale
    return 1.0 / math.sqrt(c.n_embd) if scaled else None


def _buckets_back(n: int, keys: Mapping[str, Any]) -> dict[str, object]:
    return {"relative_attention_num_buckets": n, "scale_decoder_outputs": "logit_scale" in keys}


_ENCODER: dict[str, Key] = {
    "context_length": Of(lambda c: c.integer("n_positions", default=_N_CTX), lambda n, keys: {"n_positions": n}),
    "block_count": Of(lambda c: _checked(c, c.n_layer), lambda n, keys: {"num_layers": n}),
    "feed_forward_length": "d_ff",
    "embedding_length": "d_model",
    "attention.head_count": "num_heads",
    "attention.key_length": "d_kv",
    "attention.value_length": "d_kv",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "attention.relative_buckets_count": Of(
        lambda c: c.integer("relative_attention_num_buckets", default=32), _buckets_back
    ),
    "attention.relative_buckets_max_distance": Of(
        _max_distance, lambda n, keys: {"relative_attention_max_distance": n}
    ),
    "rope.dimension_count": None,
}
_BOTH: dict[str, Key] = {
    **_ENCODER,
    "decoder_block_count": "num_decoder_layers",
    "decoder_start_token_id": Of(
        lambda c: c.integer("decoder_start_token_id", "pad_token_id", default=0),
        lambda n, keys: {"decoder_start_token_id": n},
    ),
    "logit_scale": Of(_logit_scale),
}


def _spelled(gated: bool) -> dict[str, str]:
    """Names of encoder and decoder. The network is the last part of a layer."""
    found = {"token_embd": "shared"}
    for side, whole, last in (("enc", "encoder", 1), ("dec", "decoder", 2)):
        found |= {
            f"{side}.output_norm": f"{whole}.final_layer_norm",
            f"{side}.attn_norm": "layer.0.layer_norm",
            **{f"{side}.attn_{x}": f"layer.0.SelfAttention.{x}" for x in "qkvo"},
            f"{side}.attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
            f"{side}.ffn_norm": f"layer.{last}.layer_norm",
            f"{side}.ffn_up": f"layer.{last}.DenseReluDense.{'wi_1' if gated else 'wi'}",
            f"{side}.ffn_down": f"layer.{last}.DenseReluDense.wo",
        }
        if gated:
            found[f"{side}.ffn_gate"] = f"layer.{last}.DenseReluDense.wi_0"
    return found | {
        "dec.cross_attn_norm": "layer.1.layer_norm",
        **{f"dec.cross_attn_{x}": f"layer.1.EncDecAttention.{x}" for x in "qkvo"},
    }


def _families(types: tuple[str, ...], name: str, skip: tuple[str, ...]) -> tuple[Family, ...]:
    """A family with a network of relu and one with a gate, which has further tensors to spell."""
    return tuple(
        Family(
            arch=arch,
            types=types,
            cls=cls,
            act="",
            keys=keys,
            skip=(*skip, *more),
            constants={"feed_forward_proj": "gated-gelu" if gated else "relu", "is_encoder_decoder": arch == "t5"},
            spelled=_spelled(gated),
            sides={"enc.": "encoder.block", "dec.": "decoder.block"},
        )
        for arch, cls, keys, more in (
            ("t5", f"{name}ForConditionalGeneration", _BOTH, (r"EncDecAttention\.relative_attention_bias",)),
            ("t5encoder", f"{name}EncoderModel", _ENCODER, (r"^decoder\.", r"^lm_head\.")),
        )
        for gated in (False, True)
    )


# T5 has one bias of distances, in its first layer; UMT5 has one in each layer.
FAMILIES = (
    *_families(("t5", "mt5"), "T5", (r"block\.[1-9]\d*\..*relative_attention_bias",)),
    *_families(("umt5",), "UMT5", ()),
)
