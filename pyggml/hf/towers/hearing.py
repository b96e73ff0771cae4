"""The families of folders with a tower that hears: Whisper's encoder, and those made of it."""

from __future__ import annotations

from collections.abc import Mapping

from .family import Array, Name, TowerConfig, TowerFamily, name
from .vision import named

ENCODER_LAYER = {  # name in the checkpoint -> role in a file
    "self_attn_layer_norm": "ln1",
    "final_layer_norm": "ln2",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "self_attn.out_proj": "attn_out",
}


def _columns(a: Array) -> list[Array]:
    """A bias as llama.cpp stores those of convolutions, with a row for each element."""
    return [a.reshape(-1, 1)]


def _names(t: str) -> list[Name]:
    """The names of the encoder's tensors, which begin with `t`."""
    return [
        name(rf"{t}conv([12])\.weight", r"a.conv1d.\1.weight"),
        name(rf"{t}conv([12])\.bias", r"a.conv1d.\1.bias", split=_columns),
        name(rf"{t}embed_positions\.weight", "a.position_embd.weight"),
        name(rf"{t}layer_norm\.(weight|bias)", r"a.post_ln.\1"),
        *named(t, "layers", {}, ENCODER_LAYER, "a.blk"),
    ]


def _whisper_keys(c: TowerConfig) -> Mapping[str, object]:
    a = c.tower
    return {
        "projector_type": "whisper",
        "embedding_length": a.integer("d_model", "hidden_size"),
        "feed_forward_length": a.integer("encoder_ffn_dim", "intermediate_size"),
        "block_count": a.integer("encoder_layers", "num_hidden_layers"),
        "attention.head_count": a.integer("encoder_attention_heads", "num_attention_heads"),
        "attention.layer_norm_epsilon": 1e-5,
        "hidden_activation": a.get("activation_function", default="gelu"),
        "num_mel_bins": a.integer("num_mel_bins", default=80),
        "max_pos_emb": a.integer("max_source_positions", default=1500),
        "projection_dim": a.integer("d_model", "hidden_size"),
    }


def _qwen2_audio_keys(c: TowerConfig) -> Mapping[str, object]:
    sizes = {"projector_type": "qwen2a", "projection_dim": c.text.integer("hidden_size", default=4096)}
    return {**_whisper_keys(c), **sizes}


def _voxtral_keys(c: TowerConfig) -> Mapping[str, object]:
    a = c.tower
    n_embd, n_ff = a.integer("hidden_size", "d_model"), a.integer("intermediate_size", "encoder_ffn_dim")
    if n_ff % n_embd:
        a.fail(f"intermediate_size = {n_ff}: the projector reads whole states of {n_embd} elements")
    if c.whole.get("projector_hidden_act", default="gelu") != "gelu":
        a.fail(f"projector_hidden_act is {c.whole.get('projector_hidden_act')!r:.60}: only gelu is supported")
    return {
        **_whisper_keys(c),
        "projector_type": "voxtral",
        "projection_dim": c.text.integer("hidden_size"),
        "projector.stack_factor": n_ff // n_embd,
    }


def _ultravox_keys(c: TowerConfig) -> Mapping[str, object]:
    if c.whole.get("projector_act", default="swiglu") != "swiglu":
        c.whole.fail(f"projector_act is {c.whole.get('projector_act')!r:.60}: only swiglu is supported")
    return {
        **_whisper_keys(c),
        "projector_type": "ultravox",
        "projection_dim": c.text.integer("hidden_size"),
        "projector.stack_factor": c.whole.integer("stack_factor", default=8),
    }


FAMILIES = (
    TowerFamily(
        types=("whisper",),
        keys=_whisper_keys,
        names=lambda c: _names(r"encoder\."),
        begin=("encoder.",),
        part="",
        side="audio",
    ),
    TowerFamily(
        types=("qwen2_audio",),
        keys=_qwen2_audio_keys,
        names=lambda c: [
            *_names(r"audio_tower\."),
            name(r"multi_modal_projector\.linear\.(weight|bias)", r"mm.a.fc.\1"),
        ],
        begin=("audio_tower.", "multi_modal_projector."),
        part="audio_config",
        side="audio",
    ),
    TowerFamily(
        types=("voxtral",),
        keys=_voxtral_keys,
        names=lambda c: [
            *_names(r"audio_tower\."),
            name(r"multi_modal_projector\.linear_([12])\.weight", r"mm.a.mlp.\1.weight"),
        ],
        begin=("audio_tower.", "multi_modal_projector."),
        part="audio_config",
        side="audio",
    ),
    TowerFamily(
        types=("ultravox",),
        keys=_ultravox_keys,
        names=lambda c: [
            *_names(r"audio_tower\."),
            name(r"multi_modal_projector\.linear_([12])\.weight", r"mm.a.mlp.\1.weight"),
            name(r"multi_modal_projector\.ln_(pre|mid|post)\.weight", r"mm.a.norm_\1.weight"),
        ],
        begin=("audio_tower.", "multi_modal_projector."),
        part="audio_config",
        side="audio",
    ),
)
