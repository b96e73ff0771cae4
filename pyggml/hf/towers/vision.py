"""The families of folders with a tower that sees."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .family import Array, Name, TowerConfig, TowerFamily, name


def thirds(a: Array) -> list[Array]:
    """Rows of Q, K and V, from one matrix (or vector) that has them in this order."""
    return np.split(a, 3)


def flat(a: Array) -> list[Array]:
    """All elements in one row."""
    return [a.reshape(-1)]


_LAYER = {"layer_norm1": "ln1", "layer_norm2": "ln2", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
_LAYER |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {"self_attn.out_proj": "attn_out"}


def _clip_names(t: str) -> list[Name]:
    """The names of CLIP's and SigLIP's encoders, whose tensors' names begin with `t`."""
    return [
        name(rf"{t}embeddings\.class_embedding", "v.class_embd"),
        name(rf"{t}embeddings\.patch_embedding\.(weight|bias)", r"v.patch_embd.\1"),
        name(rf"{t}embeddings\.position_embedding\.weight", "v.position_embd.weight"),
        name(rf"{t}embeddings\.position_ids"),
        name(rf"{t}pre_layrnorm\.(weight|bias)", r"v.pre_ln.\1"),
        name(rf"{t}post_layernorm\.(weight|bias)", r"v.post_ln.\1"),
        *(
            name(rf"{t}encoder\.layers\.(\d+)\.{old}\.(weight|bias)".replace(".f", r"\.f"), rf"v.blk.\1.{new}.\2")
            for old, new in _LAYER.items()
        ),
        name(rf"{t}head\.probe", "v.head.probe", split=flat),
        name(rf"{t}head\.attention\.in_proj_(weight|bias)", *(rf"v.head.attn_{x}.\1" for x in "qkv"), split=thirds),
        name(rf"{t}head\.attention\.out_proj\.(weight|bias)", r"v.head.attn_out.\1"),
        name(rf"{t}head\.layernorm\.(weight|bias)", r"v.head.ln.\1"),
        name(rf"{t}head\.mlp\.fc1\.(weight|bias)", r"v.head.ffn_up.\1"),
        name(rf"{t}head\.mlp\.fc2\.(weight|bias)", r"v.head.ffn_down.\1"),
    ]


def _sizes(c: TowerConfig, act: str, eps: float) -> dict[str, object]:
    """The keys of most encoders. `act`, `eps`: those of a config that does not say."""
    v = c.tower
    return {
        "embedding_length": v.integer("hidden_size"),
        "feed_forward_length": v.integer("intermediate_size"),
        "block_count": v.integer("num_hidden_layers"),
        "attention.head_count": v.integer("num_attention_heads"),
        "attention.layer_norm_epsilon": v.number("layer_norm_eps", default=eps),
        "hidden_activation": v.get("hidden_act", default=act),
        "image_size": _side(v.get("image_size")),
        "patch_size": _side(v.get("patch_size")),
    }


def _side(value: object) -> object:
    """The side of a square, from a number or a pair."""
    return value[0] if isinstance(value, list) and len(value) == 2 and value[0] == value[1] else value  # pyright: ignore[reportUnknownVariableType]


def _clip_keys(c: TowerConfig) -> Mapping[str, object]:
    return {
        "projector_type": "clip",
        **_sizes(c, "quick_gelu", 1e-5),
        "projection_dim": c.whole.integer("projection_dim", default=512),
    }


def _siglip_keys(c: TowerConfig) -> Mapping[str, object]:
    return {
        "projector_type": "siglip",
        **_sizes(c, "gelu_pytorch_tanh", 1e-6),
        "projection_dim": c.tower.integer("hidden_size"),
    }


_MODEL = r"vision_model\."

FAMILIES = (
    TowerFamily(
        types=("clip",),
        keys=_clip_keys,
        names=[*_clip_names(_MODEL), name(r"visual_projection\.weight", "v.projection.weight")],
        begin=("vision_model.", "visual_projection."),
    ),
    TowerFamily(types=("siglip",), keys=_siglip_keys, names=_clip_names(_MODEL), begin=("vision_model.",)),
)
