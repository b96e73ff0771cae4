"""The families of folders with a tower that sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any, cast

import numpy as np

from .family import Array, Name, TowerConfig, TowerFamily, name

_ENDS = r"\.(weight|bias)"


def thirds(a: Array) -> list[Array]:
    """Rows of Q, K and V, from one matrix (or vector) that has them in this order."""
    return np.split(a, 3)


def flat(a: Array) -> list[Array]:
    """All elements in one row."""
    return [a.reshape(-1)]


def _rows(a: Array) -> list[Array]:
    """The rows of a matrix with dimensions of one element before it."""
    return [a.reshape(a.shape[-2:])]


def _frames(a: Array) -> list[Array]:
    """A kernel over two frames as one for each."""
    return [np.ascontiguousarray(a[:, :, i]) for i in range(a.shape[2])]


def _plus_one(a: Array) -> list[Array]:
    return [a + np.float32(1)]


def named(
    begin: str, layer: str, names: Mapping[str, str], of_layer: Mapping[str, str], blocks: str = "v.blk"
) -> list[Name]:
    """Rules for tensors that have a weight and perhaps a bias. `begin` and `layer`: how the names begin, as regular
    expressions; `names`, `of_layer`: the rest of the name in the checkpoint -> the role; `blocks`: how the names of
    layers begin in the file."""
    found = [name(begin + old.replace(".", r"\.") + _ENDS, rf"{new}.\1") for old, new in names.items()]
    for old, new in of_layer.items():
        found.append(name(rf"{begin}{layer}\.(\d+)\." + old.replace(".", r"\.") + _ENDS, rf"{blocks}.\1.{new}.\2"))
    return found


# -- CLIP and SigLIP, alone and in others -----------------------------------------------------------------------------

CLIP_LAYER = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "self_attn.out_proj": "attn_out",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
}


def _clip_names(t: str, *, post_norm: bool = True, head: bool = False) -> list[Name]:
    """The names of CLIP's and SigLIP's encoders, whose tensors' names begin with `t`. `post_norm`, `head`: the norm
    after the layers, and SigLIP's pooler, are read."""
    skipped = [] if post_norm else [name(rf"{t}post_layernorm\..*")]
    skipped += [] if head else [name(rf"{t}head\..*")]
    return [
        *skipped,
        name(rf"{t}embeddings\.class_embedding", "v.class_embd", split=flat),
        name(rf"{t}embeddings\.position_embedding\.weight", "v.position_embd.weight"),
        name(rf"{t}embeddings\.position_ids"),
        *named(
            t,
            r"encoder\.layers",
            {
                "embeddings.patch_embedding": "v.patch_embd",
                "pre_layrnorm": "v.pre_ln",
                "post_layernorm": "v.post_ln",
                "head.layernorm": "v.head.ln",
                "head.attention.out_proj": "v.head.attn_out",
                "head.mlp.fc1": "v.head.ffn_up",
                "head.mlp.fc2": "v.head.ffn_down",
            },
            CLIP_LAYER,
        ),
        name(rf"{t}head\.probe", "v.head.probe", split=flat),
        name(rf"{t}head\.attention\.in_proj_(weight|bias)", *(rf"v.head.attn_{x}.\1" for x in "qkv"), split=thirds),
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
        "image_size": _side(v.get("image_size", default=224)),
        "patch_size": _side(v.get("patch_size", default=16)),
    }


def _labels(c: TowerConfig) -> dict[str, object]:
    """The names of the classes of a checkpoint that classifies."""
    said: Any = c.whole.get("id2label", default=None)
    if said is None:
        return {}
    return {"classifier.output_labels": [str(said[k]) for k in sorted(said, key=int)]}


def _side(value: Any) -> object:
    """The side of a square, from a number or a pair."""
    sides = cast("list[object]", value) if isinstance(value, list) else [value]
    if len(set(sides)) != 1:
        raise ValueError(f"{value} is no square")
    return sides[0]


def _clip_keys(c: TowerConfig) -> dict[str, object]:
    sizes = _sizes(c, "quick_gelu", 1e-5)
    n_out = c.whole.integer("projection_dim", default=512)
    return {"projector_type": "clip", **sizes, "projection_dim": n_out, **_labels(c)}


def _siglip_keys(c: TowerConfig) -> dict[str, object]:
    sizes = _sizes(c, "gelu_pytorch_tanh", 1e-6)
    return {"projector_type": "siglip", **sizes, "projection_dim": sizes["embedding_length"]}


_VISION_MODEL = r"(?:vision_model\.)?"

_CLASSIFIER = name(r"classifier\.(weight|bias)", r"v.classifier.\1")

# -- DINOv2 and ViT ---------------------------------------------------------------------------------------------------

_VIT = r"(?:vit\.|dinov2\.)?"
_VIT_NAMES = [
    _CLASSIFIER,
    name(rf"{_VIT}embeddings\.cls_token", "v.class_embd", split=flat),
    name(rf"{_VIT}embeddings\.mask_token"),
    name(rf"{_VIT}embeddings\.position_embeddings", "v.position_embd.weight", split=_rows),
    name(rf"{_VIT}encoder\.layer\.(\d+)\.layer_scale([12])\.lambda1", r"v.blk.\1.ls\2.weight"),
    name(
        rf"{_VIT}encoder\.layer\.(\d+)\.mlp\.weights_in{_ENDS}",
        *(r"v.blk.\1.ffn_gate.\2", r"v.blk.\1.ffn_up.\2"),
        split=lambda a: np.split(a, 2),
    ),
    *named(
        _VIT,
        r"encoder\.layer",
        {
            "embeddings.patch_embeddings.projection": "v.patch_embd",
            "layernorm": "v.post_ln",
            "pooler.dense": "v.head.pooler",
        },
        {
            **{f"attention.attention.{old}": f"attn_{old[0]}" for old in ("query", "key", "value")},
            "attention.output.dense": "attn_out",
            "norm1": "ln1",
            "norm2": "ln2",
            "layernorm_before": "ln1",
            "layernorm_after": "ln2",
            "intermediate.dense": "ffn_up",
            "output.dense": "ffn_down",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
            "mlp.weights_out": "ffn_down",
            **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
        },
    ),
]


def _dinov2_keys(c: TowerConfig) -> dict[str, object]:
    n_embd = c.tower.integer("hidden_size", default=768)
    n_ff = int(n_embd * c.tower.number("mlp_ratio", default=4))
    gated = c.tower.get("use_swiglu_ffn", default=False)
    if gated:
        n_ff = (int(n_ff * 2 / 3) + 7) // 8 * 8
    c.tower.values.setdefault("intermediate_size", n_ff)
    sizes = _sizes(c, "gelu", 1e-6)
    sizes |= {"feed_forward_length": n_ff, **({"hidden_activation": "silu"} if gated else {})}
    return {"projector_type": "dinov2", **sizes, "projection_dim": n_embd, **_labels(c)}


def _vit_keys(c: TowerConfig) -> dict[str, object]:
    sizes = _sizes(c, "gelu", 1e-12)
    n_out = c.tower.get("pooler_output_size", default=None) or sizes["embedding_length"]
    act = c.tower.get("pooler_act", default="tanh")
    return {
        "projector_type": "vit",
        **sizes,
        "projection_dim": n_out,
        **_labels(c),
        "projector.hidden_activation": act,
    }


# -- LLaVA ------------------------------------------------------------------------------------------------------------

_TOWER = r"vision_tower\.(?:vision_model\.)?"
_PROJECTOR = ("vision_tower.", "multi_modal_projector.")


def _text_size(c: TowerConfig) -> int:
    return c.text.integer("hidden_size", default=4096)


def _features(c: TowerConfig, default: int) -> dict[str, object]:
    """Which layers' states are the features. The tower ends with the last of them, before the norm."""
    said: Any = c.whole.get("vision_feature_layer", default=default)
    n_layer = c.tower.integer("num_hidden_layers")
    layers = [n if n >= 0 else n_layer + 1 + n for n in (cast("list[int]", said) if isinstance(said, list) else [said])]
    if not layers or not all(type(n) is int and 0 <= n <= n_layer for n in layers):
        c.whole.damaged()
    several = isinstance(said, list)
    return {"block_count": max(layers), **({"feature_layer": np.array(layers, np.int32)} if several else {})}


def _drops_first(c: TowerConfig, default: str = "default") -> bool:
    return c.whole.get("vision_feature_select_strategy", default=default) == "default"


def _llava_keys(c: TowerConfig) -> dict[str, object]:
    siglip = c.tower.get("model_type", default="") == "siglip_vision_model"
    keys = {
        "projector_type": "mlp",
        **(_sizes(c, "gelu_pytorch_tanh", 1e-6) if siglip else _sizes(c, "quick_gelu", 1e-5)),
        **_features(c, -2),
        "feature_drops_first": _drops_first(c),
        "projector.hidden_activation": c.whole.get("projector_hidden_act", default="gelu"),
        "projection_dim": _text_size(c),
    }
    pinpoints: Any = c.whole.get("image_grid_pinpoints", default=None)
    if pinpoints is not None and c.whole.model_type in ("llava_next", "llava_onevision"):
        keys["mm_patch_merge_type"] = "spatial_unpad"
        keys["image_grid_pinpoints"] = np.array(pinpoints, np.int32).reshape(-1)
    return keys


def _onevision_keys(c: TowerConfig) -> dict[str, object]:
    most = c.whole.get("vision_aspect_ratio", default="anyres_max_9")
    keys = {**_llava_keys(c), **_features(c, -1), "feature_drops_first": _drops_first(c, "full")}
    return {**keys, "anyres_max": int(str(most).removeprefix("anyres_max_"))}


def _llava_names(c: TowerConfig) -> Sequence[Name]:
    return [
        *_clip_names(_TOWER, post_norm=False),
        name("image_newline", "v.image_newline"),
        *named(r"multi_modal_projector\.", "", {"linear_1": "mm.0", "linear_2": "mm.2"}, {}),
    ]


# -- projectors of SigLIP ---------------------------------------------------------------------------------------------


def _paligemma_keys(c: TowerConfig) -> dict[str, object]:
    n_out = c.tower.get("projection_dim", default=None) or c.whole.get("projection_dim", default=2048)
    return {**_siglip_keys(c), "projector_type": "paligemma", "projection_dim": n_out}


def _paligemma_names(c: TowerConfig) -> Sequence[Name]:
    return [*_clip_names(_TOWER), *named(r"multi_modal_projector\.", "", {"linear": "mm.model.fc"}, {})]


def _gemma3_keys(c: TowerConfig) -> dict[str, object]:
    keys = {
        **_siglip_keys(c),
        "projector_type": "gemma3",
        "projection_dim": c.text.integer("hidden_size", default=2304),
    }
    side = cast("int", keys["image_size"]) // cast("int", keys["patch_size"])
    return {**keys, "projector.scale_factor": side // isqrt(c.whole.integer("mm_tokens_per_image", default=256))}


def _gemma3_names(c: TowerConfig) -> Sequence[Name]:
    return [
        *_clip_names(_TOWER),
        name(r"multi_modal_projector\.mm_input_projection_weight", "mm.input_projection.weight"),
        name(
            r"multi_modal_projector\.mm_soft_emb_norm\.weight", "mm.soft_emb_norm.weight", split=_plus_one, value=True
        ),
    ]


def _idefics3_keys(c: TowerConfig) -> dict[str, object]:
    return {
        **_siglip_keys(c),
        "projector_type": "idefics3",
        "projector.scale_factor": c.whole.integer("scale_factor", default=2),
        "projection_dim": _text_size(c),
    }


def _idefics3_names(c: TowerConfig) -> Sequence[Name]:
    return [
        *_clip_names(r"vision_model\."),
        name(r"connector\.modality_projection\.proj\.weight", "mm.model.fc.weight"),
    ]


_MLP_NORM = {"linear_1": "mm.model.mlp.1", "linear_2": "mm.model.mlp.3"}


def _aya_keys(c: TowerConfig) -> dict[str, object]:
    if _drops_first(c, "full"):
        c.whole.damaged()
    return {
        **_siglip_keys(c),
        **_features(c, -1),
        "projector_type": "aya_vision",
        "projector.scale_factor": c.whole.integer("downsample_factor", default=2),
        "projector.layer_norm_epsilon": c.whole.number("adapter_layer_norm_eps", default=1e-6),
        "projection_dim": _text_size(c),
    }


def _aya_names(c: TowerConfig) -> Sequence[Name]:
    projector = named(r"multi_modal_projector\.", "", {"layernorm": "mm.model.mlp.0", **_MLP_NORM}, {})
    return [*_clip_names(_TOWER, post_norm=False), *projector]


# -- InternVL ---------------------------------------------------------------------------------------------------------


def _internvl_keys(c: TowerConfig) -> dict[str, object]:
    said = c.whole.get("vision_feature_layer", default=-1)
    if not _drops_first(c):
        c.whole.damaged()
    return {
        **_sizes(c, "gelu", 1e-6),
        **({} if said == -1 else _features(c, -1)),
        "projector_type": "internvl",
        "projector.scale_factor": round(1 / c.whole.number("downsample_ratio", default=0.5)),
        "projector.hidden_activation": c.whole.get("projector_hidden_act", default="gelu"),
        "projection_dim": _text_size(c),
    }


def _internvl_names(c: TowerConfig) -> Sequence[Name]:
    after = [] if c.whole.get("vision_feature_layer", default=-1) == -1 else [name(rf"{_TOWER}layernorm\..*")]
    return [
        *after,
        name(rf"{_TOWER}embeddings\.cls_token", "v.class_embd", split=flat),
        name(rf"{_TOWER}embeddings\.mask_token"),
        name(rf"{_TOWER}embeddings\.position_embeddings", "v.position_embd.weight", split=_rows),
        name(rf"{_TOWER}encoder\.layer\.(\d+)\.lambda_([12])", r"v.blk.\1.ls\2.weight"),
        *named(
            _TOWER,
            r"encoder\.layer",
            {"embeddings.patch_embeddings.projection": "v.patch_embd", "layernorm": "v.post_ln"},
            {
                **{f"attention.{x}_proj": f"attn_{x}" for x in "qkv"},
                **{f"attention.{x}_norm": f"attn_{x}_norm" for x in "qk"},
                "attention.projection_layer": "attn_out",
                "mlp.fc1": "ffn_up",
                "mlp.fc2": "ffn_down",
                "layernorm_before": "ln1",
                "layernorm_after": "ln2",
            },
        ),
        *named(r"multi_modal_projector\.", "", {"layer_norm": "mm.model.mlp.0", **_MLP_NORM}, {}),
    ]


# -- Pixtral ----------------------------------------------------------------------------------------------------------


def _pixtral_keys(c: TowerConfig) -> dict[str, object]:
    sizes = _sizes(c, "gelu", 1e-5)
    sizes["attention.layer_norm_epsilon"] = 1e-5  # a constant of the class
    said = c.tower.get("head_dim", default=None)
    if said is not None and said * cast("int", sizes["attention.head_count"]) != sizes["embedding_length"]:
        c.tower.damaged()
    return {
        **sizes,
        **_features(c, -1),
        "projector_type": "pixtral",
        "rope.freq_base": _theta(c),
        "projector.hidden_activation": c.whole.get("projector_hidden_act", default="gelu"),
        "projection_dim": _text_size(c),
    }


def _theta(c: TowerConfig) -> float:
    """The base of the tower's rope."""
    rope: Any = c.tower.get("rope_parameters", default=None) or {}
    return float(rope.get("rope_theta") or c.tower.get("rope_theta", default=10000.0))


def _mistral3_keys(c: TowerConfig) -> dict[str, object]:
    return {
        **_pixtral_keys(c),
        "spatial_merge_size": c.whole.integer("spatial_merge_size", default=2),
        "projector.layer_norm_epsilon": c.text.number("rms_norm_eps", default=1e-5),
    }


def _pixtral_names(c: TowerConfig) -> Sequence[Name]:
    n_head = c.tower.integer("num_attention_heads")

    def neighbours(a: Array) -> list[Array]:
        """Rows of Q or K whose pairs of the rope are side by side; in the checkpoint they are half a head apart."""
        return [a.reshape(n_head, 2, -1, a.shape[-1]).swapaxes(1, 2).reshape(a.shape)]  # pyright: ignore[reportUnknownMemberType]

    layers = r"transformer\.layers"
    return [
        name(rf"{_TOWER}patch_conv\.weight", "v.patch_embd.weight"),
        *(
            name(
                rf"{_TOWER}{layers}\.(\d+)\.attention\.{x}_proj\.weight", rf"v.blk.\1.attn_{x}.weight", split=neighbours
            )
            for x in "qk"
        ),
        *named(
            _TOWER,
            layers,
            {"ln_pre": "v.pre_ln"},
            {
                "attention.v_proj": "attn_v",
                "attention.o_proj": "attn_out",
                "attention_norm": "ln1",
                "ffn_norm": "ln2",
                **{f"feed_forward.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
            },
        ),
        *named(
            r"multi_modal_projector\.",
            "",
            {
                "linear_1": "mm.1",
                "linear_2": "mm.2",
                "norm": "mm.input_norm",
                "patch_merger.merging_layer": "mm.patch_merger",
            },
            {},
        ),
    ]


# -- Qwen-VL and GLM-4V -----------------------------------------------------------------------------------------------


def _qwen_sizes(c: TowerConfig, act: str) -> dict[str, object]:
    v = c.tower
    if v.integer("temporal_patch_size", default=2) != 2 or v.integer("in_channels", "in_chans", default=3) != 3:
        v.damaged()
    return {
        "block_count": v.integer("depth"),
        "attention.head_count": v.integer("num_heads"),
        "attention.layer_norm_epsilon": 1e-6,
        "hidden_activation": v.get("hidden_act", default=act),
        "patch_size": v.integer("patch_size"),
        "spatial_merge_size": v.integer("spatial_merge_size", default=2),
        "rope.freq_base": _theta(c),
    }


def _qwen2_keys(c: TowerConfig) -> dict[str, object]:
    n_embd = c.tower.integer("embed_dim")
    return {
        "projector_type": "qwen2vl_merger",
        **_qwen_sizes(c, "quick_gelu"),
        "embedding_length": n_embd,
        "feed_forward_length": int(n_embd * c.tower.number("mlp_ratio", default=4)),
        "projection_dim": c.tower.integer("hidden_size"),
        "image_size": 560,
    }


def _qwen25_keys(c: TowerConfig) -> dict[str, object]:
    return {
        "projector_type": "qwen2.5vl_merger",
        **_qwen_sizes(c, "silu"),
        "embedding_length": c.tower.integer("hidden_size"),
        "feed_forward_length": c.tower.integer("intermediate_size"),
        "projection_dim": c.tower.integer("out_hidden_size"),
        "image_size": 560,
        "window_size": c.tower.integer("window_size", default=112),
        "full_attention_layers": np.array(c.tower.get("fullatt_block_indexes", default=[7, 15, 23, 31]), np.int32),
    }


def _square_of_positions(c: TowerConfig) -> int:
    """The side in pixels of the square that learned positions are of."""
    return isqrt(c.tower.integer("num_position_embeddings", default=2304)) * c.tower.integer("patch_size")


def _qwen3_keys(c: TowerConfig) -> dict[str, object]:
    n_layer = c.tower.integer("depth")
    deep = np.zeros(n_layer, np.bool_)
    deep[_deepstack(c)] = True
    return {
        "projector_type": "qwen3vl_merger",
        **_qwen_sizes(c, "gelu_pytorch_tanh"),
        "embedding_length": c.tower.integer("hidden_size"),
        "feed_forward_length": c.tower.integer("intermediate_size"),
        "projection_dim": c.tower.integer("out_hidden_size"),
        "image_size": _square_of_positions(c),
        "is_deepstack_layers": deep,
    }


def _deepstack(c: TowerConfig) -> list[int]:
    layers: Any = c.tower.get("deepstack_visual_indexes", default=[8, 16, 24])
    if layers != sorted(set(layers)):
        c.tower.damaged()
    return list(layers)


def _glm4v_keys(c: TowerConfig) -> dict[str, object]:
    return {
        "projector_type": "glm4v",
        **_qwen_sizes(c, "silu"),
        "attention.layer_norm_epsilon": c.tower.number("rms_norm_eps", default=1e-5),
        "embedding_length": c.tower.integer("hidden_size"),
        "feed_forward_length": c.tower.integer("intermediate_size"),
        "projection_dim": c.tower.integer("out_hidden_size"),
        "image_size": c.tower.integer("image_size", default=336),
    }


_QWEN_LAYER = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
_QWEN_NAMES = {
    "merger.ln_q": "v.post_ln",
    "merger.norm": "v.post_ln",
    "merger.mlp.0": "mm.0",
    "merger.mlp.2": "mm.2",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
    "post_conv_layernorm": "v.norm_embd",
    "post_layernorm": "v.post_ln",
    "downsample": "mm.patch_merger",
    "merger.proj": "mm.model.fc",
    "merger.post_projection_norm": "mm.post_norm",
    **{f"merger.{x}_proj": f"mm.{x}" for x in ("gate", "up", "down")},
}


def _qwen_names(c: TowerConfig) -> Sequence[Name]:
    deep = _deepstack(c) if c.whole.model_type.startswith("qwen3") else []
    parts = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
    more = {
        f"deepstack_merger_list.{i}.{x}": f"v.deepstack.{il}.{parts[x]}" for i, il in enumerate(deep) for x in parts
    }
    return [
        name(r"visual\.patch_embed\.proj\.weight", "v.patch_embd.weight", "v.patch_embd.weight.1", split=_frames),
        name(r"visual\.patch_embed\.proj\.bias", "v.patch_embd.bias"),
        name(r"visual\.(?:pos_embed|embeddings\.position_embedding)\.weight", "v.position_embd.weight"),
        *named(r"visual\.", "blocks", {**_QWEN_NAMES, **more}, _QWEN_LAYER),
    ]


# -- LLaMA 4, LFM2-VL, MiniCPM-V --------------------------------------------------------------------------------------


def _llama4_keys(c: TowerConfig) -> dict[str, object]:
    return {
        **_sizes(c, "gelu", 1e-5),
        "projector_type": "llama4",
        "attention.layer_norm_epsilon": 1e-5,  # constants of the class
        "hidden_activation": "gelu",
        "projector.scale_factor": round(1 / c.tower.number("pixel_shuffle_ratio", default=0.5)),
        "rope.freq_base": _theta(c),
        "projection_dim": _text_size(c),
    }


def _llama4_names(c: TowerConfig) -> Sequence[Name]:
    p = c.tower.integer("patch_size", default=14)

    def kernel(a: Array) -> list[Array]:
        return [a.reshape(a.shape[0], 3, p, p)]

    t = r"vision_model\."
    return [
        name(rf"{t}patch_embedding\.linear\.weight", "v.patch_embd.weight", split=kernel),
        name(rf"{t}class_embedding", "v.class_embd", split=flat),
        name(rf"{t}positional_embedding_vlm", "v.position_embd.weight"),
        name(rf"{t}vision_adapter\.mlp\.fc([12])\.weight", r"mm.model.mlp.\1.weight"),
        *named(
            t,
            r"model\.layers",
            {"layernorm_pre": "v.pre_ln", "layernorm_post": "v.post_ln"},
            {
                "input_layernorm": "ln1",
                "post_attention_layernorm": "ln2",
                "mlp.fc1": "ffn_up",
                "mlp.fc2": "ffn_down",
                "self_attn.o_proj": "attn_out",
                **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
            },
        ),
        *named(r"multi_modal_projector\.", "", {"linear_1": "mm.model.fc"}, {}),
    ]


def _lfm2_keys(c: TowerConfig) -> dict[str, object]:
    if c.whole.get("vision_feature_layer", default=-1) != -1:  # a key of old configs
        c.whole.damaged()
    side = isqrt(c.tower.integer("num_patches", default=256)) * c.tower.integer("patch_size", default=16)
    return {
        **_sizes(c, "gelu_pytorch_tanh", 1e-6),
        "projector_type": "lfm2",
        "image_size": side,
        "projector.scale_factor": c.whole.integer("downsample_factor", default=2),
        "projector.hidden_activation": c.whole.get("projector_hidden_act", default="gelu"),
        "projection_dim": _text_size(c),
    }


def _lfm2_names(c: TowerConfig) -> Sequence[Name]:
    p = c.tower.integer("patch_size", default=16)

    def kernel(a: Array) -> list[Array]:
        """The checkpoint has the channels of a pixel side by side."""
        pixels: Array = a.reshape(-1, p, p, 3)
        return [np.ascontiguousarray(np.moveaxis(pixels, 3, 1))]

    return [
        name(rf"{_TOWER}embeddings\.patch_embedding\.weight", "v.patch_embd.weight", split=kernel),
        *_clip_names(_TOWER),
        *named(
            r"multi_modal_projector\.", "", {"layer_norm": "mm.input_norm", "linear_1": "mm.1", "linear_2": "mm.2"}, {}
        ),
    ]


def _minicpmv_keys(c: TowerConfig) -> dict[str, object]:
    whole = c.whole
    if whole.integer("merger_times", default=1) != 1 or whole.get("drop_vision_last_layer", default=False):
        whole.damaged()
    for part, key in ((whole, "merge_kernel_size"), (c.tower, "window_kernel_size")):
        if list(part.get(key, default=[2, 2])) != [2, 2]:
            part.fail(f"{key} is {part.get(key)!r:.60}: only squares of 2 x 2 are supported")
    fine = whole.get("downsample_mode", default="16x") == "4x"
    return {
        **_siglip_keys(c),
        "projector_type": "minicpmv4_6",
        "projector.scale_factor": 2 if fine else 4,
        "wa_layer_indexes": np.array([whole.integer("insert_layer_id", default=6)], np.int32),
        "projection_dim": _text_size(c),
    }


_MERGER = {
    "layer_norm1": "ln1",
    "pre_norm": "ds_ln",
    "linear_1": "ds_ffn_up",
    "linear_2": "ds_ffn_down",
    "self_attn.out_proj": "attn_out",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
}


def _minicpmv_names(c: TowerConfig) -> Sequence[Name]:
    fine = c.whole.get("downsample_mode", default="16x") == "4x"
    merger = {f"vit_merger.{old}": f"v.vit_merger.{new}" for old, new in _MERGER.items()}
    return [
        *([name(rf"{_TOWER}vit_merger\..*")] if fine else named(_TOWER, "", merger, {})),
        *_clip_names(_TOWER),
        *named(r"merger\.mlp\.0\.", "", {"pre_norm": "mm.input_norm", "linear_1": "mm.up", "linear_2": "mm.down"}, {}),
    ]


def _resampler_keys(c: TowerConfig) -> dict[str, object]:
    sizes = _siglip_keys(c)
    if c.whole.get("drop_vision_last_layer", default=True):
        sizes["block_count"] = c.tower.integer("num_hidden_layers") - 1
    return {**sizes, "projector_type": "resampler", "projection_dim": _text_size(c)}


def _turned(a: Array) -> list[Array]:
    """A matrix that the checkpoint multiplies from the left."""
    return [np.ascontiguousarray(np.swapaxes(a, 0, 1))]


_RESAMPLER_NAMES = [
    *_clip_names(r"vpm\."),
    name(r"resampler\.query", "resampler.query"),
    name(r"resampler\.proj", "resampler.proj.weight", split=_turned),
    name(r"resampler\.pos_embed"),
    name(r"resampler\.attn\.in_proj_(weight|bias)", *(rf"resampler.attn.{x}.\1" for x in "qkv"), split=thirds),
    *named(
        r"resampler\.",
        "",
        {
            "kv_proj": "resampler.kv",
            "attn.out_proj": "resampler.attn.out",
            **{f"ln_{x}": f"resampler.ln_{x}" for x in ("q", "kv", "post")},
        },
        {},
    ),
]


_VISUAL = ("visual.",)

FAMILIES = (
    TowerFamily(
        types=("clip", "clip_vision_model"),
        keys=_clip_keys,
        names=lambda c: [
            *_clip_names(_VISION_MODEL),
            name(r"visual_projection\.weight", "v.projection.weight"),
            _CLASSIFIER,
        ],
        begin=(
            *("vision_model.", "visual_projection.", "embeddings.", "encoder.", "pre_layrnorm.", "post_layernorm."),
            "classifier.",
        ),
        alone=True,
    ),
    TowerFamily(
        types=("siglip", "siglip_vision_model"),
        keys=lambda c: {**_siglip_keys(c), **_labels(c)},
        names=lambda c: [*_clip_names(_VISION_MODEL, head=True), _CLASSIFIER],
        begin=("vision_model.", "embeddings.", "encoder.", "post_layernorm.", "head.", "classifier."),
        alone=True,
    ),
    TowerFamily(
        types=("dinov2",),
        keys=_dinov2_keys,
        names=lambda c: _VIT_NAMES,
        begin=("",),
        part="",
        alone=True,
    ),
    TowerFamily(types=("vit",), keys=_vit_keys, names=lambda c: _VIT_NAMES, begin=("",), part="", alone=True),
    TowerFamily(
        types=("llava", "llava_next"),
        of=("clip_vision_model", "siglip_vision_model"),
        keys=_llava_keys,
        names=_llava_names,
        begin=(*_PROJECTOR, "image_newline"),
    ),
    TowerFamily(
        types=("llava_onevision",),
        of=("siglip_vision_model", "clip_vision_model"),
        keys=_onevision_keys,
        names=_llava_names,
        begin=(*_PROJECTOR, "image_newline"),
    ),
    TowerFamily(types=("llava",), of=("pixtral",), keys=_pixtral_keys, names=_pixtral_names, begin=_PROJECTOR),
    TowerFamily(types=("mistral3",), keys=_mistral3_keys, names=_pixtral_names, begin=_PROJECTOR),
    TowerFamily(types=("paligemma",), keys=_paligemma_keys, names=_paligemma_names, begin=_PROJECTOR),
    TowerFamily(types=("gemma3",), keys=_gemma3_keys, names=_gemma3_names, begin=_PROJECTOR),
    TowerFamily(
        types=("idefics3", "smolvlm"),
        keys=_idefics3_keys,
        names=_idefics3_names,
        begin=("vision_model.", "connector."),
    ),
    TowerFamily(types=("internvl",), keys=_internvl_keys, names=_internvl_names, begin=_PROJECTOR),
    TowerFamily(types=("aya_vision",), keys=_aya_keys, names=_aya_names, begin=_PROJECTOR),
    TowerFamily(types=("qwen2_vl",), keys=_qwen2_keys, names=_qwen_names, begin=_VISUAL),
    TowerFamily(types=("qwen2_5_vl",), keys=_qwen25_keys, names=_qwen_names, begin=_VISUAL),
    TowerFamily(types=("qwen3_vl",), keys=_qwen3_keys, names=_qwen_names, begin=_VISUAL),
    TowerFamily(types=("glm4v",), keys=_glm4v_keys, names=_qwen_names, begin=_VISUAL),
    TowerFamily(
        types=("llama4",), keys=_llama4_keys, names=_llama4_names, begin=("vision_model.", "multi_modal_projector.")
    ),
    TowerFamily(types=("lfm2_vl",), keys=_lfm2_keys, names=_lfm2_names, begin=_PROJECTOR),
    TowerFamily(
        types=("minicpmv", "minicpmo"),
        keys=_resampler_keys,
        names=lambda c: _RESAMPLER_NAMES,
        begin=("vpm.", "resampler."),
    ),
    TowerFamily(types=("minicpmv4_6",), keys=_minicpmv_keys, names=_minicpmv_names, begin=("vision_tower.", "merger.")),
)
