"""Cutting special tokens out of a text, as llama.cpp does: token by token, the longest first, not left to right."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby

from .tokens import utf8

_ASCII_SPACE = " \t\n\v\f\r"
_FEW = 64  # so many texts that begin alike are each looked for; of more, those that occur are found by their lengths


class SpecialTokens:
    """Tokens that are found by their text before anything else is done to it."""

    def __init__(
        self, always: Iterable[tuple[str, int]], parsed: Iterable[tuple[str, int]], lstrip: set[int], rstrip: set[int]
    ) -> None:
        """`always` are found everywhere, `parsed` only where special tokens are to be read. Tokens of `lstrip` and
        `rstrip` swallow white space before or behind them."""
        always = list(always)
        self._always = _Finder(always)
        self._all = _Finder([*always, *parsed])
        self._lstrip, self._rstrip = lstrip, rstrip

    def split(self, text: str, parse_special: bool) -> list[str | int]:
        """The text in parts, none empty: pieces of it, and ids of tokens."""
        parts: list[str | int] = [text] if text else []
        for needle, token in (self._all if parse_special else self._always).find(text):
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int) or needle not in part:
                    cut.append(part)
                else:
                    cut += self._cut(part.split(needle), token)
            parts = cut
        return parts

    def _cut(self, pieces: list[str], token: int) -> list[str | int]:
        cut: list[str | int] = []
        for i, piece in enumerate(pieces):
            if i:
                cut.append(token)
                piece = piece.lstrip(_ASCII_SPACE) if token in self._rstrip else piece
            if i + 1 < len(pieces) and token in self._lstrip:
                piece = piece.rstrip(_ASCII_SPACE)
            if piece:
                cut.append(piece)
        return cut


class _Finder:
    """Which of many texts occur in another."""

    def __init__(self, tokens: Collection[tuple[str, int]]) -> None:
        by_length = sorted(tokens, key=lambda t: -len(utf8(t[0])))  # in bytes
        self._order = {text: (i, token) for i, (text, token) in enumerate(by_length)}
        groups = groupby(sorted(self._order), key=lambda text: text[0])
        self._groups = {first: list(texts) for first, texts in groups}

    def find(self, text: str) -> list[tuple[str, int]]:
        """Those that occur, with their tokens, the longest first."""
        found: list[tuple[int, int, str]] = []
        for first, needles in self._groups.items():
            if first in text:
                found += [(*self._order[needle], needle) for needle in _occurring(text, first, needles)]
        return [(needle, token) for _, token, needle in sorted(found)]


def _occurring(text: str, first: str, needles: list[str]) -> Iterable[str]:
    if len(needles) <= _FEW:
        return [needle for needle in needles if needle in text]
    known, found = set(needles), set[str]()
    lengths = sorted({len(needle) for needle in needles})
    at = text.find(first)
    while at >= 0:
        found.update(known.intersection([text[at : at + n] for n in lengths]))
        at = text.find(first, at + 1)
    return found
