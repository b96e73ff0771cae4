"""Tries in C: they find which of many numbered texts another text begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyggml import limits
from pyggml.errors import ModelError

from .. import ffi, lib
from .calls import SEED, interruptible, pack

Ints = np.ndarray[Any, np.dtype[np.int32]]
Ends = np.ndarray[Any, np.dtype[np.int64]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MOST_NODES = 1 << 28  # csrc/vocab/trie.h


class Trie:
    """A trie of texts, which are numbered from 0. Of equal texts the first counts. Any thread may use it."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Raises ModelError for a text that is too long. The longest text decides how much a search costs at each
        place."""
        data, ends = pack(texts)
        longest = int(np.diff(ends, prepend=-1).max(initial=1)) - 1
        if longest > limits.TOKEN_BYTES:
            raise ModelError(f"a token has {longest} bytes, more than limits.TOKEN_BYTES = {limits.TOKEN_BYTES}")
        if len(data) >= _MOST_NODES:
            raise ModelError(f"tokens of {len(data)} bytes in all are too many")
        self._n = len(texts)
        self._arrays = (np.zeros(2 << len(texts).bit_length(), np.uint64), np.zeros((len(data) + 1, 2), np.int32))
        self.handle = ffi.new("pg_trie *", {"n_slots": len(self._arrays[0]), "seed": SEED})
        self.handle.slots = ffi.from_buffer("uint64_t[]", self._arrays[0])
        self.handle.nodes = ffi.from_buffer("pg_node[]", self._arrays[1])
        lib.pg_trie_index(self.handle, ffi.from_buffer("uint8_t[]", data), ffi.from_buffer("int64_t[]", ends), self._n)

    def longest_match(self, codes: Ints, n_words: int, prefix: bytes, unk: int | None) -> tuple[Ints, Ends]:
        """Cut words into the longest texts, from the left. Returns the numbers of the texts, and where each word ends
        among these numbers.

        codes   characters: 0 is no character, a negative one is a part by itself, and a word ends at 10
        prefix  each part of a word is read with this before it
        unk     the number of a part that the texts do not cover
        """
        ends: Ends = np.empty(n_words, np.int64)
        ids: Ints = np.empty((4 + len(prefix)) * len(codes), np.int32)
        part = ffi.new("uint8_t[]", 4 * len(codes) + len(prefix))
        n = interruptible(
            len(codes),
            lambda watch: lib.pg_longest_match(
                self.handle,
                ffi.from_buffer("int32_t[]", codes),
                len(codes),
                prefix,
                -1 if unk is None else unk,
                part,
                ffi.from_buffer("int32_t[]", ids),
                ffi.from_buffer("int64_t[]", ends),
                watch,
            ),
        )
        return ids[:n], ends

    def longest_cut(self, data: bytes) -> Ints:
        """Cut `data` into the longest texts, from the left, and return their numbers. A byte that no text begins with
        has the number after the last text."""
        ids: Ints = np.empty(len(data), np.int32)
        from_bytes, to_ids = ffi.from_buffer("uint8_t[]", data), ffi.from_buffer("int32_t[]", ids)
        n = interruptible(
            len(data),
            lambda watch: lib.pg_longest_cut(self.handle, from_bytes, len(data), self._n, to_ids, watch),
        )
        return ids[:n]

    def best_cut(
        self, words: Sequence[bytes], scores: Doubles, unknown: float, always: bool = False
    ) -> tuple[Ints, Ends]:
        """Cut words into the texts with the highest sum of scores. Returns the numbers of the texts, and where each
        word ends among these numbers. A character that no text covers (with `always`, any character) may get the number
        after the last text, which scores `unknown`."""
        data, lengths = b"".join(words), list(map(len, words))
        ends: Ends = np.empty(len(words), np.int64)
        ids: Ints = np.empty(len(data), np.int32)
        longest = max(lengths, default=0)
        best, step = ffi.new("double[]", longest + 1), ffi.new("pg_step[]", longest + 1)

        def call(watch: bool) -> int:
            np.cumsum(lengths, out=ends)
            return lib.pg_best_cut(
                self.handle,
                ffi.from_buffer("double[]", scores),
                ffi.from_buffer("uint8_t[]", data),
                ffi.from_buffer("int64_t[]", ends),
                len(words),
                unknown,
                self._n,
                always,
                best,
                step,
                ffi.from_buffer("int32_t[]", ids),
                watch,
            )

        n = interruptible(len(data), call)
        return ids[:n], ends


class LongestFirst:
    """Cuts texts out of a longer one: first the longest text (in bytes) wherever it occurs, then the next longest in
    what is left, and so on."""

    CUT, LSTRIP, RSTRIP = lib.PG_CUT, lib.PG_LSTRIP, lib.PG_RSTRIP

    def __init__(self, texts: Sequence[str], lengths: Sequence[int]) -> None:
        """`texts` from the longest to the shortest, of `lengths` bytes."""
        self._trie = Trie(texts)
        self._lengths = np.array(lengths, np.int32)

    def cut(self, data: bytes, how: Bytes) -> list[tuple[int, int, int]]:
        """The parts of `data`: where each part begins and ends, and the number of its text (-1 for a part between
        texts). `how` says for each text whether it counts (CUT), and whether it takes along the white space before or
        after it."""
        n = len(data)
        trie = self._trie.handle
        flags, text = ffi.from_buffer("uint8_t[]", how), ffi.from_buffer("uint8_t[]", data)
        found = interruptible(n, lambda watch: lib.pg_special_begin(trie, flags, text, n, ffi.NULL, watch))
        if not found:
            return [(0, n, -1)] if n else []
        heap, places = ffi.new("uint64_t[]", found), ffi.new("int64_t[]", found)
        marks, parts = np.empty(n, np.int32), np.empty((2 * found + 1, 3), np.int64)
        where = (places, ffi.from_buffer("int32_t[]", marks), ffi.from_buffer("pg_part[]", parts))
        lengths = ffi.from_buffer("int32_t[]", self._lengths)

        def call(watch: bool) -> int:
            marks[:] = 0
            if lib.pg_special_begin(trie, flags, text, n, heap, watch) == lib.PG_STOPPED:
                return lib.PG_STOPPED
            return lib.pg_special_cut(trie, flags, lengths, text, n, heap, found, *where, watch)

        n_parts = interruptible(n, call)
        return list(map(tuple, parts[:n_parts].tolist()))
