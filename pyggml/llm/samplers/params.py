"""The options of a text, each declared once. Names and defaults are llama.cpp's (common_params_sampling).

A field of `SamplingParams`, or of `TextParams`, says everything about an option. The command line
(`tools/sampling.py`), the names that OpenAI and llama-cpp-python use, and the checks of values follow from it.
`SamplingOptions` and `TextOptions` repeat names and types for type checkers, which cannot read them from a dataclass; a
test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from inspect import Parameter
from math import inf, isnan
from numbers import Integral, Real
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

import numpy as np

from pyggml import limits
from pyggml.errors import BatchError, GGMLError, OptionError, SamplerError
from pyggml.signature import check_options

from .adaptive import AdaptiveP
from .base import Sampler
from .dry import Dry
from .infill import Infill
from .penalties import Penalties
from .temperature import Temperature
from .truncate import MinP, TopK, TopNSigma, TopP, Typical, Xtc

T = TypeVar("T")
P = TypeVar("P", bound="SamplingParams")
N_PREDICT = 128  # how many tokens follow a prompt by default
_HUGE = float(np.finfo(np.float32).max)  # samplers compute in f32
_TOKEN = re.compile("[0-9]{1,10}")
# The samplers in the order in which a chain has them when `samplers` does not say otherwise.
IN_ORDER: tuple[type[Sampler], ...] = (Penalties, Dry, TopNSigma, TopK, Typical, TopP, MinP, Xtc, Temperature)
# The names that `samplers` may have.
SAMPLERS: Mapping[str, type[Sampler]] = {s.name: s for s in (*IN_ORDER, Infill, AdaptiveP)}
_ALIASES = {"temp": "temperature", "typical": "typ_p", "typical_p": "typ_p", "nucleus": "top_p"}  # also with - for _


class Range(NamedTuple):
    """The numbers that an option may have, both ends included, and their description in errors."""

    least: float
    most: float
    text: str


_SHARE = Range(0, 1, "from 0 to 1")
_FROM_0, _FROM_1 = Range(0, inf, "0 or more"), Range(1, inf, "1 or more")
_LAST_N = Range(-1, inf, "-1 or more")
_FACTOR, _PENALTY = Range(1e-6, 1e6, "from 1e-6 to 1e6"), Range(-1e9, 1e9, "from -1e9 to 1e9")  # logits stay finite
_DECAY = Range(0, 0.99, "from 0 to 0.99")
_STRENGTH = Range(0, 1e9, "from 0 to 1e9")


class Option(NamedTuple):
    """The description of an option, besides its name, its type and its default.

    flags       its flags on the command line, as click takes them
    help        what it does: for the command line's help and for the docstring
    range       the numbers that it may have; None: all that its type allows
    other_name  what OpenAI or llama-cpp-python calls it
    looks_back  whether it switches on a sampler that depends on earlier tokens
    error       the error that a wrong value raises
    """

    flags: tuple[str, ...]
    help: str
    range: Range | None
    other_name: str | None
    looks_back: bool
    error: type[GGMLError]


def _option(
    default: T,
    flags: str,
    help: str,
    range: Range | None = None,
    other_name: str | None = None,
    *,
    looks_back: bool = False,
    error: type[GGMLError] = SamplerError,
) -> T:
    """A field of a dataclass that describes an option; see `Option`."""
    metadata = {"option": Option(tuple(flags.split()), help, range, other_name, looks_back, error)}
    if isinstance(default, dict):
        return cast(T, field(default_factory=dict[Any, Any], metadata=metadata))
    return cast(T, field(default=default, metadata=metadata))


@dataclass(frozen=True)
class SamplingParams:
    """All parameters of a sampler chain. Raises SamplerError for values of a wrong type or out of range.

    A `seed` that is None or negative stands for a random one. The tokens of `logit_bias` may be text, "15", as in JSON;
    False as a bias stands for -inf: the token is never chosen. `grammar` is GBNF or llguidance's Lark, `json_schema` a
    text or an object. `samplers` is a sequence of names, or one text with the names joined by ";".
    """

    seed: int | None = _option(None, "-s --seed", "Seed of the sampler (default: random).")
    temp: float = _option(
        0.8, "--temp --temperature", "Temperature; 0 takes the likeliest token.", _FROM_0, "temperature"
    )
    dynatemp_range: float = _option(0.0, "--dynatemp-range", "Temperature by entropy, temp +- this; 0: off.", _FROM_0)
    dynatemp_exponent: float = _option(1.0, "--dynatemp-exp", "... to this power.", _FROM_0)
    top_k: int = _option(40, "--top-k", "Sample among the K likeliest; 0 or less: all.")
    top_p: float = _option(0.95, "--top-p", "... that make up this much probability; 1: all.", _SHARE)
    min_p: float = _option(0.05, "--min-p", "... at least this likely relative to the likeliest; 0: all.", _SHARE)
    typ_p: float = _option(1.0, "--typical --typical-p", "Locally typical sampling; 1: off.", _SHARE, "typical_p")
    top_n_sigma: float = _option(
        -1.0, "--top-nsigma --top-n-sigma", "Logits within N standard deviations of the largest; -1: off."
    )
    min_keep: int = _option(
        0, "--min-keep", "top_p, min_p, typ_p and xtc leave this many tokens, if there are so many.", _FROM_0
    )
    xtc_probability: float = _option(0.0, "--xtc-probability", "Exclude top choices this often; 0: off.", _SHARE)
    xtc_threshold: float = _option(0.1, "--xtc-threshold", "... among tokens at least this likely.", _SHARE)
    repeat_last_n: int = _option(64, "--repeat-last-n", "Tokens that are penalised; 0: none, -1: all.", _LAST_N)
    repeat_penalty: float = _option(
        1.0, "--repeat-penalty", "Penalty for tokens that occurred; 1: off.", _FACTOR, looks_back=True
    )
    frequency_penalty: float = _option(
        0.0, "--frequency-penalty", "... for each occurrence; 0: off.", _PENALTY, looks_back=True
    )
    presence_penalty: float = _option(
        0.0, "--presence-penalty", "... for any occurrence; 0: off.", _PENALTY, looks_back=True
    )
    penalize_nl: bool = _option(True, "--penalize-nl/--no-penalize-nl", "Penalise newlines, too.")
    dry_multiplier: float = _option(
        0.0,
        "--dry-multiplier",
        "DRY, a penalty for repeated passages; 0: off.",
        Range(0, 1e9, "from 0 to 1e9"),
        looks_back=True,
    )
    dry_base: float = _option(1.75, "--dry-base", "DRY: grows by this with each repeated token.", _FROM_1)
    dry_allowed_length: int = _option(2, "--dry-allowed-length", "DRY: repeats shorter than this are free.", _FROM_1)
    dry_penalty_last_n: int = _option(
        64, "--dry-penalty-last-n", "DRY: tokens looked back at; 0: none, -1: all.", _LAST_N
    )
    dry_sequence_breakers: Sequence[str] = _option(
        ("\n", ":", '"', "*"), "--dry-sequence-breaker", "DRY: a text that ends repeats (repeatable; 'none')."
    )
    mirostat: int = _option(
        0,
        "--mirostat",
        "Mirostat version 1 or 2 instead of the chain; 0: off.",
        Range(0, 2, "0, 1 or 2"),
        "mirostat_mode",
        looks_back=True,
    )
    mirostat_tau: float = _option(5.0, "--mirostat-ent", "Mirostat: surprise to aim at, in bits.", _FROM_0)
    mirostat_eta: float = _option(0.1, "--mirostat-lr", "Mirostat: learning rate.", _FROM_0)
    adaptive_target: float = _option(
        -1.0,
        "--adaptive-target",
        "Adaptive-p: tokens near this probability, at the end of the chain; -1: off.",
        Range(-inf, 1, "1 or less"),
        looks_back=True,
    )
    adaptive_decay: float = _option(
        0.9, "--adaptive-decay", "Adaptive-p: what a chosen token counts less with each further one.", _DECAY
    )
    logit_bias: Mapping[int, float] = _option(
        {}, "-l --logit-bias", "TOKEN_ID(+/-)BIAS, as in 15-1 or 29905-inf (repeatable)."
    )
    ignore_eos: bool = _option(False, "--ignore-eos", "Go on where the model would end.")
    grammar: str | None = _option(None, "--grammar", "GBNF grammar that the text follows.", looks_back=True)
    json_schema: str | Mapping[str, Any] | None = _option(
        None, "-j --json-schema", "JSON schema that the text follows ({}: any JSON).", looks_back=True
    )
    samplers: str | Sequence[str] = _option(
        tuple(s.name for s in IN_ORDER), "--samplers", "Order of the samplers, joined by ';'."
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            name, option, value = f.name, OPTIONS[f.name], getattr(self, f.name)
            fits, rule = _KINDS[str(f.type)]
            if not fits(value):
                raise option.error(f"{name} must be {rule}, not {value!r:.60}")
            if option.range is not None and not option.range.least <= value <= option.range.most:
                raise option.error(f"{name} must be {option.range.text}, not {value}")
            if isinstance(value, np.generic):
                object.__setattr__(self, name, cast(Any, value).item())
        biases = {int(token): -inf if bias is False else _float(bias) for token, bias in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", biases)
        if self.grammar is not None and self.json_schema is not None:
            raise SamplerError("a grammar and a JSON schema cannot both be given")
        if len(self.order) > limits.SAMPLERS:
            raise SamplerError(f"samplers: {len(self.order)}, at most {limits.SAMPLERS} (pyggml.limits.SAMPLERS)")
        if (n := len(self.dry_sequence_breakers)) > limits.BREAKERS:
            raise SamplerError(f"dry_sequence_breakers: {n}, at most {limits.BREAKERS} (pyggml.limits.BREAKERS)")
        unknown = [name for name in self.order if name not in SAMPLERS]
        if unknown:
            raise SamplerError(f"unknown sampler {unknown[0]!r}; known are: {', '.join(sorted(SAMPLERS))}")

    @property
    def order(self) -> tuple[str, ...]:
        """`samplers` as a tuple of names in `SAMPLERS`."""
        names = self.samplers.split(";") if isinstance(self.samplers, str) else self.samplers
        plain = [name.replace("-", "_") for name in names]
        return tuple([_ALIASES.get(name, name) for name in plain])

    def without_memory(self) -> SamplingParams:
        """The same parameters without the samplers that look at earlier tokens, so that taking back a token needs no
        change in the chain."""
        return replace(self, **{f.name: f.default for f in fields(self) if OPTIONS[f.name].looks_back})


@dataclass(frozen=True)
class TextParams(SamplingParams):
    """All options of one text: how its tokens are chosen, and where it ends."""

    n_predict: int = _option(
        N_PREDICT, "-n --n-predict --predict", "Tokens; negative: no limit.", None, "max_tokens", error=BatchError
    )
    stop: str | Sequence[str] = _option((), "-r --stop --reverse-prompt", "End before this text (repeatable).")
    lookup: bool = _option(
        True, "--lookup/--no-lookup", "Guess that the text repeats itself, where that is faster; it stays the same."
    )

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


OPTIONS: Mapping[str, Option] = {f.name: f.metadata["option"] for f in fields(TextParams)}
# The names of options in OpenAI's API and llama-cpp-python -> our names.
OTHER_NAMES = {o.other_name: name for name, o in OPTIONS.items() if o.other_name}
SamplingParams.__doc__ = f"{SamplingParams.__doc__}\n" + "\n".join(
    f"    {f.name:21}  {OPTIONS[f.name].help}" for f in fields(SamplingParams)
)


def our_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with our names in the place of other names. Raises OptionError when an option is given under two
    names."""
    ours = {OTHER_NAMES.get(name, name): value for name, value in options.items()}
    if len(ours) < len(options):
        twice = next(name for name in options if OTHER_NAMES.get(name) in options)
        raise OptionError(f"{twice} is another name of {OTHER_NAMES[twice]}: give one of the two")
    return ours


def text_params(n_predict: int, options: Mapping[str, Any]) -> TextParams:
    """Make the parameters of a text from options, which may have our names or others'. `max_tokens` among the options
    replaces `n_predict` when that is the default. Raises OptionError for an unknown option, and for one that is given
    under two names."""
    ours = our_names(options)
    if "n_predict" not in ours:
        ours["n_predict"] = n_predict
    elif n_predict != N_PREDICT:
        raise OptionError("max_tokens is another name of n_predict: give one of the two")
    return with_options(TextParams(), ours)


def with_options(params: P, options: Mapping[str, Any]) -> P:
    """The same parameters with these options changed, which have our names. Raises OptionError for an unknown
    option."""
    check_options("a text", options, [f.name for f in fields(params)])
    return replace(params, **options)


def _float(value: Any) -> float:
    """The number as a float; infinity when it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return inf if value > 0 else -inf


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and -_HUGE < _float(value) < _HUGE


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # pyright: ignore[reportUnnecessaryIsInstance]


def _is_int(value: Any) -> bool:
    return _is_whole(value) and abs(int(value)) < 1 << 63


def _are_texts(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(v, str) for v in cast("Sequence[object]", value))


def _is_bias(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    given = cast("Mapping[object, Any]", value)
    tokens = all(isinstance(t, Integral) or (isinstance(t, str) and _TOKEN.fullmatch(t)) for t in given)
    return tokens and all(
        x is False or (isinstance(x, Real) and x is not True and not isnan(_float(x))) for x in given.values()
    )


# The type of a field, as it is written -> a test whether a value has that type, and the type's name in errors.
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "float": (_is_number, "a finite number"),
    "int": (_is_int, "a whole number of 64 bits"),
    "int | None": (lambda value: value is None or _is_whole(value), "a whole number, or None"),  # a seed, of any size
    "bool": (lambda value: isinstance(value, bool) or _is_int(value), "True or False"),
    "Sequence[str]": (_are_texts, "strings"),
    "str | Sequence[str]": (_are_texts, "a string, or a list of them"),
    "Mapping[int, float]": (_is_bias, "a mapping of tokens to numbers"),
    "str | None": (lambda value: value is None or isinstance(value, str), "str | None"),
    "str | Mapping[str, Any] | None": (
        lambda value: value is None or isinstance(value, (str, Mapping)),
        "str | Mapping[str, Any] | None",
    ),
}


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
    min_keep: int
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
    adaptive_target: float
    adaptive_decay: float
    logit_bias: Mapping[int, float]
    ignore_eos: bool
    grammar: str | None
    json_schema: str | Mapping[str, Any] | None
    samplers: str | Sequence[str]


class TextOptions(SamplingOptions, total=False):
    """The fields of `TextParams` and their other names, `OTHER_NAMES`. (`n_predict` is an argument of its own.)"""

    stop: str | Sequence[str]
    lookup: bool
    temperature: float
    typical_p: float
    mirostat_mode: int
    max_tokens: int


def _keywords() -> tuple[Parameter, ...]:
    default, kinds = TextParams(), TextOptions.__annotations__  # with those of SamplingOptions
    values = {name: getattr(default, OTHER_NAMES.get(name, name)) for name in kinds}
    kind = Parameter.KEYWORD_ONLY
    return tuple(
        [Parameter(name, kind, default=values[name], annotation=hint.__forward_arg__) for name, hint in kinds.items()]
    )


TEXT_KEYWORDS = _keywords()  # the keyword arguments of `TextOptions`, with their defaults
