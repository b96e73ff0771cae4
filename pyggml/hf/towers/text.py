"""The families of folders with a tower that reads: the text encoders of CLIP and SigLIP."""

from __future__ import annotations

from .family import TowerConfig, TowerFamily, name
from .vision import CLIP_LAYER, flat, named


def _keys(c: TowerConfig, act: str, eps: float) -> dict[str, object]:
    t = c.tower
    return {
        "embedding_length": t.integer("hidden_size", default=512),
        "feed_forward_length": t.integer("intermediate_size", default=2048),
        "block_count": t.integer("num_hidden_layers", default=12),
        "attention.head_count": t.integer("num_attention_heads", default=8),
        "attention.layer_norm_epsilon": t.number("layer_norm_eps", default=eps),
        "hidden_activation": t.get("hidden_act", default=act),
        "context_length": t.integer("max_position_embeddings", default=77),
        "vocab_size": t.integer("vocab_size", default=49408),
    }


def _clip_keys(c: TowerConfig) -> dict[str, object]:
    n_out, eos = c.whole.integer("projection_dim", default=512), c.tower.integer("eos_token_id", default=49407)
    return {
        **_keys(c, "quick_gelu", 1e-5),
        "projector_type": "clip_text",
        "projection_dim": n_out,
        "eos_token_id": eos,
    }


def _siglip_keys(c: TowerConfig) -> dict[str, object]:
    keys = _keys(c, "gelu_pytorch_tanh", 1e-6)
    n_out = c.tower.get("projection_size", default=None) or keys["embedding_length"]
    return {**keys, "projector_type": "siglip_text", "projection_dim": n_out}


_TEXT = r"text_model\."
_NAMES = [
    name(rf"{_TEXT}embeddings\.token_embedding\.weight", "t.token_embd.weight"),
    name(rf"{_TEXT}embeddings\.position_embedding\.weight", "t.position_embd.weight"),
    name(rf"{_TEXT}embeddings\.position_ids"),
    name(r"text_projection\.weight", "t.projection.weight"),
    name(r"logit_(scale|bias)", r"t.logit_\1", split=flat),
    *named(_TEXT, r"encoder\.layers", {"final_layer_norm": "t.post_ln", "head": "t.projection"}, CLIP_LAYER, "t.blk"),
]
_BEGIN = ("text_model.", "text_projection.", "logit_scale", "logit_bias")

FAMILIES = tuple(
    TowerFamily(
        types=(kind,), keys=keys, names=lambda c: _NAMES, begin=_BEGIN, part="text_config", side="text", alone=True
    )
    for kind, keys in (("clip", _clip_keys), ("siglip", _siglip_keys))
)
