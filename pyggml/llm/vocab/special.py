"""Cut special tokens out of a text as llama.cpp does: token by token, the longest first, not left to right."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .tokens import utf8

if TYPE_CHECKING:
    from pyggml.native.vocab.trie import LongestFirst

SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_FEW = 16  # if tokens begin with at most this many characters, a text without any of them is done at once


class SpecialTokens:
    """Tokens that are found by their text before anything else is done to it."""

    def __init__(
        self,
        always: Iterable[tuple[str, int]],
        parsed: Iterable[tuple[str, int]],
        lstrip: set[int],
        rstrip: set[int],
        spaces: str = "",
    ) -> None:
        """`always`: tokens that are always found; `parsed`: tokens that are found with `parse_special`. Tokens in
        `lstrip` and `rstrip` swallow the white space before or after them: ASCII's, as in llama.cpp, and `spaces`."""
        tokens = [(-len(utf8(text)), text, token, True) for text, token in always]
        tokens += [(-len(utf8(text)), text, token, False) for text, token in parsed]
        tokens.sort(key=lambda t: t[0])
        self._lengths = [-n for n, _, _, _ in tokens]
        self._texts = [text for _, text, _, _ in tokens]
        self._ids = [token for _, _, token, _ in tokens]
        self._is_always = [is_always for _, _, _, is_always in tokens]
        self._firsts = {text[0] for text in self._texts}
        self._lstrip, self._rstrip, self._spaces = lstrip, rstrip, spaces

    def split(self, text: str, parse_special: bool) -> list[str | int]:
        """The text in parts: non-empty pieces of text, and ids of tokens."""
        if not text:
            return []
        if len(self._firsts) < _FEW and not any(first in text for first in self._firsts):
            return [text]
        cutter, hows = self._cutter
        data = utf8(text)
        parts = cutter.cut(data, hows[parse_special])
        if len(parts) == 1 and parts[0] == (0, len(data), -1):
            return [text]
        found = [data[a:b].decode("utf-8", "surrogateescape") if i < 0 else self._ids[i] for a, b, i in parts]
        return self._stripped(found) if self._spaces else found

    def _stripped(self, parts: list[str | int]) -> list[str | int]:
        """The parts without the spaces that tokens swallow beside ASCII's."""
        found: list[str | int] = []
        for before, part, after in zip([-1, *parts], parts, [*parts[1:], -1], strict=False):
            if isinstance(part, str) and before in self._rstrip:
                part = part.lstrip(self._spaces)
            if isinstance(part, str) and after in self._lstrip:
                part = part.rstrip(self._spaces)
            if part != "":
                found.append(part)
        return found

    @cached_property
    def _cutter(self) -> tuple[LongestFirst, list[np.ndarray]]:
        """The search for tokens, and what each token does; without and with the `parsed` tokens."""
        from pyggml.native.vocab.trie import LongestFirst

        strips = [
            LongestFirst.LSTRIP * (i in self._lstrip) + LongestFirst.RSTRIP * (i in self._rstrip) for i in self._ids
        ]
        every = np.array(strips, np.uint8) | LongestFirst.CUT
        return LongestFirst(self._texts, self._lengths), [every * np.array(self._is_always, np.uint8), every]
