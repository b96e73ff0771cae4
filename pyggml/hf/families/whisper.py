"""Whisper: the decoder of text (`dec.`), and the encoder of sounds (`a.`), which runs as a tower."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import Config
from ..family import Family, Key, Of
from ..moves import Move
from ..parts import Part
from ..towers.hearing import ENCODER_LAYER

_DECODER_LAYER = {  # name in the checkpoint -> role in a GGUF
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
    return found | {f"{task}_token_id": i for task, i in tasks.items() if task in _TASKS}


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
_MASKED = (  # how training hides parts of its sounds
    *("feature_length", "feature_min_masks", "feature_prob", "time_length", "time_min_masks", "time_prob"),
)
_TASKS = ("transcribe", "translate")
_KEYS: dict[str, Key] = {
    "embedding_length": Of(lambda c: c.n_embd, lambda n, keys: {"d_model": n}),
    "context_length": "max_target_positions",
    "encoder_context_length": "max_source_positions",
    "block_count": "decoder_layers",
    "feed_forward_length": "decoder_ffn_dim",
    "attention.head_count": "decoder_attention_heads",
    "attention.layer_norm_epsilon": Of(lambda c: 1e-5),
    "encoder.block_count": "encoder_layers",
    "encoder.feed_forward_length": "encoder_ffn_dim",
    "encoder.attention.head_count": "encoder_attention_heads",
    "encoder.num_mel_bins": "num_mel_bins",
    "scale_embedding": Of(
        lambda c: bool(c.get("scale_embedding", default=False)) or None, lambda x, keys: {"scale_embedding": x}
    ),
    "decoder_start_token_id": Of(
        lambda c: c.integer("decoder_start_token_id", default=50257), lambda n, keys: {"decoder_start_token_id": n}
    ),
    "rope.dimension_count": None,
}


def _files(keys: Mapping[str, Any]) -> Mapping[str, object]:
    """generation_config.json, of which `_generation` reads the tokens, and preprocessor_config.json."""
    said: dict[str, Any] = {key: [int(i) for i in keys[key]] for key in _SUPPRESSED if key in keys}
    said |= {key: keys[key] for key in (*_NUMBERS, "is_multilingual", "decoder_start_token_id") if key in keys}
    if "languages" in keys:
        pairs = zip(str(keys["languages"]).split(), keys["language_ids"], strict=True)
        said["lang_to_id"] = {f"<|{code}|>": int(i) for code, i in pairs}
    tasks = {task: keys[f"{task}_token_id"] for task in _TASKS if f"{task}_token_id" in keys}
    said |= {"task_to_id": tasks} if tasks else {}
    sound = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": keys.get("encoder.num_mel_bins", 80)}
    sound |= {"sampling_rate": 16000, "hop_length": 160, "n_fft": 400}
    sound["chunk_length"] = 2 * keys.get("encoder_context_length", 1500) // 100
    return {"generation_config.json": said, "preprocessor_config.json": sound}


# A bias of a convolution has a row for each element in a file.
_COLUMN = Move(lambda a, s: a.reshape(-1, 1), lambda a, s: a.reshape(-1), lambda shape, s: (*shape, 1))
_OUTSIDE = {  # name in the checkpoint -> name in a GGUF
    "model.decoder.layer_norm": "dec.output_norm",
    "model.decoder.embed_tokens": "token_embd",
    "model.decoder.embed_positions": "position_embd",
    "model.encoder.conv1": "a.conv1d.1",
    "model.encoder.conv2": "a.conv1d.2",
    "model.encoder.layer_norm": "a.post_ln",
    "model.encoder.embed_positions": "a.position_embd",
}
_STACKS = (("model.decoder.layers", "dec", _DECODER_LAYER), ("model.encoder.layers", "a", ENCODER_LAYER))

FAMILIES = (
    Family(
        arch="whisper",
        types=("whisper",),
        cls="WhisperForConditionalGeneration",
        act="gelu",
        keys=_KEYS,
        more=_generation,
        moves={f"a.conv1d.{i}.bias": _COLUMN for i in (1, 2)},
        names={
            **{
                rf"^{re.escape(layers)}\.(\d+)\.{re.escape(hf)}\.(weight|bias)$": rf"={begin}.blk.\1.{role}.\2"
                for layers, begin, roles in _STACKS
                for hf, role in roles.items()
            },
            **{rf"^{re.escape(hf)}\.(weight|bias)$": rf"={name}.\1" for hf, name in _OUTSIDE.items()},
        },
        spelled={
            **{f"{begin}.{role}": hf for _, begin, roles in _STACKS for hf, role in roles.items()},
            **{name: hf for hf, name in _OUTSIDE.items()},
        },
        sides={f"{begin}.": layers for layers, begin, _ in _STACKS},
        files=_files,
        constants={"is_encoder_decoder": True},
        skip=(r"^proj_out\.",),
        told=("apply_spec_augment", *(f"mask_{x}" for x in _MASKED)),
        table="t5",
    ),
)
