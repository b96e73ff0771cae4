"""What a sampler chain is built from. Names and defaults: llama.cpp's (common_params_sampling)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from math import inf, isnan
from numbers import Integral, Real
from typing import Any, TypedDict, cast

import numpy as np

from pyggml.errors import SamplerError

_HUGE = float(np.finfo(np.float32).max)  # samplers compute with f32
ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
_TOKEN = re.compile("[0-9]{1,10}")
NAMES = frozenset((*ORDER, "infill"))
_ALIASES = {"temp": "temperature", "typical": "typ_p", "typical_p": "typ_p", "nucleus": "top_p"}  # also with - for _
OTHER_NAMES = {  # of options, as OpenAI and llama-cpp-python call them: ours
    "temperature": "temp",
    "typical_p": "typ_p",
    "mirostat_mode": "mirostat",
    "max_tokens": "n_predict",
}


@dataclass(frozen=True)
class SamplingParams:
    """All parameters of a sampler chain. Raises SamplerError for values out of range.

    seed                 of the random numbers; None or negative: another each time
    temp                 logits are divided by it; 0: the likeliest token each time (greedy)
    dynatemp_range       > 0: the temperature is between temp - range and temp + range, by the entropy
    dynatemp_exponent    ... to this power
    top_k                the K likeliest; 0: all
    top_p                the fewest that reach this probability; 1: all
    min_p                those at least this likely relative to the likeliest; 0: all
    typ_p                locally typical sampling, the share to keep; 1: all
    top_n_sigma          those with logits within this many standard deviations of the largest; <= 0: all
    xtc_probability      how often all tokens above the threshold but the last are left out
    xtc_threshold        ... the probability a token must have to count; > 0.5: never
    repeat_last_n        how many tokens the penalties look back at; 0: none, -1: all
    repeat_penalty       divides positive logits of tokens seen, multiplies negative ones; 1: off
    frequency_penalty    subtracted for each occurrence
    presence_penalty     subtracted for a token that occurred
    penalize_nl          whether the newline token is penalised too
    dry_multiplier       DRY: the penalty is multiplier * base ** (length of the repeat - allowed_length); 0: off
    dry_base, dry_allowed_length
    dry_penalty_last_n   how many tokens DRY looks back at; 0: none, -1: all
    dry_sequence_breakers   texts over which a repeat does not go on
    mirostat             1 or 2: Mirostat instead of all samplers but penalties, dry and temperature; 0: off
    mirostat_tau         the surprise to aim at, in bits
    mirostat_eta         how fast it adapts
    logit_bias           token -> what is added to its logit (-inf, or False: never); a token may be text, "15", as in
                         JSON
    ignore_eos           never end generation
    grammar              GBNF (or llguidance's Lark) that the text must follow
    json_schema          JSON schema (as text or object) that the text must follow
    samplers             the order of the chain: of `NAMES` (or "temp"), a sequence or joined by ";"
    """

    seed: int | None = None
    temp: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typ_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalize_nl: bool = True
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    ignore_eos: bool = False
    grammar: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    samplers: str | Sequence[str] = ORDER

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            _check_type(f.name, str(f.type), value)
            if isinstance(value, np.generic):
                object.__setattr__(self, f.name, value.item())
        biases = {int(token): -inf if bias is False else bias for token, bias in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", biases)
        zero_to_one = ("top_p", "min_p", "typ_p", "xtc_probability", "xtc_threshold")
        for name in zero_to_one:
            self._check(name, 0 <= getattr(self, name) <= 1, "from 0 to 1")
        not_negative = ("temp", "dynatemp_range", "dynatemp_exponent", "top_k", "dry_multiplier")
        for name in (*not_negative, "mirostat_tau", "mirostat_eta"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        for name in ("repeat_last_n", "dry_penalty_last_n"):
            self._check(name, getattr(self, name) >= -1, "-1 or more")
        self._check("repeat_penalty", 1e-6 <= self.repeat_penalty <= 1e6, "from 1e-6 to 1e6")  # logits stay finite
        for name in ("frequency_penalty", "presence_penalty", "dry_multiplier"):
            self._check(name, abs(getattr(self, name)) <= 1e9, "from -1e9 to 1e9")
        self._check("dry_base", self.dry_base >= 1, "1 or more")
        self._check("dry_allowed_length", self.dry_allowed_length >= 1, "1 or more")
        self._check("mirostat", self.mirostat in (0, 1, 2), "0, 1 or 2")
        if self.grammar is not None and self.json_schema is not None:
            raise SamplerError("a grammar and a JSON schema cannot both be given")
        unknown = [name for name in self.order if name not in NAMES]
        if unknown:
            raise SamplerError(f"unknown sampler {unknown[0]!r}; known are: {', '.join(sorted(NAMES))}")

    @property
    def order(self) -> tuple[str, ...]:
        """`samplers` as a tuple, of the names in `NAMES`."""
        names = self.samplers.split(";") if isinstance(self.samplers, str) else self.samplers
        plain = [name.replace("-", "_") for name in names]
        return tuple([_ALIASES.get(name, name) for name in plain])

    def _check(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise SamplerError(f"{name} must be {rule}, not {getattr(self, name)}")


def our_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by our names. Raises TypeError for one that is given under two names."""
    ours = {OTHER_NAMES.get(name, name): value for name, value in options.items()}
    if len(ours) < len(options):
        twice = next(name for name in options if OTHER_NAMES.get(name) in options)
        raise TypeError(f"{twice} is another name of {OTHER_NAMES[twice]}: give one of the two")
    return ours


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of options by name. Raises TypeError for one that there is not."""
    known = {f.name for f in fields(SamplingParams)}
    for name in options:
        if name not in known:
            like = get_close_matches(str(name), known, 1)
            raise TypeError(f"there is no option {name!r:.60}" + (f" (is {like[0]!r} meant?)" if like else ""))
    return SamplingParams(**options)


def _check_type(name: str, kind: str, value: Any) -> None:
    """Raises SamplerError for a value of another type than its field `name`, annotated with `kind`."""
    rule = kind
    match name:
        case "logit_bias":
            fits, rule = _is_bias(value), "a mapping of tokens to numbers"
        case "dry_sequence_breakers" | "samplers":
            fits, rule = isinstance(value, Sequence) and all(isinstance(v, str) for v in cast(Any, value)), "strings"
        case "grammar":
            fits = value is None or isinstance(value, str)
        case "json_schema":
            fits = value is None or isinstance(value, (str, Mapping))
        case _:
            if kind == "float":
                number = value if isinstance(value, int) or not isinstance(value, Real) else float(cast(Any, value))
                fits, rule = isinstance(number, (int, float)) and -_HUGE < number < _HUGE, "a finite number"
            elif value is None:
                fits = "None" in kind
            elif isinstance(value, bool):
                fits = kind == "bool"
            else:
                fits = isinstance(value, Integral) and (name == "seed" or abs(int(value)) < 1 << 63)
                rule = "a whole number of 64 bits"
    if not fits:
        raise SamplerError(f"{name} must be {rule}, not {value!r:.60}")


def _is_bias(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(_is_token(i) and _is_number(x) for i, x in cast("Mapping[object, object]", value).items())


def _is_token(value: object) -> bool:
    return isinstance(value, Integral) or (isinstance(value, str) and _TOKEN.fullmatch(value) is not None)


def _is_number(value: object) -> bool:
    return value is False or (isinstance(value, Real) and value is not True and not isnan(cast(Any, value)))


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments, for type checkers and editors."""

    seed: int | None
    temp: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_k: int
    top_p: float
    min_p: float
    typ_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    repeat_last_n: int
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalize_nl: bool
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    logit_bias: Mapping[int, float]
    ignore_eos: bool
    grammar: str | None
    json_schema: str | Mapping[str, Any] | None
    samplers: str | Sequence[str]


class NamedOptions(SamplingOptions, total=False):
    """... and by the names of `OTHER_NAMES`."""

    temperature: float
    typical_p: float
    mirostat_mode: int
    max_tokens: int
