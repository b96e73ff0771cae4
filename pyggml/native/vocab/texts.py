"""Numbered texts, found by their bytes, in C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import ffi, lib
from .calls import SEED, pack

Ints = np.ndarray[Any, np.dtype[np.int32]]


class Texts:
    """Texts and their numbers, from 0. Any thread may use it."""

    def __init__(self, texts: Sequence[str]) -> None:
        data, ends = pack(texts)
        slots = np.zeros(2 << len(texts).bit_length(), np.uint64)
        self._n = len(texts)
        self._arrays = (np.frombuffer(data, np.uint8), ends, slots)
        self._c = ffi.new("pg_texts *", {"n_slots": len(slots), "seed": SEED})
        kinds = {"bytes": "uint8_t[]", "ends": "int64_t[]", "slots": "uint64_t[]"}
        for (name, kind), array in zip(kinds.items(), self._arrays, strict=True):
            setattr(self._c, name, ffi.from_buffer(kind, array))
        lib.pg_texts_index(self._c, self._n)

    def pairs_of_merges(self, merges: Sequence[str]) -> tuple[Ints, Ints, Ints]:
        """For each merge, "left right": the numbers of left, of right and of both together, -1 for one that is no
        text."""
        data, ends = pack(merges)
        arrays: list[Ints] = [np.empty(len(merges), np.int32) for _ in range(3)]
        pointers = (ffi.from_buffer("int32_t[]", a) for a in arrays)
        lib.pg_pairs_of_merges(
            self._c, ffi.from_buffer("uint8_t[]", data), ffi.from_buffer("int64_t[]", ends), len(merges), *pointers
        )
        return arrays[0], arrays[1], arrays[2]

    def pairs(self) -> tuple[Ints, Ints, Ints]:
        """All pairs of texts or single characters that together make a text. A character that is no text has the number
        -1 - its code."""
        arrays: list[Ints] = [np.empty(len(self._arrays[0]), np.int32) for _ in range(3)]
        n: int = lib.pg_pairs_of_texts(self._c, self._n, *(ffi.from_buffer("int32_t[]", a) for a in arrays))
        left, right, text = (np.array(a[:n], np.int32) for a in arrays)
        return left, right, text
