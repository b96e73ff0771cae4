"""`tokenizer.ggml.model = rwkv`: the longest token of bytes, from the left. No library has it."""

from __future__ import annotations

import re

from pyggml.errors import ModelError

from ..tokens import Tokens, utf8

_ESCAPE = re.compile(rb"\\(x[0-9a-f]{2}|.)", re.DOTALL)
_NAMED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


class RWKV:
    """Ids of texts by bytes."""

    def __init__(self, tokens: Tokens, unk: int | None) -> None:
        self._unk = unk
        self._pieces = [_unescape(text) for text in tokens.texts]
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        lengths: dict[bytes, set[int]] = {}  # of tokens that begin with these two bytes (or are this one)
        for piece in self._pieces:
            lengths.setdefault(piece[:2], set()).add(len(piece))
        self._lengths = {start: sorted(ns, reverse=True) for start, ns in lengths.items()}

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Raises ModelError where a byte has no token, and there is no unknown token."""
        data, at, out = utf8(text), 0, list[int]()
        while at < len(data):
            for n in self._lengths.get(data[at : at + 2], ()):
                token = self._ids.get(data[at : at + n])
                if token is not None:
                    break
            else:
                n, token = 1, self._ids.get(data[at : at + 1], self._unk)
            if token is None:
                raise ModelError(f"the vocabulary has no token for byte 0x{data[at]:02X} and no unknown token")
            out.append(token)
            at += n
        return out

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""
        return self._pieces[token]


def _unescape(text: str) -> bytes:
    def char(match: re.Match[bytes]) -> bytes:
        what = match[1]
        return bytes.fromhex(what[1:].decode()) if len(what) == 3 else _NAMED.get(what, what)

    return _ESCAPE.sub(char, utf8(text))
