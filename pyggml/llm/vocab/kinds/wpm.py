"""`tokenizer.ggml.model = bert` (WPM): words are cut into the longest tokens from the left.

HF tokenizers has it too, but brings eleven more packages and differs in two ways (it keeps more than one character of a
decomposition, and bounds the length of words), which would have to be mended around it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tokens import SPACE, Tokens, utf8
from .unicode import NEWER
from .words import WordCache, by_word

if TYPE_CHECKING:
    import re

    from pyggml.native.vocab.trie import Trie

    Ints = np.ndarray[Any, np.dtype[np.int32]]
    Codes = np.ndarray[Any, np.dtype[np.uint32]]

_N_CHARS, _BLOCK, _NEWLINE = 0x110000, 256, 10
_CHINESE = (
    r"\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f\U0002b920-\U0002ceaf"
    r"\uf900-\ufaff\U0002f800-\U0002fa1f"
)
_CONTROL = "\x1c\x1d\x1e\x1f"  # dropped; Python's split() would take them for white space


class WPM:
    """Ids of texts by the longest match."""

    def __init__(self, tokens: Tokens, unk: int | None, lowercase: bool, strip_accents: bool) -> None:
        self._tokens, self._unk = tokens, unk
        self._lowercase, self._strip_accents = lowercase, strip_accents
        self._normal: Ints = np.zeros(_N_CHARS, np.int32)  # the code point that each character becomes
        self._blocks = np.zeros(_N_CHARS // _BLOCK, np.bool_)  # blocks of `_normal` that are filled in
        self._cache = WordCache(self._encode_words)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. A word that tokens do not cover becomes one unknown token."""
        if any(c in text for c in _CONTROL):
            text = text.translate(dict.fromkeys(map(ord, _CONTROL)))
        return self._cache.ids(text.split())

    def piece(self, token: int) -> bytes:
        """The bytes of a normal token."""
        return utf8(self._tokens.texts[token].replace(SPACE, " "))

    @cached_property
    def _trie(self) -> Trie:
        from pyggml.native.vocab.trie import Trie

        return Trie(self._tokens.texts)

    def _encode_words(self, words: list[str]) -> list[bytes]:
        text = "\n".join([*words, ""]).encode("utf-32-le", "surrogatepass")
        codes = self._normalize(np.frombuffer(text, np.uint32))
        return by_word(*self._trie.longest_match(codes, len(words), utf8(SPACE), self._unk))

    def _normalize(self, codes: Codes) -> Ints:
        """The code points that characters become: 0 for a dropped character, negative for one that is a word alone."""
        blocks = np.flatnonzero(np.bincount(codes // _BLOCK))
        for block in blocks[~self._blocks[blocks]].tolist():
            first = block * _BLOCK
            self._normal[first : first + _BLOCK] = self._normalize_block(range(first, first + _BLOCK))
            self._blocks[block] = True
        self._normal[_NEWLINE] = _NEWLINE  # ends a word
        return self._normal[codes]

    def _normalize_block(self, codes: Iterable[int]) -> list[int]:
        drop, single = self._classes
        chars = [unicodedata.normalize("NFD", chr(c))[0] if self._strip_accents else chr(c) for c in codes]
        dropped, singles = set(drop.findall("".join(chars))), set(single.findall("".join(chars)))
        shown = [c.lower()[0] if self._lowercase else c for c in chars]
        kinds = [0 if c in dropped else -1 if c in singles else 1 for c in chars]
        return [kind * ord(c) for kind, c in zip(kinds, shown, strict=True)]

    @cached_property
    def _classes(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """The characters that are dropped, and those that are words alone."""
        import regex

        newer = f"[{''.join(NEWER)}]"
        marks = r"\p{M}" if self._strip_accents else ""
        drop = regex.compile(rf"[[\p{{Cc}}\p{{Cf}}\p{{Co}}\p{{Cs}}\ufffd{marks}]--{newer}]", regex.VERSION1)
        single = regex.compile(rf"[[\p{{P}}$+<=>\^`\|~{_CHINESE}]--{newer}]", regex.VERSION1)
        return drop, single  # pyright: ignore[reportReturnType]
