"""The tower of a Hugging Face folder, read as if it were an mmproj file: `clip.*` metadata, and `v.*`, `a.*`, `mm.*`
tensors.

A page has FAMILIES, records of type `TowerFamily`. To add one, write it there and enter its model_type in PAGES.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from pyggml.errors import ModelError
from pyggml.tensor import Tensor

from ..parts import read_object
from ..safetensors import open_folder
from .family import TowerConfig, TowerFamily
from .tensors import tower_tensors

PAGES = {  # page -> the model types in it
    "vision": (
        *("clip", "clip_vision_model", "siglip", "siglip_vision_model", "dinov2", "vit", "llava", "llava_next"),
        *("llava_onevision", "paligemma", "gemma3", "idefics3", "smolvlm", "internvl", "aya_vision", "mistral3"),
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "llama4", "lfm2_vl", "minicpmv4_6"),
        *("minicpmv", "minicpmo"),
    ),
    "hearing": ("qwen2_audio", "voxtral", "ultravox", "whisper"),
}
_PAGE_OF = {name: page for page, names in PAGES.items() for name in names}


def tower_family(raw: Mapping[str, Any]) -> TowerFamily | None:
    """The family of a config.json that has a tower; None for others. Raises ModelError for a family whose tower is of a
    kind that is not known."""
    kind = raw.get("model_type")
    page = _PAGE_OF.get(kind) if isinstance(kind, str) else None
    if page is None:
        return None
    families: tuple[TowerFamily, ...] = import_module(f".{page}", __name__).FAMILIES
    found = [f for f in families if kind in f.types]
    if not found[0].alone and not all(isinstance(raw.get(f.part), dict) for f in found if f.part):
        return None  # a text model of the same model_type
    kinds: dict[str, TowerFamily] = {name: f for f in found for name in f.of}
    if not kinds:
        return found[0]
    own = raw[found[0].part].get("model_type")
    if not isinstance(own, str) or own not in kinds:
        raise ModelError(f"a tower of model_type {own!r:.60} is not known; of {kind}, {', '.join(kinds)} are")
    return kinds[own]


def _text_family(raw: Mapping[str, Any]) -> TowerFamily | None:
    from .text import FAMILIES

    return next((f for f in FAMILIES if raw.get("model_type") in f.types and isinstance(raw.get(f.part), dict)), None)


def is_tower(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is a tower alone, without a decoder."""
    family = tower_family(read_object(Path(folder) / "config.json"))
    return family is not None and family.alone


def open_tower(folder: str | Path, side: str = "") -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Metadata and tensors of a folder's tower; None when the folder has none. `side` "text": those of CLIP's and
    SigLIP's text encoders, which stand beside a tower that sees.

    Raises ModelError for a damaged folder, a key that is missing or not supported, and for a tensor of the tower that
    is not known.
    """
    found = _described(Path(folder), side)
    if found is None:
        return None
    family, c, kv = found
    with _damage_named(folder):
        return kv, tower_tensors(family, c, kv, open_folder(Path(folder)))


def tower_keys(folder: str | Path) -> dict[str, Any] | None:
    """The metadata that `open_tower` gives, of a folder that may lack its tensors. Raises as `open_tower`."""
    found = _described(Path(folder))
    return None if found is None else found[2]


def _described(folder: Path, side: str = "") -> tuple[TowerFamily, TowerConfig, dict[str, Any]] | None:
    raw = read_object(folder / "config.json")
    family = _text_family(raw) if side == "text" else tower_family(raw)
    if family is None:
        return None
    c = TowerConfig(str(folder / "config.json"), raw, family.part)
    with _damage_named(folder):
        return family, c, family.metadata(c)


@contextmanager
def _damage_named(folder: str | Path) -> Generator[None]:
    """Turn what damaged files make Python raise into a ModelError that names the folder."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as e:
        raise ModelError(f"{folder}: holds what its tower cannot have ({type(e).__name__}: {e})") from e


__all__ = ["PAGES", "TowerConfig", "TowerFamily", "is_tower", "open_tower", "tower_family", "tower_keys"]
