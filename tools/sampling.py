"""Sampling on the command line: an option for each parameter of a sampler chain."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Optional, cast, get_type_hints

import click

from pyggml import limits
from pyggml.errors import SamplerError
from pyggml.llm.samplers.params import SamplingOptions, SamplingParams
from pyggml.small_file import read_text

from .command import Group, Option
from .options import usage

_PANEL = "Sampling (names and defaults as in llama.cpp)"
# field of SamplingParams: flags, help. Types and defaults are the field's, but for those in _TYPES.
_SAMPLING: dict[str, tuple[tuple[str, ...], str]] = {
    "seed": (("-s", "--seed"), "Seed of the sampler (default: random)."),
    "temp": (("--temp", "--temperature"), "Temperature; 0 takes the likeliest token."),
    "dynatemp_range": (("--dynatemp-range",), "Temperature by entropy, temp +- this; 0: off."),
    "dynatemp_exponent": (("--dynatemp-exp",), "... to this power."),
    "top_k": (("--top-k",), "Sample among the K likeliest; 0: all."),
    "top_p": (("--top-p",), "... that make up this much probability; 1: all."),
    "min_p": (("--min-p",), "... at least this likely relative to the likeliest; 0: all."),
    "typ_p": (("--typical", "--typical-p"), "Locally typical sampling; 1: off."),
    "top_n_sigma": (("--top-nsigma", "--top-n-sigma"), "Logits within N standard deviations of the largest; -1: off."),
    "xtc_probability": (("--xtc-probability",), "Exclude top choices this often; 0: off."),
    "xtc_threshold": (("--xtc-threshold",), "... among tokens at least this likely."),
    "repeat_last_n": (("--repeat-last-n",), "Tokens that are penalised; 0: none, -1: all."),
    "repeat_penalty": (("--repeat-penalty",), "Penalty for tokens that occurred; 1: off."),
    "frequency_penalty": (("--frequency-penalty",), "... for each occurrence; 0: off."),
    "presence_penalty": (("--presence-penalty",), "... for any occurrence; 0: off."),
    "penalize_nl": (("--penalize-nl/--no-penalize-nl",), "Penalise newlines, too."),
    "dry_multiplier": (("--dry-multiplier",), "DRY, a penalty for repeated passages; 0: off."),
    "dry_base": (("--dry-base",), "DRY: grows by this with each repeated token."),
    "dry_allowed_length": (("--dry-allowed-length",), "DRY: repeats shorter than this are free."),
    "dry_penalty_last_n": (("--dry-penalty-last-n",), "DRY: tokens looked back at; 0: none, -1: all."),
    "dry_sequence_breakers": (("--dry-sequence-breaker",), "DRY: a text that ends repeats (repeatable; 'none')."),
    "mirostat": (("--mirostat",), "Mirostat version 1 or 2 instead of the chain; 0: off."),
    "mirostat_tau": (("--mirostat-ent",), "Mirostat: surprise to aim at, in bits."),
    "mirostat_eta": (("--mirostat-lr",), "Mirostat: learning rate."),
    "logit_bias": (("-l", "--logit-bias"), "TOKEN_ID(+/-)BIAS, as in 15-1 or 29905-inf (repeatable)."),
    "ignore_eos": (("--ignore-eos",), "Go on where the model would end."),
    "grammar": (("--grammar",), "GBNF grammar that the text follows."),
    "json_schema": (("-j", "--json-schema"), "JSON schema that the text follows ({}: any JSON)."),
    "samplers": (("--samplers",), "Order of the samplers, joined by ';'."),
}
_BIAS = re.compile(r"\s*(\d+)\s*([+-]\S+)\s*")
_FILES = {"grammar": ("--grammar-file",), "json_schema": ("-jf", "--json-schema-file")}
_TYPES: dict[str, Any] = {
    "dry_sequence_breakers": Optional[list[str]],
    "logit_bias": Optional[list[str]],
    "json_schema": Optional[str],
    "samplers": str,
}


def _options() -> tuple[dict[str, Any], dict[str, Any]]:
    """One option for each field of SamplingParams, and their defaults."""
    kinds = get_type_hints(SamplingParams)
    hints: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for f in fields(SamplingParams):
        flags, text = _SAMPLING[f.name]
        kind = _TYPES.get(f.name, kinds[f.name])
        hints[f.name] = Annotated[kind, Option(*flags, help=text, panel=_PANEL)]
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
        SamplingParams(**sampling)  # before a model is loaded: are they in range?
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
