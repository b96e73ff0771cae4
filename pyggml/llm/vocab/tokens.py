"""The tokens of a vocabulary as a GGUF file lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

import numpy as np

from pyggml.errors import ModelError

KEY = "tokenizer.ggml."
SPACE = "\u2581"  # most vocabularies spell a space so
NO_UTF8 = re.compile("([\udc80-\udcff])")  # surrogates, which stand for bytes that are not UTF-8

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_F32_MAX = float(np.finfo(np.float32).max)


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class Tokens:
    """Texts, scores and types by id, and ids by text."""

    texts: list[str]
    scores: list[float]
    types: list[int]
    ids: dict[str, int]

    @staticmethod
    def from_gguf(kv: Mapping[str, object]) -> Tokens:
        """The tokens in a GGUF's metadata. Raises ModelError when they are missing, malformed, or not all different."""
        texts = strings(kv, "tokens")
        if texts is None:
            raise ModelError(f"{KEY}tokens is missing or not an array of strings")
        if "" in texts or "\0" in "".join(texts):  # llama.cpp reads a token up to its first NUL
            texts = [text.partition("\0")[0] or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
        n = len(texts)
        ids = dict(zip(texts, range(n), strict=True))
        if len(ids) != n:
            twice = next(text for i, text in enumerate(texts) if ids[text] != i)
            raise ModelError(f"{KEY}tokens: the token {twice!r} occurs twice")
        types = np.asarray(numbers(kv, "token_type", n, TokenType.NORMAL))
        types = np.where((types >= 0) & (types <= max(TokenType)), types, TokenType.UNDEFINED).astype(np.int64)
        return Tokens(texts, numbers(kv, "scores", n, 0), types.tolist(), ids)

    def of_type(self, *types: TokenType) -> list[int]:
        """Ids of all tokens of these types."""
        return np.flatnonzero(np.isin(np.asarray(self.types, np.int64), types)).tolist()

    def byte_ids(self) -> list[int | None]:
        """The token of each byte, by its text `<0x00>` .. `<0xFF>`."""
        return [self.ids.get(f"<0x{b:02X}>") for b in range(256)]

    def byte(self, token: int) -> bytes:
        """The byte of a token of type BYTE. Raises ModelError when its text spells no byte."""
        text = self.texts[token]
        found = _BYTE.fullmatch(text)
        if found is None:
            raise ModelError(f"{KEY}tokens: {text!r} is typed as a byte and does not spell one")
        return bytes.fromhex(found[1])


def utf8(text: str) -> bytes:
    """The bytes of a text; surrogates stand for bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def strings(kv: Mapping[str, object], name: str) -> list[str] | None:
    """An array of strings; None when the key is missing."""
    values = kv.get(KEY + name)
    if not isinstance(values, list) or not set(map(type, cast("list[Any]", values))) <= {str}:
        return None
    return cast("list[str]", values)


def numbers(kv: Mapping[str, object], name: str, n: int, default: float) -> list[float]:
    """The first `n` numbers of an array, as Python numbers."""
    values = kv.get(KEY + name)
    if values is None:
        return [default] * n
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or len(array) < n:
        raise ModelError(f"{KEY}{name} is not an array of {n} numbers, one for each token")
    if np.isnan(array).any():
        raise ModelError(f"{KEY}{name} has a NaN")
    if (np.isfinite(array) & (np.abs(array.astype(np.float64)) > _F32_MAX)).any():
        raise ModelError(f"{KEY}{name} has a number beyond the range of F32")
    return cast("list[float]", array[:n].tolist())


def token_id(kv: Mapping[str, object], name: str, n: int, default: int | None) -> int | None:
    """A token id, or the default. Files write an id outside the vocabulary (2**32 - 1) for "none"."""
    value = kv.get(KEY + name)
    if value is not None and type(value) is not int:
        raise ModelError(f"{KEY}{name} is not an integer: {value!r}")
    for token in (value, default):
        if isinstance(token, int) and 0 <= token < n:
            return token
    return None


def token_ids(kv: Mapping[str, object], name: str, n: int) -> tuple[int, ...]:
    """An array of token ids; empty when the key is missing. Ids outside the vocabulary are left out, as llama.cpp does
    with those of tokens that are never sampled. Raises ModelError for a value that is not an array of INT32."""
    ids = np.asarray(kv.get(KEY + name, np.empty(0, np.int32)))
    if ids.ndim != 1 or ids.dtype != np.int32:
        raise ModelError(f"{KEY}{name} is not an array of INT32")
    return tuple(ids[(ids >= 0) & (ids < n)].tolist())


def flag(kv: Mapping[str, object], name: str, default: bool) -> bool:
    """A bool. Raises ModelError for a value of another type."""
    value = kv.get(KEY + name, default)
    if not isinstance(value, bool):
        raise ModelError(f"{KEY}{name} is not a bool: {value!r}")
    return value
