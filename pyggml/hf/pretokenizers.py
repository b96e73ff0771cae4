"""Which pre-tokenizer (`tokenizer.ggml.pre`) a tokenizer.json has: found by the regular expressions it cuts text with.

The same expression is spelled in several ways (possessive or not, escapes or characters), so spellings are made one
first. Names and expressions: llama.cpp's src/llama-vocab.cpp quotes them of the models they are named after.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pyggml.errors import ModelError

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


_GPT2, _DIGIT, _PUNCTUATION = "(bytes)", r"\p{N}", "(punctuation)"  # what tokenizers has steps for
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
_SPELLINGS = (  # as it may be spelled -> as above
    ("\r", r"\r"),
    ("\n", r"\n"),
    ("'(?i:[sdmt]|ll|ve|re)", _IN_WORD),
    (r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", _IN_WORD),
    (r"\p{N}{1}", r"\p{N}"),
    ("?+", "?"),
    ("*+", "*"),
    ("++", "+"),
)


def name_of(tokenizer: Mapping[str, Any]) -> str | None:
    """The name of the pre-tokenizer of a tokenizer.json; None where none cuts text so."""
    steps = tuple(_steps(tokenizer.get("pre_tokenizer") or {}))
    name = _NAMES.get(steps)
    if name is None:
        starts = (n for (first, second), n in _STARTS.items() if steps[:1] == (first,) and steps[1].startswith(second))
        name = next(starts, None) if len(steps) > 1 else None
    if steps == _LLAMA3 and not tokenizer["model"].get("ignore_merges"):
        return "smaug-bpe"  # which is the same, but that a word which is a token may be cut
    return name


def steps_of(name: str) -> tuple[dict[str, Any], bool]:
    """The `pre_tokenizer` of a tokenizer.json that has this name, and whether it ignores merges. Raises ModelError for
    a name of which the expressions are not known."""
    steps = next((steps for steps, known in _NAMES.items() if known == name), _LLAMA3 if name == "smaug-bpe" else None)
    if steps is None:
        raise ModelError(f"how the pre-tokenizer {name!r} cuts text is not known here")
    parts: list[dict[str, Any]] = []
    for step in steps:
        if step == _GPT2:
            parts.append({"type": "ByteLevel", "add_prefix_space": False, "use_regex": True})
        elif step == _PUNCTUATION:
            parts.append({"type": "Punctuation", "behavior": "Contiguous"})
        else:
            parts.append({"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False})
    if _GPT2 not in steps:
        parts.append({"type": "ByteLevel", "add_prefix_space": False, "use_regex": False})
    return {"type": "Sequence", "pretokenizers": parts}, name == "llama-bpe"


def expressions_of(tokenizer: Mapping[str, Any]) -> list[str]:
    """What a tokenizer.json cuts text with, for an error."""
    return list(_steps(tokenizer.get("pre_tokenizer") or {}))


def _steps(pre: Mapping[str, Any]) -> Iterator[str]:
    kind = pre.get("type")
    if kind == "Sequence":
        for part in pre["pretokenizers"]:
            yield from _steps(part)
    elif kind == "ByteLevel":
        if pre.get("use_regex", True):
            yield _GPT2
    elif kind == "Digits":
        yield _DIGIT if pre.get("individual_digits") else r"\p{N}+"
    elif kind == "Punctuation":
        yield _PUNCTUATION
    elif kind == "Split":
        pattern = pre["pattern"]
        text = str(pattern.get("Regex") or re.escape(pattern.get("String", "")))
        for spelling, canonical in _SPELLINGS:
            text = text.replace(spelling, canonical)
        yield text
    elif kind is not None:
        yield f"({kind})"
