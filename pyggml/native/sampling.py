"""The usual end of a sampler chain in C: top-k, top-p, min-p, temperature and the draw."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import ffi, lib

_F32 = np.dtype(np.float32)
Floats = np.ndarray[Any, np.dtype[np.float32]]


class TopDraw:
    """Draws a token by the logits divided by `temp`, in C. It keeps the `k` largest logits; of these the fewest whose
    probabilities reach `top_p` together (1: all); and of these the ones that are at least `min_p` times as likely as
    the first.

    It computes the same sums and comparisons as the samplers one by one, with NumPy's exp: not a bit differs.
    """

    def __init__(self, k: int, top_p: float, min_p: float, temp: float) -> None:
        self._k, self._top_p, self._min_p, self._temp = k, top_p, min_p, temp
        self._ids, self._weights = np.empty(k, np.int64), np.empty(2 * k, np.float32)
        self._n_keys = 4 * k + 64  # some are collected before the best are kept
        self._keys_c = ffi.new("uint64_t[]", self._n_keys)
        self._ids_c = ffi.from_buffer("int64_t[]", self._ids)
        self._weights_c = ffi.from_buffer("float[]", self._weights)

    def draw(self, logits: Floats, rng: np.random.Generator) -> int | None:
        """The index of the logit that is drawn. None, with no random number taken, when there are no more than `k`
        logits, when they are not a plain row of float32, or when one is NaN or infinite: the samplers handle these
        cases."""
        k, n, weights = self._k, len(logits), self._weights
        if n <= k or logits.dtype != _F32 or not logits.flags.c_contiguous:
            return None
        row, keys = ffi.from_buffer("float[]", logits), self._keys_c
        if lib.pg_top_k(row, n, k, self._temp, keys, self._n_keys, self._ids_c, self._weights_c):
            return None
        np.exp(weights, weights)
        return self._ids.item(lib.pg_draw(self._weights_c, k, self._top_p, self._min_p, rng.random()))
