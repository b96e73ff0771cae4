"""Turn words into tokens by merging adjacent symbols (csrc/vocab/bpe.c), for BPE and SPM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tokens import utf8

if TYPE_CHECKING:
    from pyggml.native.vocab.merges import Merges

    Ints = np.ndarray[Any, np.dtype[np.int32]]
    Ends = np.ndarray[Any, np.dtype[np.int64]]

_N_BYTES, _N_CHARS = 256, 0x110000


class Merger:
    """Merges the symbols of words. The symbol of a token is its id. The symbol of a character that is no token is
    -1 - its code point. Other texts have symbols after that of the last token."""

    def __init__(
        self, merges: Merges, units: Ints, n_tokens: int, others: list[str], byte_ids: list[int | None]
    ) -> None:
        """`units`: the symbol of each byte, or of each character. `others`: the texts of symbols that are not tokens.
        `byte_ids`: the token of each byte, to spell these texts."""
        self._merges, self._units, self._n, self._others = merges, units, n_tokens, others
        self._byte_ids = np.array([-1 - b if i is None else i for b, i in enumerate(byte_ids)], np.int32)

    def encode(self, words: list[str]) -> tuple[Ints, Ends]:
        """Ids of the words, and where each word ends among them. A symbol without a token becomes the tokens of its
        bytes; a byte without a token gives -1 - byte."""
        if len(self._units) == _N_BYTES:
            parts = list(map(utf8, words))
            codes, lengths = np.frombuffer(b"".join(parts), np.uint8), list(map(len, parts))
        else:
            text = "".join(words).encode("utf-32-le", "surrogatepass")
            codes, lengths = np.frombuffer(text, np.uint32), list(map(len, words))
        ids, ends = self._merges.merge(self._units[codes], lengths)
        other = (ids < 0) | (ids >= self._n)
        if not other.any():
            return ids, ends
        symbols: list[int] = ids[other].tolist()
        spelled = {s: utf8(chr(-1 - s) if s < 0 else self._others[s - self._n]) for s in set(symbols)}
        parts = [spelled[s] for s in symbols]
        counts = np.ones(len(ids), np.int64)
        counts[other] = list(map(len, parts))
        out = np.repeat(ids, counts)
        out[np.repeat(other, counts)] = self._byte_ids[np.frombuffer(b"".join(parts), np.uint8)]
        return out, np.append(0, np.cumsum(counts))[ends]


def symbols_of_chars(symbols: Mapping[str, int]) -> Ints:
    """The symbol of each character: from `symbols`, or -1 - its code point."""
    units = np.arange(-1, -_N_CHARS - 1, -1, dtype=np.int32)
    for char in [text for text in symbols if len(text) == 1]:
        units[ord(char)] = symbols[char]
    return units
