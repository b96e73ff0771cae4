"""Numbered texts, found by their bytes, in C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._pggml import ffi, lib

Ints = np.ndarray[Any, np.dtype[np.int32]]
Ends = np.ndarray[Any, np.dtype[np.int64]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]


class Texts:
    """Texts and their numbers, from 0. Any thread may ask."""

    def __init__(self, texts: Sequence[str], beginnings: bool = False) -> None:
        """`beginnings` is for `longest_match` and `best_cut`."""
        data, ends = _pack(texts)
        n_slots = 2 << len(texts).bit_length()
        n_bits = 8 << len(data).bit_length() if beginnings else 0
        self._n = len(texts)
        slots, bits = np.zeros(n_slots, np.uint64), np.zeros(n_bits // 64, np.uint64)
        self._arrays = (np.frombuffer(data, np.uint8), ends, slots, bits)
        self._c = ffi.new("pg_texts *", {"n_slots": n_slots, "n_bits": n_bits})
        kinds = {"bytes": "uint8_t[]", "ends": "int64_t[]", "slots": "uint64_t[]", "bits": "uint64_t[]"}
        for (name, kind), array in zip(kinds.items(), self._arrays, strict=True):
            setattr(self._c, name, ffi.from_buffer(kind, array))
        lib.pg_texts_index(self._c, self._n)

    def pairs_of_merges(self, merges: Sequence[str]) -> tuple[Ints, Ints, Ints]:
        """Of merges, "left right" each: the numbers of left, right and of what they become, -1 for what is no text."""
        data, ends = _pack(merges)
        arrays: list[Ints] = [np.empty(len(merges), np.int32) for _ in range(3)]
        pointers = (ffi.from_buffer("int32_t[]", a) for a in arrays)
        lib.pg_pairs_of_merges(
            self._c, ffi.from_buffer("uint8_t[]", data), ffi.from_buffer("int64_t[]", ends), len(merges), *pointers
        )
        return arrays[0], arrays[1], arrays[2]

    def pairs(self) -> tuple[Ints, Ints, Ints]:
        """All pairs of texts or single characters that make a text; a character that is no text is -1 - its code."""
        arrays: list[Ints] = [np.empty(len(self._arrays[0]), np.int32) for _ in range(3)]
        n: int = lib.pg_pairs_of_texts(self._c, self._n, *(ffi.from_buffer("int32_t[]", a) for a in arrays))
        left, right, text = (np.array(a[:n], np.int32) for a in arrays)
        return left, right, text

    def longest_match(self, codes: Ints, n_words: int, prefix: bytes, unk: int | None) -> tuple[Ints, Ends]:
        """Numbers of the longest texts from the left, and where each word ends among them. `codes` are characters: 0 is
        none, a negative one is a part of its own, and at 10 a word ends. Each part is read with `prefix` before it; one
        that texts do not cover is `unk`."""
        ends: Ends = np.empty(n_words, np.int64)
        ids: Ints = np.empty((4 + len(prefix)) * len(codes), np.int32)
        n = lib.pg_longest_match(
            self._c,
            ffi.from_buffer("int32_t[]", codes),
            len(codes),
            prefix,
            -1 if unk is None else unk,
            ffi.new("uint8_t[]", 4 * len(codes) + len(prefix)),
            ffi.from_buffer("int32_t[]", ids),
            ffi.from_buffer("int64_t[]", ends),
        )
        return ids[:n], ends

    def best_cut(self, words: Sequence[bytes], scores: Doubles, unknown: float) -> tuple[Ints, Ends]:
        """Numbers of the texts with the highest sum of scores, and where each word ends among them. A character without
        a text is the number behind the last one, and scores `unknown`."""
        ends = np.cumsum(list(map(len, words)), dtype=np.int64)
        longest = max(map(len, words), default=0)
        ids: Ints = np.empty(sum(map(len, words)), np.int32)
        n = lib.pg_best_cut(
            self._c,
            ffi.from_buffer("double[]", scores),
            ffi.from_buffer("uint8_t[]", b"".join(words)),
            ffi.from_buffer("int64_t[]", ends),
            len(words),
            unknown,
            self._n,
            ffi.new("double[]", longest + 1),
            ffi.new("pg_step[]", longest + 1),
            ffi.from_buffer("int32_t[]", ids),
        )
        return ids[:n], ends


def _pack(texts: Sequence[str]) -> tuple[bytes, Ends]:
    """Texts with a NUL behind each, and where those are."""
    data = ("\0".join(texts) + "\0").encode("utf-8", "surrogateescape")
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 0)
    if len(ends) != len(texts):  # there are none, or one has a NUL of its own
        ends = np.cumsum([len(text.encode("utf-8", "surrogateescape")) + 1 for text in texts], dtype=np.int64) - 1
    return data, ends
