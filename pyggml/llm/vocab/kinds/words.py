"""The words of texts, and a cache of their ids.

A text may have millions of words, and no other thread has a turn during a call of C that goes over all of them: they
are found and looked up some at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import re

    Ints = np.ndarray[Any, np.dtype[np.int32]]
    Ends = np.ndarray[Any, np.dtype[np.int64]]

_SHORT = 1 << 16  # characters of a text whose words are found at once
_PART = 1 << 14  # words that are looked up at once
_MOST = 1 << 22  # the most characters of all words that are kept


def words_of(pattern: re.Pattern[str], text: str) -> list[str]:
    """All that a pattern without groups finds in a text."""
    if len(text) <= _SHORT:
        return pattern.findall(text)
    return [found[0] for found in pattern.finditer(text)]


class WordCache:
    """Keeps the ids that `encode` gives for words: int32 values, as bytes. Any thread may ask."""

    def __init__(self, encode: Callable[[list[str]], list[bytes]]) -> None:
        self._encode = encode
        self._ids: dict[str, bytes] = {}
        self._size = 0

    def ids(self, words: list[str]) -> list[int]:
        """The ids of all words in a row."""
        found = list[int]()
        for part in self.arrays(words):
            found += part.tolist()
        return found

    def arrays(self, words: list[str]) -> list[Ints]:
        """The ids of all words in a row, in parts."""
        known = self._ids
        parts = [words[i : i + _PART] for i in range(0, len(words), _PART)]
        new = list(set[str]().union(*(set(part).difference(known) for part in parts)))
        if new:
            size = sum(map(len, new))
            if self._size + size > _MOST:  # other threads go on with the old table
                known = self._ids = {}
                self._size = 0
                new = list(set[str]().union(*map(set, parts)))
            known.update(zip(new, self._encode(new), strict=True))
            self._size += size
        return [np.frombuffer(b"".join(map(known.__getitem__, part)), np.int32) for part in parts]


def by_word(ids: Ints, ends: Ends) -> list[bytes]:
    """The ids of each word, cut at `ends`."""
    data = ids.tobytes()
    return [data[a:b] for a, b in pairwise([0, *(ends * ids.itemsize).tolist()])]
