"""Towers that the golden data lacks: their configs, weights by a rule, and inputs. `tests/deep/deep_towers.py` computes
their features by the transformers library in float64 and writes them to `other_towers.npz`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

FEATURES = Path(__file__).with_name("other_towers.npz")
_TEXT = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
}
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_LLAMA4 = {
    "model_type": "llama4",
    "text_config": {**_TEXT, "model_type": "llama4_text", "head_dim": 16, "num_local_experts": 1},
    "vision_config": {
        **_SIZES,
        "model_type": "llama4_vision_model",
        "intermediate_size": 128,
        "image_size": 32,
        "patch_size": 8,
        "vision_output_dim": 40,
        "projector_input_dim": 40,
        "projector_output_dim": 40,
    },
}


def _lfm2(norm: bool, n_patches: int) -> dict[str, Any]:
    vision = {**_SIZES, "model_type": "siglip2_vision_model", "num_patches": n_patches, "patch_size": 4}
    return {
        "model_type": "lfm2_vl",
        "text_config": {**_TEXT, "model_type": "lfm2", "layer_types": ["full_attention"]},
        "vision_config": {**vision, "vision_use_head": False},
        "projector_hidden_size": 40,
        "projector_use_layernorm": norm,
        "projector_bias": norm,
    }


def _minicpm(mode: str) -> dict[str, Any]:
    vision = {**_SIZES, "model_type": "minicpmv4_6_vision", "num_hidden_layers": 3, "image_size": 40, "patch_size": 4}
    text = {**_TEXT, "model_type": "qwen3_5_text", "layer_types": ["full_attention"]}
    return {
        "model_type": "minicpmv4_6",
        "text_config": text,
        "vision_config": vision,
        "insert_layer_id": 1,
        "downsample_mode": mode,
        "image_token_id": 5,
        "video_token_id": 6,
    }


def _ultravox(middle: bool) -> dict[str, Any]:
    encoder = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    return {
        "model_type": "ultravox",
        "text_config": _TEXT,
        "audio_config": {"model_type": "whisper", "num_mel_bins": 16, "max_source_positions": 20, **encoder},
        "hidden_size": 48,
        "stack_factor": 3,
        "projector_ln_mid": middle,
        "projector_act": "swiglu",
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "llama4": _LLAMA4,
    "lfm2_vl": _lfm2(True, 64),
    "lfm2_vl-small": _lfm2(False, 16),
    "minicpmv4_6": _minicpm("16x"),
    "minicpmv4_6-4x": _minicpm("4x"),
    "ultravox": _ultravox(True),
    "ultravox-post": _ultravox(False),
}


def inputs(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """What a processor would give: noise, in the shapes of three tiles, two of which are of one size; of Ultravox more
    frames than the encoder hears at a time."""
    noise = np.random.default_rng(crc32(name.encode())).standard_normal
    if name == "llama4":
        return {"pixel_values": noise((3, 3, 32, 32), np.float32)}
    if name.startswith("ultravox"):
        return {"input_features": noise((1, 16, 67), np.float32)}
    if name.startswith("lfm2"):
        shapes = np.array([[4, 6], [4, 6], [6, 2]], np.int32)
        mask = np.arange(24) < shapes.prod(1)[:, None]
        pixels = noise((3, 24, 48), np.float32) * mask[:, :, None]
        return {"pixel_values": pixels.astype(np.float32), "spatial_shapes": shapes, "pixel_attention_mask": mask}
    sizes = np.array([[4, 8], [8, 4], [8, 4]], np.int32)
    return {"pixel_values": noise((1, 3, 4, 4 * 96), np.float32), "target_sizes": sizes}


def weights(shapes: Mapping[str, list[int]]) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a checkpoint, bfloat16 as uint16; each follows from its name."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, shape in shapes.items():
        a = np.random.default_rng(crc32(name.encode())).standard_normal(shape, np.float32)
        if len(shape) > 1:
            a /= np.sqrt(a[0].size)
        else:
            a = a / 10 + ("norm" in name or ".ln_" in name) * name.endswith("weight")
        found[name] = (a.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return found


def written(folder: Path, name: str) -> np.ndarray[Any, Any]:
    """Write the folder of a tower; gives its features, float64 [n_rows, 32]."""
    from ..hf.checkpoint import write_checkpoint

    with np.load(FEATURES) as z:
        shapes, features = json.loads(str(z[f"{name}/shapes"])), z[f"{name}/features"]
    write_checkpoint(folder, CONFIGS[name], weights(shapes))
    return features
