"""The HTTP server: llama-server's interface, OpenAI's and Anthropic's, over one engine. `pip install pyggml[serve]`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pyggml.errors import ModelError

from .options import Preset, ServeOptions

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ..llm.model import Model

__all__ = ["Preset", "ServeOptions", "create_app"]


def create_app(
    model: Model | str | os.PathLike[str] | None = None,
    options: ServeOptions | None = None,
    load: Callable[[str], Model] | None = None,
    presets: Mapping[str, Preset] | None = None,
) -> Starlette:
    """The ASGI application that serves a model: a loaded one, a path, or the model that ships with pyggml (None). With
    `models_dir` it serves the models of that folder. `load` loads one by its path (`gg.load_model`). `presets`: models
    by name that are served, too, or the options of models of `models_dir` ("*": of those without a preset).

    Its engine starts with the first request, and stops with the application (the end of ASGI's lifespan). Raises
    ModelError when starlette or pydantic is missing, for options that do not fit the model, and what loading it raises.
    """
    try:
        from .app import application
    except ImportError as e:
        raise needs_extra(e) from None
    from ..llm.model import load_model

    return application(model, options or ServeOptions(), load or load_model, presets or {})


def needs_extra(e: ImportError) -> ModelError:
    """The error about a package that is missing."""
    return ModelError(f"the server needs the package {e.name}: pip install pyggml[serve]")
