"""A cache of words' ids."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    Ints = np.ndarray[Any, np.dtype[np.int32]]
    Ends = np.ndarray[Any, np.dtype[np.int64]]

_MOST = 1 << 22  # the most characters of all words that are kept


class WordCache:
    """Keeps the ids that `encode` gives for words: int32 values, as bytes. Any thread may ask."""

    def __init__(self, encode: Callable[[list[str]], list[bytes]]) -> None:
        self._encode = encode
        self._ids: dict[str, bytes] = {}
        self._size = 0

    def ids(self, words: list[str]) -> Ints:
        """The ids of all words in a row."""
        known = self._ids
        new = list(set(words).difference(known))
        if new:
            size = sum(map(len, new))
            if self._size + size > _MOST:  # other threads go on with the old table
                known = self._ids = {}
                self._size = 0
                new = list(set(words))
            known.update(zip(new, self._encode(new), strict=True))
            self._size += size
        return np.frombuffer(b"".join(map(known.__getitem__, words)), np.int32)


def by_word(ids: Ints, ends: Ends) -> list[bytes]:
    """The ids of each word, cut at `ends`."""
    data = ids.tobytes()
    return [data[a:b] for a, b in pairwise([0, *(ends * ids.itemsize).tolist()])]
