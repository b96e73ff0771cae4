"""Record what each sampler of a chain does at one step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .candidates import Candidates, Ids


class SamplerTrace(NamedTuple):
    """What one sampler did: its name with parameters, and the number of candidates before and after it. Then three
    things after it: the probability of the token that was chosen in the end, the likeliest token, and the probability
    of that."""

    sampler: str
    n_before: int
    n_after: int
    p: float
    best: int
    p_best: float


class StepTrace(NamedTuple):
    """One step: the token that was chosen, and all samplers in order. The first entry, `logits`, is the model's
    output."""

    token: int
    samplers: tuple[SamplerTrace, ...]


class Tracer:
    """Watches one run of a chain over its candidates."""

    def __init__(self, c: Candidates) -> None:
        self._seen: list[tuple[str, int, Ids, npt.NDArray[np.float64]]] = []
        self.watch("logits", len(c), c)

    def watch(self, sampler: str, n_before: int, c: Candidates) -> None:
        """Take note of the candidates after a sampler, which got `n_before` of them."""
        self._seen.append((sampler, n_before, np.array(c.tokens()), c.probs()))

    def step(self, token: int) -> StepTrace:
        """The trace, now that the token is known."""
        entries: list[SamplerTrace] = []
        for sampler, n_before, tokens, p in self._seen:
            best = int(p.argmax())
            chosen = float(p[tokens == token].sum())
            entries.append(SamplerTrace(sampler, n_before, len(p), chosen, int(tokens[best]), float(p[best])))
        return StepTrace(token, tuple(entries))
