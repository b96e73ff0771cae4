"""The tower of a model that sees or hears, loaded when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pyggml.errors import GGMLError, ModelError

from .loaded import LoadedModel
from .tower import LoadedTower, open_tower_of

S = TypeVar("S")
_DOES = {"vision": "sees", "audio": "hears"}


def has_sense(model: LoadedModel, side: str) -> bool:
    """Whether the model has a tower of that side (`vision` or `audio`) that can be loaded."""
    try:
        return open_tower_of(model.path, model.mmproj, side, keeps=False) is not None
    except GGMLError:
        return False


def sense(model: LoadedModel, side: str, made_of: Callable[[LoadedModel, LoadedTower], S]) -> S:
    """What `made_of` makes of the model's tower of that side (`vision` or `audio`), the same at every call.

    Of a model with a budget (`ram`) the tower keeps none of its weights in memory between two pictures or sounds.
    Raises ModelError when the model has no such tower.
    """
    if side not in model.senses:
        if model.vocab_only:
            raise ModelError("the model was loaded with vocab_only=True: it has no tower")
        keeps, fast = model.weight_stream is None, model.precision == "fast"
        tower = open_tower_of(model.path, model.mmproj, side, keeps, fast)
        if tower is None:
            text = f"the model has no tower that {_DOES[side]} (load_model(..., mmproj=FILE) names one)"
            raise ModelError(f"{model.path}: {text}")
        model.senses[side] = made_of(model, tower)
    return model.senses[side]
