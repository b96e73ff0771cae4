"""The tokens among which a sampler chain still chooses. Samplers narrow them down or change their logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pyggml.errors import SamplerError
from pyggml.types import Floats

Ids = npt.NDArray[np.int64]
LONG = 4096  # more weights than this are neither sorted nor added one by one without need
_BLOCK = 1024
_FIRST_PART = 256  # when only the best few are wanted, this many are sorted first


class Candidates:
    """Tokens with their logits.

    ids        int64 [n], or None while it is the whole vocabulary in order (row = id)
    logits     float32 [n]; to be written to only through `writable`
    is_sorted  whether the logits descend

    The methods use 0-d arrays (`x[i, ...]`), because NumPy computes with them much faster than with its scalars.
    """

    __slots__ = ("_owned", "_weights", "ids", "is_sorted", "logits")

    def __init__(self, logits: Floats) -> None:
        self.ids: Ids | None = None
        self.logits = logits
        self.is_sorted = False
        self._owned = False
        self._weights: Floats | None = None

    def __len__(self) -> int:
        return len(self.logits)

    def best(self) -> int:
        """The row of the largest logit, the first one among equals. Raises SamplerError when no token can be chosen."""
        if not len(self.logits):
            raise SamplerError("no token is left to choose, or all logits are NaN")
        row = 0 if self.is_sorted else int(self.logits.argmax())
        x = self.logits.item(row)
        if not -np.inf < x < np.inf:
            none = x == -np.inf
            raise SamplerError(
                "no token is left to choose: all logits are -inf" if none else "a logit is NaN or infinite"
            )
        return row

    def token(self, row: int) -> int:
        """The token of a row."""
        return row if self.ids is None else self.ids.item(row)

    def tokens(self) -> Ids:
        """The tokens of all rows."""
        return np.arange(len(self.logits)) if self.ids is None else self.ids

    def weights(self) -> Floats:
        """exp(logits - max): the probabilities before they are divided by their sum. Not to be written to."""
        if self._weights is None:
            x = np.subtract(self.logits, self.logits[self.best(), ...])
            self._weights = np.exp(x, x)
        return self._weights

    def probs(self) -> npt.NDArray[np.float64]:
        """softmax(logits)."""
        w = self.weights().astype(np.float64)
        return w / w.sum()

    def keep(self, rows: Any) -> None:
        """Keep some rows, in their order: indices, a slice or bools. Indices must ascend when the order matters."""
        if self.ids is not None:
            self.ids = self.ids[rows]
        elif isinstance(rows, slice):
            self.ids = np.arange(*rows.indices(len(self.logits)))
        else:
            self.ids = rows if rows.dtype.kind == "i" else rows.nonzero()[0]
        self.logits = self.logits[rows]
        self._owned = True
        if self._weights is not None:  # still valid when the best row is kept
            self._weights = self._weights[rows] if isinstance(rows, slice) and not rows.start else None

    def sort(self) -> None:
        """Put the largest logits first."""
        if not self.is_sorted:
            self._reorder(self.logits.argsort()[::-1])

    def keep_top(self, k: int) -> None:
        """Keep the `k` largest logits, sorted; among equal logits the first rows. Raises SamplerError for NaN."""
        n = len(self.logits)
        if self.is_sorted:
            self.keep(slice(0, k))
        elif k >= n:
            self.sort()
        else:
            top = np.partition(self.logits, n - k)[n - k :]  # NaN comes last
            if np.isnan(top).any():
                raise SamplerError("a logit is NaN")
            rows = np.greater_equal(self.logits, top[0, ...]).nonzero()[0]
            self._reorder(rows[np.negative(self.logits[rows]).argsort(kind="stable")[:k]])

    def replace(self, logits: Floats, same_order: bool) -> None:
        """Give all rows new logits; `same_order` promises that sorting old and new logits gives the same order."""
        self.logits = logits
        self._owned = True
        self._weights = None
        self.is_sorted = self.is_sorted and same_order

    def writable(self) -> Floats:
        """The logits, to be changed in place. They count as unsorted then. The caller's array is not changed."""
        logits = self.logits if self._owned else np.array(self.logits)
        self.replace(logits, False)
        return logits

    def find(self, tokens: Ids) -> tuple[Any, Any]:
        """Which of the (distinct) `tokens` are left: their rows, and their places in `tokens`."""
        if self.ids is None:
            return tokens, slice(None)
        _, rows, places = np.intersect1d(self.ids, tokens, assume_unique=True, return_indices=True)
        return rows, places

    def nucleus(self, p: float, least: int = 1) -> None:
        """Keep the likeliest tokens, sorted: the fewest whose probabilities add up to `p`, and `least` or more."""
        n = len(self.logits)
        if self.is_sorted or n <= LONG:
            self.sort()
            sums = np.add.accumulate(self.weights())
            keep = int(sums.searchsorted(np.array(p * sums.item(-1), np.float32))) + 1
            keep = max(keep, least)
            if keep < n:
                self.keep(slice(0, keep))
            return
        part, weights = min(max(_FIRST_PART, least), n), self.weights()
        wanted = p * float(weights.sum())
        while True:  # sort no more than needed: a few likely tokens have nearly all of the probability
            rows = weights.argpartition(n - part)[n - part :] if part < n else np.arange(n)
            rows = rows[np.negative(self.logits[rows]).argsort(kind="stable")]
            sums = np.add.accumulate(weights[rows], dtype=np.float64)
            if sums[-1] >= wanted or part == n:
                self._reorder(rows[: max(int(sums.searchsorted(wanted)) + 1, least)])
                return
            part = min(part * 8, n)

    def draw(self, rng: np.random.Generator) -> int:
        """A token by its probability, with one random number (two for many). Raises SamplerError when the logits give
        no probabilities."""
        u = rng.random()
        if len(self.logits) == 1:
            return self.token(self.best())
        weights, start = self.weights(), 0
        if len(weights) > LONG:  # find the block first, because running sums are slow
            edges = np.arange(0, len(weights), _BLOCK)
            block = _pick(np.add.reduceat(weights, edges), u)
            u = rng.random()
            start = block * _BLOCK
            weights = weights[start : start + _BLOCK]
        return self.token(start + _pick(weights, u))

    def _reorder(self, rows: Ids) -> None:
        """Put the rows in this order, in which their logits descend."""
        self.ids = rows if self.ids is None else self.ids[rows]
        self.logits = self.logits[rows]
        self._owned = self.is_sorted = True
        self._weights = None if self._weights is None else self._weights[rows]


def _pick(weights: Floats, u: float) -> int:
    """The first row at which the running sum of the weights exceeds `u` (below 1) times their total."""
    sums = np.add.accumulate(weights)
    total = sums.item(-1)
    if not 0 < total < np.inf:
        raise SamplerError(f"the probabilities sum up to {total}: a logit is NaN or infinite")
    row = int(sums.searchsorted(np.array(u * total, np.float32), "right"))
    if row == len(sums):  # `u` times the total was rounded up: take the last row with a probability
        row = int(sums.searchsorted(sums[-1, ...]))
    return row
