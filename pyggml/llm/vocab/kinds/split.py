"""Cut texts into the words that byte-pair merging stays within. Each rule cuts the pieces that the rule before it left.

Rules are patterns of the package `regex`, whose character classes are Unicode's. A pattern must not go back over a text
again and again: a run of one character must take time in proportion to its length (tests/llm/vocab/test_kinds.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain, pairwise

from .unicode import NEWER
from .words import words_of

Rule = str | Callable[[str], list[str]]
_DIGITS = re.compile("[0-9]+")
_CLASS = re.compile(r"\[(?:[^][\\]|\\.|\[(?:[^][\\]|\\.)*\])*\]|\\p\{\w+\}|\\[sS]")


class Splitter:
    """Splits texts by rules."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = [_matches(rule) if isinstance(rule, str) else rule for rule in rules]

    def words(self, text: str) -> list[str]:
        """The words of a text, in order; together they are the text."""
        newer = _newer()
        known = text
        if not text.isascii() and newer.search("".join(set(text))):
            known = newer.sub("\u0378", text)  # an unassigned character, which no rule treats specially
        words = [known]
        for rule in self._rules:  # a rule cuts a word in the same way wherever it stands
            parts = {word: rule(word) for word in set(words)}
            words = list(chain.from_iterable(map(parts.__getitem__, words)))
        if known is not text:
            ends = [0]
            for word in words:
                ends.append(ends[-1] + len(word))
            return [text[a:b] for a, b in pairwise(ends)]
        return words


def thousands(text: str) -> list[str]:
    """Cut numbers into groups of three digits from the right; digits left over stay with the text before the number."""
    cuts: list[int] = []
    for number in _numbers().finditer(text):
        a, b = number.span()
        cuts += [*range(a + ((b - a) % 3 or 3), b, 3), b]
    return _cut(text, cuts)


def ascii_thousands(text: str) -> list[str]:
    """As `thousands`, for 0-9 only. A number of whole groups stays with the text after it, not with that before."""
    cuts: list[int] = []
    for number in _DIGITS.finditer(text):
        a, b = number.span()
        cuts += range(a + (b - a) % 3, b, 3)
    return _cut(text, cuts)


def _cut(text: str, cuts: list[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)]) if a < b]


@cache
def _matches(pattern: str) -> Callable[[str], list[str]]:
    """Cut a text into the matches of a pattern and the parts between them."""
    import regex

    matches: re.Pattern[str] = regex.compile(pattern, regex.VERSION1)  # pyright: ignore[reportAssignmentType]
    split = regex.compile(f"({pattern})", regex.VERSION1).splititer
    matches_ascii = _ascii(pattern)

    def parts(text: str) -> list[str]:
        found = words_of(matches_ascii if text.isascii() else matches, text)
        if not found:
            return [text] if text else []
        if sum(map(len, found)) == len(text):  # there is nothing between the matches
            return found
        return [part for part in split(text) if part]

    return parts


def _ascii(pattern: str) -> re.Pattern[str]:
    """The pattern for ASCII text. `re` finds its matches twice as fast; it lacks the classes of `regex`."""
    import regex

    def members(cls: re.Match[str]) -> str:
        of = regex.compile(cls[0], regex.VERSION1)
        chars = [re.escape(c) for c in map(chr, range(128)) if of.match(c)]
        return f"[{''.join(chars)}]" if chars else "[^\\0-\\x7f]"

    try:
        return re.compile(_CLASS.sub(members, pattern))
    except re.error:  # Python 3.10 has no possessive quantifiers
        return regex.compile(pattern, regex.VERSION1)  # pyright: ignore[reportReturnType]


@cache
def _newer() -> re.Pattern[str]:
    return re.compile(f"[{''.join(NEWER)}]")


@cache
def _numbers() -> re.Pattern[str]:
    import regex

    return regex.compile(r"\p{N}+")  # pyright: ignore[reportReturnType]
