"""`tokenizer.ggml.model = plamo2`: the cut into tokens with the highest sum of scores, found from the end. Scores are
rounded to 1e-4; a character without a token costs 1000 and becomes its bytes. No library has this tokenizer."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from pyggml.errors import ModelError

from ..tokens import KEY, NO_UTF8, Tokens, TokenType, utf8

if TYPE_CHECKING:
    from pyggml.native.vocab.trie import Trie

    Ints = np.ndarray[Any, np.dtype[np.int32]]
    Doubles = np.ndarray[Any, np.dtype[np.float64]]

_UNKNOWN = -10_000_000.0  # the score of a character without a token, in 1e-4
_INVALID = -20_000_000.0  # tokens with this score or less are not used


class PLaMo2:
    """Ids of texts by scores."""

    def __init__(self, tokens: Tokens) -> None:
        """Raises ModelError when a byte has no token."""
        self._tokens, self._byte_ids = tokens, list[int]()
        for byte, token in enumerate(tokens.byte_ids()):
            if token is None or tokens.types[token] != TokenType.BYTE:
                raise ModelError(f"{KEY}tokens: there is no token for byte 0x{byte:02X}")
            self._byte_ids.append(token)

    @cached_property
    def _table(self) -> tuple[Trie, Doubles, Ints, Ints]:
        """The tokens in use, spelled backwards, with scores, ids and lengths; the last entry stands for an unknown
        character."""
        from pyggml.native.vocab.trie import Trie

        scores = np.array(self._tokens.scores, np.float64)
        scores = np.copysign(np.floor(np.abs(scores * 1e4) + 0.5), scores)
        valid = [not NO_UTF8.search(text) for text in self._tokens.texts]  # other tokens cannot match a text
        used = valid & np.isfinite(scores) & (scores > _INVALID) & (np.array(self._tokens.types) != TokenType.BYTE)
        ids: Ints = np.append(np.flatnonzero(used), -1).astype(np.int32)
        texts = [self._tokens.texts[int(i)] for i in ids[:-1]]
        return Trie([text[::-1] for text in texts]), scores[used], ids, np.array([*map(len, texts), 1], np.int32)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; a byte order mark at its start is dropped."""
        parts = NO_UTF8.split(text.removeprefix("\ufeff"))
        if len(parts) == 1:
            return self._cut(parts[0])
        bytes_of = (
            [self._byte_ids[b] for b in utf8(part)] if NO_UTF8.match(part) else self._cut(part) for part in parts
        )
        return list(chain.from_iterable(bytes_of))

    def _cut(self, text: str) -> list[int]:
        trie, scores, ids, lengths = self._table
        cut = trie.best_cut([utf8(text[::-1])], scores, _UNKNOWN, always=True)[0][::-1]
        out: list[int] = ids[cut].tolist()
        if -1 not in out:
            return out
        starts = (np.cumsum(lengths[cut]) - lengths[cut]).tolist()
        tokens = zip(out, starts, strict=True)
        return list(
            chain.from_iterable([i] if i >= 0 else [self._byte_ids[b] for b in utf8(text[at])] for i, at in tokens)
        )

    def piece(self, token: int) -> bytes:
        """The bytes of a normal token."""
        return utf8(self._tokens.texts[token])
