"""Whisper: the decoder of text. Its encoder is a tower, whose tensors `pyggml/hf/towers` reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import Config
from ..family import Family, Key, Of
from ..parts import Part

_LAYER = r"^model\.decoder\.layers\.(\d+)\."
_ROLES = {
    "self_attn_layer_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_o",
    "encoder_attn_layer_norm": "cross_attn_norm",
    "encoder_attn.q_proj": "cross_attn_q",
    "encoder_attn.k_proj": "cross_attn_k",
    "encoder_attn.v_proj": "cross_attn_v",
    "encoder_attn.out_proj": "cross_attn_o",
    "final_layer_norm": "ffn_norm",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
}


def _generation(c: Config) -> dict[str, object]:
    """What generation_config.json says of special tokens (older checkpoints: config.json)."""
    path = Path(c.path).with_name("generation_config.json")
    g = Part.of_file(path)
    values: dict[str, Any] = {**{k: c.get(k, default=None) for k in _SUPPRESSED}, **g.values}
    g = Part(values, g.where)
    found: dict[str, object] = {key: _ids(g, key) for key in _SUPPRESSED}
    found |= {key: g.number(key) for key in _NUMBERS}
    found["is_multilingual"] = values.get("is_multilingual")
    languages = _tokens(g, "lang_to_id")
    if languages:
        found |= {"languages": " ".join(languages), "language_ids": list(languages.values())}
    tasks = _tokens(g, "task_to_id")
    return found | {f"{task}_token_id": i for task, i in tasks.items() if task in ("transcribe", "translate")}


def _ids(g: Part, key: str) -> list[int] | None:
    ids = g.array(key) if g.values.get(key) else []
    if not all(type(i) is int for i in ids):
        g.fail(key, "must be token ids")
    return [i for i in ids if i >= 0] or None


def _tokens(g: Part, key: str) -> Mapping[str, int]:
    part = g.part(key)
    for name, i in part.values.items():
        if type(i) is not int:
            part.fail(name, "must be a token id")
    return {name.removeprefix("<|").removesuffix("|>"): i for name, i in part.values.items()}


_SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")
_NUMBERS = ("max_initial_timestamp_index", "no_timestamps_token_id", "prev_sot_token_id")
_KEYS: dict[str, Key] = {
    "context_length": "max_target_positions",
    "encoder_context_length": "max_source_positions",
    "block_count": "decoder_layers",
    "feed_forward_length": "decoder_ffn_dim",
    "attention.head_count": "decoder_attention_heads",
    "attention.layer_norm_epsilon": Of(lambda c: 1e-5),
    "scale_embedding": Of(lambda c: bool(c.get("scale_embedding", default=False)) or None),
    "decoder_start_token_id": Of(lambda c: c.integer("decoder_start_token_id", default=50257)),
    "rope.dimension_count": None,
}

FAMILIES = (
    Family(
        arch="whisper",
        types=("whisper",),
        cls="WhisperForConditionalGeneration",
        act="gelu",
        keys=_KEYS,
        more=_generation,
        names={
            **{
                _LAYER + hf.replace(".", r"\.") + r"\.(weight|bias)$": rf"=dec.blk.\1.{role}.\2"
                for hf, role in _ROLES.items()
            },
            r"^model\.decoder\.layer_norm\.(weight|bias)$": r"=dec.output_norm.\1",
            r"^model\.decoder\.embed_tokens\.weight$": "=token_embd.weight",
            r"^model\.decoder\.embed_positions\.weight$": "=position_embd.weight",
        },
        skip=(r"^model\.encoder\.", r"^proj_out\."),
        table="t5",
    ),
)
