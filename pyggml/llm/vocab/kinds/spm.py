"""`tokenizer.ggml.model = llama` (SPM): of adjacent pieces the pair whose union has the highest score is merged, the
leftmost of equals.

That is sentencepiece's BPE, but that every piece takes part in merges whatever its type, and that a piece which is no
token becomes byte tokens. On top of sentencepiece it ran at 0.65 to 0.75 of llama.cpp's speed; here the scores become
ranks of pairs, and words are merged as BPE's are. HF tokenizers has one rank for each pair, so that pairs of equal
score are not merged from left to right.
"""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np

from pyggml.errors import ModelError

from ..tokens import NO_UTF8, SPACE, Tokens, utf8
from .merger import Merger, symbols_of_chars
from .words import WordCache, by_word

_WORDS = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")


class SPM:
    """Ids of texts by scores."""

    def __init__(self, tokens: Tokens, unk: int | None) -> None:
        self._tokens, self._unk = tokens, unk
        self.byte_ids = [
            tokens.ids.get(chr(b)) if i is None and b < 128 else i for b, i in enumerate(tokens.byte_ids())
        ]
        self._cache = WordCache(self._encode_words)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Raises ModelError where there are neither byte tokens nor an unknown token for a character."""
        text = text.replace(" ", SPACE)
        return self._cache.ids([text] if self._crossing and text else _WORDS.findall(text)).tolist()

    def piece(self, token: int) -> bytes:
        """The bytes of a normal token."""
        return utf8(self._tokens.texts[token].replace(SPACE, " "))

    @cached_property
    def _crossing(self) -> bool:
        """Whether a token goes from one word into the next."""
        return any(SPACE in text.lstrip(SPACE) for text in self._tokens.texts if SPACE in text[1:])

    @cached_property
    def _merger(self) -> Merger:
        from pyggml.native.vocab.merges import Merges
        from pyggml.native.vocab.texts import Texts

        # What is not UTF-8 in the file can match no text.
        texts = ["" if not text.isascii() and NO_UTF8.search(text) else text for text in self._tokens.texts]
        left, right, merged = Texts(texts).pairs()
        scores = np.asarray(self._tokens.scores)[merged]
        ranks = np.unique(-scores, return_inverse=True)[1].astype(np.int32)
        units = symbols_of_chars(self._tokens.ids)
        byte_ids = [self._unk if i is None else i for i in self.byte_ids]
        return Merger(Merges(left, right, merged, ranks), units, len(texts), [], byte_ids)

    def _encode_words(self, words: list[str]) -> list[bytes]:
        ids, ends = self._merger.encode(words)
        least = ids.min()
        if least < 0:
            raise ModelError(f"the vocabulary has no token for byte 0x{-1 - least:02X} and no unknown token")
        return by_word(ids, ends)
