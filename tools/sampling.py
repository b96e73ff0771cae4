"""What is asked for a text, on the command line: an option for each parameter of a sampler chain, and others."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Optional, cast, get_type_hints

import click

from pyggml import limits
from pyggml.errors import SamplerError
from pyggml.llm.samplers.params import OPTIONS, SamplingOptions, SamplingParams
from pyggml.small_file import read_text

from .command import PANEL, Group, Option
from .options import usage

_PANEL = "Sampling (names and defaults as in llama.cpp)"
_BIAS = re.compile(r"\s*(\d+)\s*([+-]\S+)\s*")
_FILES = {"grammar": ("--grammar-file",), "json_schema": ("-jf", "--json-schema-file")}
_TYPES: dict[str, Any] = {  # types of the options that the command line takes in another form
    "dry_sequence_breakers": Optional[list[str]],
    "logit_bias": Optional[list[str]],
    "json_schema": Optional[str],
    "samplers": str,
}


def declared(name: str, help: str | None = None, panel: str = PANEL) -> Option:
    """How an option of `SamplingParams` or `TextParams` is given: with the flags that its field names."""
    option = OPTIONS[name]
    return Option(*option.flags, help=option.help if help is None else help, panel=panel)


def _options() -> tuple[dict[str, Any], dict[str, Any]]:
    """One option for each field of SamplingParams, and their defaults."""
    kinds = get_type_hints(SamplingParams)
    hints: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for f in fields(SamplingParams):
        kind = _TYPES.get(f.name, kinds[f.name])
        hints[f.name] = Annotated[kind, declared(f.name, panel=_PANEL)]
        default: Any = f.default
        defaults[f.name] = None if kind == Optional[list[str]] else ";".join(default) if kind is str else default
        if f.name in _FILES:
            name = f"{f.name}_file"
            hints[name] = Annotated[Optional[Path], Option(*_FILES[f.name], help="... from a file.", panel=_PANEL)]
            defaults[name] = None
    return hints, defaults


def _taken(values: dict[str, Any]) -> SamplingOptions:
    """The sampling options, taken out of the values of all options."""
    sampling = {f.name: values.pop(f.name) for f in fields(SamplingParams)}
    sampling["logit_bias"] = dict(_bias(text) for text in sampling["logit_bias"] or ())
    breakers = sampling.pop("dry_sequence_breakers")
    if breakers:
        sampling["dry_sequence_breakers"] = [b for b in breakers if b != "none"]
    for name in _FILES:
        path = values.pop(f"{name}_file")
        if path is not None:
            sampling[name] = read_text(path, limits.TEXT_FILE_BYTES, SamplerError)
    with usage():
        SamplingParams(**sampling)  # checks ranges before a model is loaded
    return cast(SamplingOptions, sampling)


def _bias(text: str) -> tuple[int, float]:
    found = _BIAS.fullmatch(text)
    try:
        if found is not None:
            return int(found[1]), float(found[2])
    except ValueError:
        pass
    raise click.BadParameter(f"a logit bias is TOKEN_ID+BIAS or TOKEN_ID-BIAS, not {text!r}")


Sampling = Annotated[SamplingOptions, Group(*_options(), _taken)]
Stop = Annotated[Optional[list[str]], declared("stop")]
