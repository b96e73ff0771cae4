"""Cutting special tokens out of a text, as llama.cpp does: token by token, the longest first, not left to right."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .tokens import utf8

if TYPE_CHECKING:
    from pyggml.native.vocab.trie import LongestFirst

_FEW = 16  # so many characters that tokens begin with are looked for, to be done where a text has none of them


class SpecialTokens:
    """Tokens that are found by their text before anything else is done to it."""

    def __init__(
        self, always: Iterable[tuple[str, int]], parsed: Iterable[tuple[str, int]], lstrip: set[int], rstrip: set[int]
    ) -> None:
        """`always` are found everywhere, `parsed` only where special tokens are to be read. Tokens of `lstrip` and
        `rstrip` swallow white space before or behind them."""
        tokens = [(-len(utf8(text)), text, token, True) for text, token in always]
        tokens += [(-len(utf8(text)), text, token, False) for text, token in parsed]
        tokens.sort(key=lambda t: t[0])
        self._lengths = [-n for n, _, _, _ in tokens]
        self._texts = [text for _, text, _, _ in tokens]
        self._ids = [token for _, _, token, _ in tokens]
        self._is_always = [is_always for _, _, _, is_always in tokens]
        self._firsts = {text[0] for text in self._texts}
        self._lstrip, self._rstrip = lstrip, rstrip

    def split(self, text: str, parse_special: bool) -> list[str | int]:
        """The text in parts, none empty: pieces of it, and ids of tokens."""
        if not text:
            return []
        if len(self._firsts) < _FEW and not any(first in text for first in self._firsts):
            return [text]
        cutter, hows = self._cutter
        data = utf8(text)
        parts = cutter.cut(data, hows[parse_special])
        if len(parts) == 1 and parts[0] == (0, len(data), -1):
            return [text]
        return [data[a:b].decode("utf-8", "surrogateescape") if i < 0 else self._ids[i] for a, b, i in parts]

    @cached_property
    def _cutter(self) -> tuple[LongestFirst, list[np.ndarray]]:
        """What finds the tokens, and what each does, without and with those that are parsed."""
        from pyggml.native.vocab.trie import LongestFirst

        strips = [
            LongestFirst.LSTRIP * (i in self._lstrip) + LongestFirst.RSTRIP * (i in self._rstrip) for i in self._ids
        ]
        every = np.array(strips, np.uint8) | LongestFirst.CUT
        return LongestFirst(self._texts, self._lengths), [every * np.array(self._is_always, np.uint8), every]
