"""Adapters on the command line: the options that all verbs that run a model share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import click

from pyggml.llm.adapters.control import ControlVector, control_vector
from pyggml.llm.model import Model

from .command import Group, Option

_PANEL = "Adapters (names as in llama.cpp)"
Named = tuple[str, float]  # the path of an adapter, and its scale


@dataclass(frozen=True)
class AdapterOptions:
    """The adapters asked for: LoRA adapters and control vectors with their scales, and the control vectors' layers."""

    loras: Sequence[Named]
    vectors: Sequence[Named]
    il_start: int
    il_end: int | None

    def digest(self) -> dict[str, Any]:
        """An identity to compare adapters by: the SHA-256 of each file with its scale, and the layers."""
        about: dict[str, Any] = {}
        for name, given in (("lora", self.loras), ("control_vector", self.vectors)):
            if given:
                about[name] = [[_digest(Path(path)), scale] for path, scale in given]
        if self.vectors:
            about["control_vector_layer_range"] = [self.il_start, self.il_end]
        return about

    def apply(self, model: Model) -> None:
        """Make all contexts that are created from now on run with these adapters. Raises what loading them raises."""
        total = ControlVector({})
        for path, scale in self.vectors:
            total += control_vector(path, scale, self.il_start, self.il_end)
        model.adapt([(model.load_lora(path), scale) for path, scale in self.loras], total)


_PATHS: dict[str, Any] = {"metavar": "FILE", "panel": _PANEL}
_SCALED: dict[str, Any] = {"metavar": "FILE:SCALE", "panel": _PANEL}
_OPTIONS: dict[str, Any] = {
    "lora": Annotated[
        Optional[list[str]], Option("--lora", help="LoRA adapter (GGUF, or a PEFT folder; repeatable).", **_PATHS)
    ],
    "lora_scaled": Annotated[
        Optional[list[str]], Option("--lora-scaled", help="... counted so many times (repeatable).", **_SCALED)
    ],
    "control_vector": Annotated[
        Optional[list[str]],
        Option("--control-vector", help="Control vector (GGUF; repeatable, they add up).", **_PATHS),
    ],
    "control_vector_scaled": Annotated[
        Optional[list[str]], Option("--control-vector-scaled", help="... so many times as strong.", **_SCALED)
    ],
    "control_vector_layer_range": Annotated[
        Optional[tuple[int, int]],
        Option(
            "--control-vector-layer-range",
            help="First and last layer that have it.",
            metavar="FIRST LAST",
            min=0,
            panel=_PANEL,
        ),
    ],
}


def _taken(given: dict[str, Any]) -> AdapterOptions:
    loras = [*((path, 1.0) for path in given["lora"] or ()), *map(_scaled, given["lora_scaled"] or ())]
    plain = ((path, 1.0) for path in given["control_vector"] or ())
    first, last = given["control_vector_layer_range"] or (1, None)
    return AdapterOptions(loras, [*plain, *map(_scaled, given["control_vector_scaled"] or ())], first, last)


def _digest(path: Path) -> str:
    """The SHA-256 of a file, or of all files of a folder."""
    from hashlib import sha256  # which loads OpenSSL

    h = sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            with open(file, "rb") as f:
                while part := f.read(1 << 20):
                    h.update(part)
    return h.hexdigest()[:16]


def _scaled(text: str) -> Named:
    path, _, scale = text.rpartition(":")
    try:
        return path, float(scale)
    except ValueError:
        raise click.BadParameter(f"an adapter and its scale are FILE:SCALE, not {text!r}") from None


Adapters = Annotated[AdapterOptions, Group(_OPTIONS, dict.fromkeys(_OPTIONS), _taken)]
