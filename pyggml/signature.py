"""Functions that hand keyword arguments on: their signatures show what the function behind them takes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from inspect import Parameter, signature
from math import inf
from typing import Any, TypeVar, cast

from .errors import OptionError, nearest

_MEANT = {  # names of torch, transformers and mlx-lm
    "dim": "axis",
    "dims": "axis",
    "keepdim": "keepdims",
    "max_new_tokens": "n_predict",
    "stop_strings": "stop",
    "repetition_context_size": "repeat_last_n",
    "repetition_penalty": "repeat_penalty",
}
_INSTEAD = {  # the same, of what is no option here
    "do_sample": "temp=0.0 takes the likeliest token, any other temp samples",
    **dict.fromkeys(
        ("num_beams", "num_return_sequences"), "there is no beam search; n= of create_completion samples several"
    ),
    "streamer": "iterate over the result",
    **dict.fromkeys(("eos_token_id", "pad_token_id"), "the file has these tokens; stop= ends a text at a string"),
    **dict.fromkeys(("attention_mask", "return_dict_in_generate", "use_cache"), "leave it out"),
}

F = TypeVar("F", bound=Callable[..., Any])


def keywords_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The arguments of a function that are given by keyword alone, with their defaults."""
    return tuple([p for p in signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY])


def hands_on(*keywords: Parameter) -> Callable[[F], F]:
    """Decorate a function that takes `**options` and hands them on: its signature, and so `help()` and editors, shows
    `keywords` instead. An option that is not among them raises OptionError."""

    def decorated(function: F) -> F:
        own = signature(function)
        names = {name: p for name, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
        by_place = [p.name for p in names.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        most = inf if any(p.kind is p.VAR_POSITIONAL for p in names.values()) else len(by_place)
        names |= {p.name: p for p in keywords if p.name not in names}

        @wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            if len(args) > most:
                placed, named = (
                    by_place[by_place[0] == "self" :],
                    [f"{name}=" for name in names if name not in by_place],
                )
                text = f"{function.__name__} takes {', '.join(placed)} by place, and the others by name"
                raise OptionError(f"{text}: {', '.join(named[:4])} ..")
            if not options.keys() <= names.keys():
                check_options(function.__name__, options, names)
            return function(*args, **options)

        vars(checked)["__signature__"] = own.replace(parameters=[*names.values()])
        return cast(F, checked)

    return decorated


def check_options(what: str, options: Collection[str], known: Collection[str]) -> None:
    """Raises OptionError for the first option that is not `known`, with the known one that is spelt most like it."""
    for name in options:
        if name not in known:
            like = [_MEANT[name]] if _MEANT.get(name) in known else nearest(str(name), known, 1)
            said = f" (is {like[0]!r} meant?)" if like else f"; it has {', '.join(k for k in known if k != 'self')}"
            if "temp" in known and name in _INSTEAD:
                said = f": {_INSTEAD[name]}"
            raise OptionError(f"{what} has no option {str(name)!r:.60}{said}")
