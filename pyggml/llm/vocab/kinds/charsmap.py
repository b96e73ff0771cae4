"""Check sentencepiece's compiled character maps, which sentencepiece runs whatever they cost."""

from __future__ import annotations

import numpy as np

from pyggml import limits
from pyggml.errors import ModelError

from ..tokens import KEY


def check_charsmap(charsmap: bytes) -> None:
    """Raise ModelError for a map whose rules replace, or are replaced by, more than `limits.CHARSMAP_BYTES`.

    A map has the size of a trie (4 bytes), the trie (a double array of units of 4 bytes), and the texts that rules put
    in, each with a NUL after it. A trie may go in a circle, so that a rule never ends. sentencepiece itself refuses
    data that is not a map.
    """
    size = int.from_bytes(charsmap[:4], "little")
    trie, texts = charsmap[4 : 4 + size], charsmap[4 + size :]
    if len(trie) < size or size < 4 or size % 4:
        return
    longest = max(map(len, texts.split(b"\0")))
    if longest > limits.CHARSMAP_BYTES or _is_deeper(np.frombuffer(trie, "<u4"), limits.CHARSMAP_BYTES):
        raise ModelError(
            f"{KEY}precompiled_charsmap: a rule is longer than limits.CHARSMAP_BYTES = {limits.CHARSMAP_BYTES}"
        )


def _is_deeper(units: np.ndarray, depth: int) -> bool:
    """Whether a path from the root of a double array is longer than `depth` units."""
    places, labels = np.arange(len(units)), (units & 0xFF).astype(np.int64)
    bases = places ^ (units.astype(np.int64) >> 10 << ((units & 0x200) >> 6))
    before = np.where(units >> 31, -1, places ^ labels)  # the base that leads to a unit; -1: a value
    reached = np.zeros(int(before.max(initial=0)) + 1, np.bool_)
    here = np.zeros(1, np.int64)
    for _ in range(depth + 1):
        reached[:] = False
        reached[bases[here][bases[here] < len(reached)]] = True
        here = np.flatnonzero((before >= 0) & reached[before])
        if not len(here):
            return False
    return True
