"""Mirostat: keeps the surprise of the text near a target (Basu et al. 2020, "Mirostat: a neural text decoding algorithm
that directly controls perplexity"). Version 1 estimates the shape of the distribution; version 2 does not need to."""

from __future__ import annotations

import math

import numpy as np

from .base import Sampler
from .candidates import Candidates

_MOST = 500.0  # the largest mu, in bits: 2 ** mu is still finite, and no token is as surprising as that
_M = 100  # tokens from which version 1 estimates the exponent of Zipf's law


class Mirostat(Sampler):
    """Leaves out tokens whose surprise is above `mu` bits, and adapts `mu` to the surprise of the tokens that were
    drawn. It must be the last sampler of its chain."""

    def __init__(self, version: int, tau: float, eta: float, n_vocab: int) -> None:
        self.name = "mirostat" if version == 1 else "mirostat_v2"
        self.version, self.tau, self.eta, self._n_vocab = version, tau, eta, n_vocab
        self.reset()

    def reset(self) -> None:
        self.mu = min(2 * self.tau, _MOST)
        self._last: Candidates | None = None

    def apply(self, c: Candidates) -> None:
        if self.version == 1:
            c.keep_top(min(len(c), self._k(c)))
        else:
            weights = c.weights()
            rows = np.greater_equal(weights, weights.sum(dtype=np.float64) * 2.0**-self.mu).nonzero()[0]
            c.keep(rows if len(rows) else np.array([c.best()]))
        self._last = c

    def accept(self, token: int) -> None:
        c, self._last = self._last, None
        if c is None:
            return
        rows, _ = c.find(np.array([token], np.int64))
        if len(rows):
            surprise = -math.log2(max(float(c.probs()[rows[0]]), 1e-300))
            self.mu = min(max(self.mu - self.eta * (surprise - self.tau), -_MOST), _MOST)

    def _k(self, c: Candidates) -> int:
        """How many of the likeliest tokens to keep, so that the surprise is `mu`. It is assumed that probabilities
        follow Zipf's law, with the exponent that fits the first tokens."""
        weights = c.weights()
        top = -np.sort(-weights[weights >= np.partition(weights, -_M)[-_M]] if len(c) > _M else -weights)[:_M]
        top = top[top > 0].astype(np.float64)
        if len(top) < 2:
            return 1
        i = np.arange(1, len(top))
        t, b = np.log((i + 1) / i), np.log(top[:-1] / top[1:])
        s = float(np.dot(t, b) / np.dot(t, t))
        eps = s - 1
        if abs(eps) < 1e-9:  # the limit of eps / (1 - n ** -eps)
            k = 2**self.mu / math.log(self._n_vocab)
        elif s <= 0:  # all tokens are about equally likely: none is left out
            return self._n_vocab
        else:
            exponent = min((math.log(eps / (1 - self._n_vocab**-eps)) + self.mu * math.log(2)) / s, 50.0)
            k = math.exp(exponent)
        return max(1, int(min(k, self._n_vocab)))

    def __str__(self) -> str:
        return f"{self.name}(mu {self.mu:.3f})"
