"""Find the pre-tokenizer (`tokenizer.ggml.pre`) of a tokenizer.json by the regular expressions that it cuts text with.

The same expression is spelled in several ways (possessive or not, escapes or characters), so all spellings are turned
into one first. The names, and the expressions behind them, are those of llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pyggml.errors import ModelError
from pyggml.llm.vocab.kinds.pre import PRE, find_pre
from pyggml.llm.vocab.kinds.split import Rule, ascii_thousands, thousands

from .parts import Part

_KEY = "pre_tokenizer"

_IN_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = rf"{_OTHER}[\r\n]*|{_LINES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_WORD = rf"{_ASCII}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
_CJK = "[一-龥぀-ゟ゠-ヿ]+"


def _cased(tail: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return rf"{start}{_UPPER}*{_LOWER}+{tail}|{start}{_UPPER}+{_LOWER}*{tail}"


_GPT2, _DIGIT, _PUNCTUATION = "(bytes)", r"\p{N}", "(punctuation)"  # stand for steps of the tokenizers library
_LLAMA3 = (rf"{_IN_WORD}|{_LETTERS}|\p{{N}}{{1,3}}|{_TAIL}",)
_NAMES: Mapping[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2",
    (_DIGIT, _GPT2): "starcoder",
    (_PUNCTUATION, _GPT2, "[0-9][0-9][0-9]"): "falcon",
    (_PUNCTUATION, _GPT2, _DIGIT, "[0-9][0-9][0-9]"): "default",
    _LLAMA3: "llama-bpe",
    (rf"{_IN_WORD}|{_LETTERS}|\p{{N}}|{_TAIL}",): "qwen2",
    (
        rf"{_IN_WORD}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}",
    ): "qwen35",
    (rf"{_cased('')}|\p{{N}}|{_OTHER}[\r\n/]*|{_LINES}",): "tekken",
    (rf"{_cased(f'{_IN_WORD}?')}|\p{{N}}{{1,3}}|{_OTHER}[\r\n/]*|{_LINES}",): "gpt-4o",
    (r"\p{N}{1,3}", _CJK, _WORD): "deepseek-v3",
    (r"\p{N}{1,3}", rf"{_IN_WORD}|{_LETTERS}|\p{{N}}+|{_TAIL}"): "minicpm5",
    (" ?[^(\\s|[.,!?…。，、।۔،])]+",): "bloom",
    (" ?[^(\\s|[.,!?…。，、।۔،])]+", _DIGIT): "viking",
    (rf"{_IN_WORD}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",): "seed-coder",
    (rf"{_IN_WORD}|{_LETTERS}|\p{{N}}|{_OTHER}[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",): "bailingmoe",
    (rf"{_LETTERS}|\p{{N}}|{_TAIL}",): "ufakzeka",
    (
        rf"{_IN_WORD}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_OTHER}[\r\n/]?|"
        r"\s*[\r\n]|\s+(?!\S)|\s+",
    ): "exaone-moe",
    (
        rf"{_IN_WORD}|{_LETTERS}|\p{{N}}{{1,3}}|{_OTHER}[\r\n]*|\s*[\r\n]+|"
        + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
        + r"|\s{1}",
    ): "jais-2",
    ("[\\r\\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT, _GPT2): "deepseek-coder",
}
_STARTS = {("[\\r\\n]", r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-Ί"): "deepseek-llm"}  # the rest is as long again
_SPELLINGS = (  # other spellings -> the spelling above
    ("\r", r"\r"),
    ("\n", r"\n"),
    ("'(?i:[sdmt]|ll|ve|re)", _IN_WORD),
    (r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", _IN_WORD),
    (r"\p{N}{1}", r"\p{N}"),
    ("?+", "?"),
    ("*+", "*"),
    ("++", "+"),
)

_ESCAPED = re.compile(r"\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
# How numbers are cut when no pattern of the name does it. Groups of three digits are counted from a number's end.
_GROUPS, _ASCII_GROUP = r"(?=(?:\p{N}{3})*+(?!\p{N}))", r"[0-9]{3}(?=(?:[0-9]{3})*+(?![0-9]))"
_BY_NUMBER: Mapping[Rule, str] = {
    thousands: rf"\P{{N}}*+\p{{N}}{{1,3}}{_GROUPS}",
    ascii_thousands: rf"{_ASCII_GROUP}(?:(?!{_ASCII_GROUP})[\s\S])*+",
}


def name_of(tokenizer: Part) -> str | None:
    """The name of the pre-tokenizer that cuts text as a tokenizer.json does; None when there is no such name. When
    several names have the same steps (see `steps_of`), it is one of the names listed above. It is also a name whose
    tokens lose the space before punctuation, when the decoder of the tokenizer.json drops that space."""
    steps = tuple(_steps(tokenizer))
    ignore_merges = tokenizer.part("model").flag("ignore_merges")
    alike = [name for name in _written().get(steps, ()) if PRE[name].ignore_merges == ignore_merges]
    if alike:
        clean_spaces = any(step.text("type") == "Replace" for step in tokenizer.steps("decoder", "decoders"))
        return min(alike, key=lambda name: (PRE[name].clean_spaces != clean_spaces, name not in _NAMES.values()))
    name = _NAMES.get(steps)
    if name is None:
        starts = (n for (first, second), n in _STARTS.items() if steps[:1] == (first,) and steps[1].startswith(second))
        name = next(starts, None) if len(steps) > 1 else None
    if steps == _LLAMA3 and not ignore_merges:
        return "smaug-bpe"  # the same, except that it may cut a word that is a token
    return name


def steps_of(name: str) -> tuple[dict[str, Any], bool]:
    """The `pre_tokenizer` step of a tokenizer.json that cuts text as the pre-tokenizer `name` does, and whether words
    that are tokens ignore merges. Raises ModelError for an unknown name, and for one whose tokens do not spell
    bytes."""
    pre = find_pre(name)
    if not pre.byte_level:
        raise ModelError(f"the pre-tokenizer {name!r} has tokens of characters: no tokenizer.json of them is written")
    patterns = [_oniguruma(_BY_NUMBER[rule] if callable(rule) else rule) for rule in pre.rules]
    parts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    parts.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    return {"type": "Sequence", "pretokenizers": parts}, pre.ignore_merges


def _oniguruma(pattern: str) -> str:
    """A pattern of the package `regex` as the tokenizers library reads it."""
    pattern = _ESCAPED.sub(lambda found: chr(int(found[1] or found[2], 16)), pattern)
    return pattern.replace("--[", "&&[^").replace(r"\Z", r"\z")


@cache
def _written() -> dict[tuple[str, ...], list[str]]:
    """The pre-tokenizers' names, by the steps that `steps_of` writes for them."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, pre in PRE.items():
        if pre.byte_level:
            found.setdefault(tuple(_steps(Part({_KEY: steps_of(name)[0]}, name))), []).append(name)
    return found


def expressions_of(tokenizer: Part) -> list[str]:
    """The expressions that a tokenizer.json cuts text with, for an error."""
    return list(_steps(tokenizer))


def _steps(tokenizer: Part) -> Iterator[str]:
    for step in tokenizer.steps(_KEY, "pretokenizers"):
        kind = step.text("type")
        if kind == "ByteLevel":
            if step.flag("use_regex", True):
                yield _GPT2
        elif kind == "Digits":
            yield _DIGIT if step.flag("individual_digits") else r"\p{N}+"
        elif kind == "Punctuation":
            yield _PUNCTUATION
        elif kind == "Split":
            pattern = step.part("pattern")
            text = pattern.text("Regex") or re.escape(pattern.text("String") or "")
            for spelling, canonical in _SPELLINGS:
                text = text.replace(spelling, canonical)
            yield text
        elif kind is not None:
            yield f"({kind})"
