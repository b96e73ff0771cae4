"""The tower of a Hugging Face folder, read as if it were an mmproj file: `clip.*` metadata, and `v.*`, `a.*`, `mm.*`
tensors.

A page has FAMILIES, records of type `TowerFamily`. To add one, write it there and enter its model_type in PAGES.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from pyggml.errors import ModelError
from pyggml.tensor import Tensor

from ..config import Config
from ..parts import read_object
from ..safetensors import open_folder
from .family import TowerConfig, TowerFamily
from .tensors import tower_tensors

PAGES = {  # page -> the model types in it
    "vision": ("clip", "siglip"),
    "hearing": ("qwen2_audio", "voxtral", "whisper"),
}
_PAGE_OF = {name: page for page, names in PAGES.items() for name in names}


def tower_family(model_type: object) -> TowerFamily | None:
    """The family of a model_type that has a tower; None for others."""
    page = _PAGE_OF.get(model_type) if isinstance(model_type, str) else None
    if page is None:
        return None
    families: Iterable[TowerFamily] = import_module(f".{page}", __name__).FAMILIES
    return next(f for f in families if model_type in f.types)


def open_tower(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Metadata and tensors of a folder's tower; None when the folder has none.

    Raises ModelError for a damaged folder, a key that is missing or not supported, and for a tensor of the tower that
    is not known.
    """
    path = Path(folder)
    raw = read_object(path / "config.json")
    family = tower_family(raw.get("model_type"))
    if family is None:
        return None
    c = TowerConfig(str(path / "config.json"), raw, family.part)
    try:
        kv = family.metadata(c)
        tensors = tower_tensors(family, c, kv, open_folder(path))
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as e:
        raise ModelError(f"{path}: holds what its tower cannot have ({type(e).__name__}: {e})") from e
    return kv, tensors


__all__ = ["PAGES", "Config", "TowerConfig", "TowerFamily", "open_tower", "tower_family"]
