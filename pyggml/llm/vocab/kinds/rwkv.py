"""`tokenizer.ggml.model = rwkv`: from the left, always the longest token of bytes. No library has this tokenizer."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pyggml.errors import ModelError

from ..tokens import Tokens, utf8

if TYPE_CHECKING:
    from pyggml.native.vocab.trie import Trie

    Ints = np.ndarray[Any, np.dtype[np.int32]]

_ESCAPE = re.compile(rb"\\(x[0-9a-f]{2}|.)", re.DOTALL)
_NAMED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


class RWKV:
    """Ids of texts by bytes."""

    def __init__(self, tokens: Tokens, unk: int | None) -> None:
        self._unk = unk
        self._pieces = [_unescape(text) for text in tokens.texts]

    @cached_property
    def _table(self) -> tuple[Trie, Ints]:
        """The bytes of tokens, and their ids; the last id is the unknown token's."""
        from pyggml.native.vocab.trie import Trie

        ids = {piece: i for i, piece in enumerate(self._pieces)}
        texts = [piece.decode("utf-8", "surrogateescape") for piece in ids]
        return Trie(texts), np.array([*ids.values(), -1 if self._unk is None else self._unk], np.int32)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Raises ModelError when a byte has no token and there is no unknown token."""
        trie, ids = self._table
        data = utf8(text)
        cut = trie.longest_cut(data)
        found: list[int] = ids[cut].tolist()
        if self._unk is None and -1 in found:
            at = sum(len(self._pieces[token]) for token in found[: found.index(-1)])
            raise ModelError(f"the vocabulary has no token for byte 0x{data[at]:02X} and no unknown token")
        return found

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""
        return self._pieces[token]


def _unescape(text: str) -> bytes:
    def char(match: re.Match[bytes]) -> bytes:
        what = match[1]
        return bytes.fromhex(what[1:].decode()) if len(what) == 3 else _NAMED.get(what, what)

    return _ESCAPE.sub(char, utf8(text))
