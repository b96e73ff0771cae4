"""Adapters on the command line: options that every verb that runs a model has, in one way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Optional, get_type_hints

import typer

from pyggml.llm.adapters.control import ControlVector, control_vector
from pyggml.llm.model import Model

_PANEL = "Adapters (names as in llama.cpp)"
Named = tuple[str, float]  # a path, and its scale


@dataclass(frozen=True)
class AdapterOptions:
    """What was asked for: LoRA adapters and control vectors with their scales, and the layers of the latter."""

    loras: Sequence[Named]
    vectors: Sequence[Named]
    il_start: int
    il_end: int | None

    def apply(self, model: Model) -> None:
        """Have all contexts that are made from now on run with them. Raises what loading them does."""
        total = ControlVector({})
        for path, scale in self.vectors:
            total += control_vector(path, scale, self.il_start, self.il_end)
        model.adapt([(model.load_lora(path), scale) for path, scale in self.loras], total)


_OPTIONS: dict[str, tuple[Any, typer.models.OptionInfo]] = {
    "lora": (
        Optional[list[str]],
        typer.Option("--lora", help="LoRA adapter (GGUF, or a PEFT folder; repeatable).", metavar="FILE"),
    ),
    "lora_scaled": (
        Optional[list[str]],
        typer.Option("--lora-scaled", help="... counted so many times (repeatable).", metavar="FILE:SCALE"),
    ),
    "control_vector": (
        Optional[list[str]],
        typer.Option("--control-vector", help="Control vector (GGUF; repeatable, they add up).", metavar="FILE"),
    ),
    "control_vector_scaled": (
        Optional[list[str]],
        typer.Option("--control-vector-scaled", help="... so many times as strong.", metavar="FILE:SCALE"),
    ),
    "control_vector_layer_range": (
        Optional[tuple[int, int]],
        typer.Option("--control-vector-layer-range", help="First and last layer that have it.", metavar="FIRST LAST"),
    ),
}


def with_adapters(command: Callable[..., None]) -> Callable[..., None]:
    """Give a verb, whose parameter `adapters` is an AdapterOptions, the options for them."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for p in inspect.signature(command).parameters.values():
        if p.name != "adapters":
            parameters.append(p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY))
    for name, (kind, option) in _OPTIONS.items():
        option.rich_help_panel = _PANEL
        annotation = Annotated[kind, option]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))

    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in _OPTIONS}
        command(adapters=_taken(given), **values)

    run.__doc__ = command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _taken(given: dict[str, Any]) -> AdapterOptions:
    loras = [*((path, 1.0) for path in given["lora"] or ()), *map(_scaled, given["lora_scaled"] or ())]
    plain = ((path, 1.0) for path in given["control_vector"] or ())
    first, last = given["control_vector_layer_range"] or (1, None)
    return AdapterOptions(loras, [*plain, *map(_scaled, given["control_vector_scaled"] or ())], first, last)


def _scaled(text: str) -> Named:
    path, _, scale = text.rpartition(":")
    try:
        return path, float(scale)
    except ValueError:
        raise typer.BadParameter(f"an adapter and its scale are FILE:SCALE, not {text!r}") from None
