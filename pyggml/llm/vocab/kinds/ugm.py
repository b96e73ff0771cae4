"""`tokenizer.ggml.model = t5` (UGM): the cut into tokens with the highest sum of scores, after a character map.

sentencepiece runs the map. Its own search for the best cut adds scores in float32, which gives other ids than
llama.cpp's float64 (HF tokenizers adds in float64, but brings eleven more packages). So the search is here, done once
for each word: sums of float32 scores are exact in float64, and so the best cut of a text consists of the best cuts of
its words, as long as no token reaches from one word into the next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pyggml.errors import ModelError

from ..tokens import KEY, NO_UTF8, SPACE, Tokens, TokenType, flag, utf8
from . import proto
from .charsmap import check_charsmap
from .words import WordCache, by_word, words_of

if TYPE_CHECKING:
    from sentencepiece import SentencePieceNormalizer

    from pyggml.native.vocab.trie import Trie

    Ints = np.ndarray[Any, np.dtype[np.int32]]
    Doubles = np.ndarray[Any, np.dtype[np.float64]]

_PENALTY = 10.0  # how far the score of an unknown character is below the worst token's
_WORDS = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")


class UGM:
    """Ids of texts by scores of tokens; merges in the file are ignored."""

    def __init__(self, tokens: Tokens, unk: int | None, kv: Mapping[str, object], space: bool, merge: bool) -> None:
        """`space`: put a space before the text; `merge`: make one space of several. Raises ModelError for a bad map."""
        self._tokens, self._unk, self._space, self._merge = tokens, unk, space, merge
        self._normal = tokens.of_type(TokenType.NORMAL)
        self._user_defined = tokens.of_type(TokenType.USER_DEFINED)
        self._used = [*self._normal, *tokens.of_type(TokenType.UNUSED), *self._user_defined]
        # A key of pyggml's own: HF's tokenizers put no space before a text that begins with one; llama.cpp does.
        self._once = flag(kv, "space_prefix_once", False)
        self._cache = WordCache(self._encode_words)
        charsmap = kv.get(f"{KEY}precompiled_charsmap")
        self._charsmap = None if charsmap is None else np.asarray(charsmap)
        if self._charsmap is not None and (self._charsmap.ndim != 1 or self._charsmap.dtype.itemsize != 1):
            raise ModelError(f"{KEY}precompiled_charsmap is not an array of bytes")

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Unknown characters in a row become one unknown token."""
        parts = self._cache.arrays(self._words(text))
        ids = np.concatenate(parts) if parts else np.empty(0, np.int32)
        if self._unk is not None:
            ids = ids[(ids != self._unk) | np.append(True, ids[:-1] != self._unk)[: len(ids)]]
        return ids.tolist()

    def piece(self, token: int) -> bytes:
        """The bytes of a normal token."""
        return utf8(self._tokens.texts[token].replace(SPACE, " "))

    @cached_property
    def _normalizer(self) -> SentencePieceNormalizer | None:
        from sentencepiece import SentencePieceNormalizer

        if self._charsmap is None:
            return None
        charsmap = self._charsmap.tobytes()
        check_charsmap(charsmap)
        try:
            return SentencePieceNormalizer(
                model_proto=proto.normalizer(charsmap),
                add_dummy_prefix=False,
                escape_whitespaces=False,
                remove_extra_whitespaces=False,
            )
        except RuntimeError as e:
            raise ModelError(f"{KEY}precompiled_charsmap cannot be read: {e}") from e

    @cached_property
    def _crossing(self) -> bool:
        """Whether a token reaches from one word into the next."""
        texts = self._tokens.texts
        return any(SPACE in texts[i].lstrip(SPACE) for i in self._used if SPACE in texts[i][1:])

    @cached_property
    def _table(self) -> tuple[Trie, Doubles, float, Ints]:
        """The tokens in use, their scores, the score of an unknown character, and ids, the unknown token's last."""
        from pyggml.native.vocab.trie import Trie

        scores = np.array(self._tokens.scores, np.float64)
        worst = scores[self._normal].min(initial=3.4e38)
        scores[self._user_defined] = 0.0
        ids = np.array([*self._used, -1 if self._unk is None else self._unk], np.int32)
        trie = Trie([self._tokens.texts[i] for i in self._used])
        return trie, scores[self._used], float(np.float32(worst - _PENALTY)), ids

    def _words(self, text: str) -> list[str]:
        """The normalised text in words that no token reaches across. A byte that is not UTF-8 becomes U+FFFD."""
        text = NO_UTF8.sub("\ufffd", text)
        if self._normalizer is not None:
            text = self._normalizer.normalize(text)
        if self._merge:
            words = [SPACE + word for word in text.split(" ") if word]
            return ["".join(words)] if self._crossing and words else words
        spaces = len(text) - len(text.lstrip(" "))
        if self._space and spaces < len(text) and not (self._once and spaces):
            text = " " + text
        text = text.replace(" ", SPACE)
        return [text] if self._crossing and text else words_of(_WORDS, text)

    def _encode_words(self, words: list[str]) -> list[bytes]:
        trie, scores, unknown, ids = self._table
        cut, ends = trie.best_cut(list(map(utf8, words)), scores, unknown)
        found = ids[cut]
        if self._unk is None and (found < 0).any():
            word = words[int(np.searchsorted(ends, np.argmin(found), "right"))]
            raise ModelError(f"the vocabulary has no token for a character of {word!r:.60} and no unknown token")
        return by_word(found, ends)
