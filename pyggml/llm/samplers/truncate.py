"""Samplers that leave unlikely (or, XTC, likely) tokens out.

Sources: top-p, Holtzman et al. 2019; typical, Meister et al. 2022; min-p, Nguyen et al. 2024; top-n-sigma, Tang et al.
2024; XTC, text-generation-webui #6335. Semantics: llama.cpp's samplers of these names.
"""

from __future__ import annotations

import numpy as np

from .base import Sampler, Setting
from .candidates import Candidates


class TopK(Sampler):
    """The k likeliest tokens."""

    name, keeps_best = "top_k", True

    @classmethod
    def of(cls, setting: Setting) -> Sampler | None:
        top_k = setting.params.top_k
        return cls(top_k) if top_k > 0 else None

    def __init__(self, k: int) -> None:
        self.k = k

    def apply(self, c: Candidates) -> None:
        c.keep_top(self.k)

    def __str__(self) -> str:
        return f"{self.name}({self.k})"


class TopP(Sampler):
    """Nucleus: the likeliest tokens, the fewest whose probabilities add up to p."""

    name, keeps_best = "top_p", True

    @classmethod
    def of(cls, setting: Setting) -> Sampler | None:
        top_p = setting.params.top_p
        return cls(top_p, setting.params.min_keep) if top_p < 1 else None

    def __init__(self, p: float, min_keep: int = 0) -> None:
        self.p, self._least = p, max(min_keep, 1)

    def apply(self, c: Candidates) -> None:
        c.nucleus(self.p, self._least)

    def __str__(self) -> str:
        return f"{self.name}({self.p:g})"


class MinP(Sampler):
    """Tokens whose probability is at least p times the likeliest token's."""

    name, keeps_best = "min_p", True

    @classmethod
    def of(cls, setting: Setting) -> Sampler | None:
        min_p = setting.params.min_p
        return cls(min_p, setting.params.min_keep) if min_p > 0 else None

    def __init__(self, p: float, min_keep: int = 0) -> None:
        self.p, self._least = p, max(min_keep, 1)
        self._p = np.array(p, np.float32)

    def apply(self, c: Candidates) -> None:
        weights = c.weights()
        if self._least > 1:
            c.sort()
            weights = c.weights()
        if not c.is_sorted:
            c.keep(np.greater_equal(weights, self._p))
        elif weights.item(-1) < self.p:
            c.keep(slice(0, max(np.count_nonzero(np.greater_equal(weights, self._p)), self._least)))

    def __str__(self) -> str:
        return f"{self.name}({self.p:g})"


class Typical(Sampler):
    """Tokens whose surprise is nearest to the entropy, until their probabilities exceed p."""

    name = "typ_p"

    @classmethod
    def of(cls, setting: Setting) -> Sampler | None:
        typ_p = setting.params.typ_p
        return cls(typ_p, setting.params.min_keep) if typ_p < 1 else None

    def __init__(self, p: float, min_keep: int = 0) -> None:
        self.p, self._least = p, max(min_keep, 1)

    def apply(self, c: Candidates) -> None:
        p = c.probs()
        surprise = -np.log(p, out=np.full_like(p, -np.inf), where=p > 0)
        entropy = float(np.dot(p, np.where(p > 0, surprise, 0.0)))
        order = np.abs(surprise - entropy).argsort(kind="stable")
        kept = max(int(p[order].cumsum().searchsorted(self.p, "right")) + 1, self._least)
        if kept < len(c):
            c.keep(np.sort(order[:kept]))

    def __str__(self) -> str:
        return f"{self.name}({self.p:g})"


class TopNSigma(Sampler):
    """Tokens whose logits are within n standard deviations (of all finite logits) of the largest."""

    name, keeps_best = "top_n_sigma", True

    @classmethod
    def of(cls, setting: Setting) -> Sampler | None:
        top_n_sigma = setting.params.top_n_sigma
        return cls(top_n_sigma) if top_n_sigma > 0 else None

    def __init__(self, n: float) -> None:
        self.n = n

    def apply(self, c: Candidates) -> None:
        x = c.logits
        finite = x[np.isfinite(x)]
        limit = x[c.best()] - self.n * (finite.std(dtype=np.float64) if len(finite) else 0.0)
        c.keep((x >= limit).nonzero()[0])

    def __str__(self) -> str:
        return f"{self.name}({self.n:g})"


class Xtc(Sampler):
    """Exclude top choices: with some probability, all tokens at or above the threshold go, except the least likely
    one."""

    name = "xtc"

    @classmethod
    def of(cls, setting: Setting) -> Sampler | None:
        p = setting.params
        on = p.xtc_probability > 0 and p.xtc_threshold <= 0.5
        return cls(p.xtc_probability, p.xtc_threshold, setting.rng, p.min_keep) if on else None

    def __init__(self, probability: float, threshold: float, rng: np.random.Generator, min_keep: int = 0) -> None:
        self.probability, self.threshold, self._rng, self._least = probability, threshold, rng, min_keep

    def apply(self, c: Candidates) -> None:
        if len(c) < 2 or self._rng.random() >= self.probability:
            return
        c.sort()
        p = c.probs()
        n_top = int(np.count_nonzero((p >= self.threshold) & (p > 0)))
        if n_top > 1 and len(c) - (n_top - 1) >= self._least:
            c.keep(slice(n_top - 1, None))

    def __str__(self) -> str:
        return f"{self.name}({self.probability:g}, {self.threshold:g})"
