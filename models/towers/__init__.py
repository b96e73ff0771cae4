"""Towers: encoders that make features of pictures and sounds, one page per family.

A tower is an architecture as decoders are (`pyggml.models`): a page has TOWERS, records of type `Tower` (`tower.py`).
Its builder is the declaration of its tensors, and reads `clip.vision.*` or `clip.audio.*` of the metadata. The name of
a tower is the `clip.projector_type` of llama.cpp's mmproj files, or a name of pyggml's where llama.cpp has no such
tower. A Hugging Face folder is turned into the same metadata and tensors (`pyggml.hf.towers`). To add one:

1. One line in PAGES, its record in TOWERS of the page.
2. Blocks that differ in arguments only are in `models/blocks/vision.py`; no block knows the name of a tower.
3. A family of folders: one record in a page of `pyggml/hf/towers/`, and its model_type in PAGES there.
4. `tests/models/test_towers.py` compares the features with the transformers library's.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyggml.errors import ModelError, nearest

if TYPE_CHECKING:
    from .tower import Tower

PAGES = {  # the name of a tower -> the module that describes it
    "aya_vision": "shuffled",
    "clip": "encoders",
    "dinov2": "encoders",
    "gemma3": "llava",
    "glm4v": "qwen_vl",
    "idefics3": "shuffled",
    "internvl": "shuffled",
    "lfm2": "shuffled",
    "llama4": "shuffled",
    "minicpmv4_6": "minicpmv",
    "mlp": "llava",
    "paligemma": "llava",
    "pixtral": "pixtral",
    "qwen2.5vl_merger": "qwen_vl",
    "qwen2vl_merger": "qwen_vl",
    "qwen3vl_merger": "qwen_vl",
    "resampler": "minicpmv",
    "siglip": "encoders",
    "vit": "encoders",
    "clip_text": "reading",
    "siglip_text": "reading",
    "qwen2a": "hearing",
    "ultravox": "hearing",
    "voxtral": "hearing",
    "whisper": "hearing",
}


def get_tower(name: str) -> Tower[Any]:
    """The tower of that name. Raises ModelError naming those whose names are like it."""
    if name not in PAGES:
        near = ", ".join(nearest(name, PAGES, 5, 0.5)) or "none"
        raise ModelError(
            f"the tower {name!r} (clip.projector_type) is not supported; of the {len(PAGES)} that are, like it: {near}"
        )
    page: tuple[Tower[Any], ...] = import_module(f".{PAGES[name]}", __name__).TOWERS
    return next(t for t in page if name in t.names)
