"""`tokenizer.ggml.model = llama` (SPM): again and again, the two adjacent pieces are merged whose union has the highest
score; of equal ones, the leftmost.

This is sentencepiece's BPE with two differences: every piece takes part in merges, whatever its type, and a piece that
is not a token becomes byte tokens. Scores become ranks of pairs, so that words are merged as BPE's are. HF tokenizers
cannot do it: each of its pairs has a rank of its own, so pairs of equal score would not be merged from left to right.
"""

from __future__ import annotations

import re
from functools import cached_property

import numpy as np

from pyggml.errors import ModelError

from ..tokens import NO_UTF8, SPACE, Tokens, utf8
from .merger import Merger, symbols_of_chars
from .words import WordCache, by_word, words_of

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
        """Ids of a text. Raises ModelError when there is no token for a character, for its bytes, or for "unknown"."""
        text = text.replace(" ", SPACE)
        return self._cache.ids([text] if self._crossing and text else words_of(_WORDS, text))

    def piece(self, token: int) -> bytes:
        """The bytes of a normal token."""
        return utf8(self._tokens.texts[token].replace(SPACE, " "))

    @cached_property
    def _crossing(self) -> bool:
        """Whether a token reaches from one word into the next."""
        return any(SPACE in text.lstrip(SPACE) for text in self._tokens.texts if SPACE in text[1:])

    @cached_property
    def _merger(self) -> Merger:
        from pyggml.native.vocab.merges import Merges
        from pyggml.native.vocab.texts import Texts

        # A token that is not UTF-8 in the file cannot match a text.
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
