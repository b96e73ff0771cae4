"""Adaptive-p: tokens near a probability that the caller chooses, rather than the likeliest ones.

Semantics: llama.cpp's adaptive-p sampler (llama_sampler_init_adaptive_p).
"""

from __future__ import annotations

import numpy as np

from .base import Sampler, Setting
from .candidates import Candidates

_PEAK = 5.0  # the logit of a token that has the probability that is aimed at
_SHARPNESS = 10.0  # how fast logits fall with the distance from it
_WIDTH = 0.3  # the distance, in probability, that counts as one


class AdaptiveP(Sampler):
    """Gives each token a logit by how near its probability p is to an aim a: 5 - 10 d^2 / (1 + d), with
    d = |p - a| / 0.3. It is always the last sampler of its chain.

    The aim balances what was chosen before: it is twice the `target` minus the mean probability of the chosen tokens,
    where each token counts `decay` times as much as the one after it. The mean begins at the target."""

    name = "adaptive_p"
    keeps_best = True  # greedy sampling takes the likeliest token, whatever the aim

    @classmethod
    def of(cls, setting: Setting) -> Sampler | None:
        p = setting.params
        return cls(p.adaptive_target, p.adaptive_decay) if p.adaptive_target >= 0 else None

    def __init__(self, target: float, decay: float) -> None:
        self.target, self.decay = target, decay
        self.reset()

    def reset(self) -> None:
        self._n = 1 / (1 - self.decay)  # the tokens that count in the mean
        self._sum = self.target * self._n
        self._tokens, self._probs = np.empty(0, np.int64), np.empty(0)  # of the step before the draw

    def apply(self, c: Candidates) -> None:
        self._tokens, self._probs = c.tokens(), c.probs()
        aim = min(max(2 * self.target - self._sum / self._n, 0.0), 1.0)
        distance = np.abs(self._probs - aim) / _WIDTH
        logits = _PEAK - _SHARPNESS * distance * distance / (1 + distance)
        c.replace(np.where(c.logits == -np.inf, c.logits, logits.astype(np.float32)), False)

    def accept(self, token: int) -> None:
        found = self._probs[self._tokens == token]
        if len(found):
            self._sum = float(found[0]) + self.decay * self._sum
            self._n = 1 + self.decay * self._n
        self._tokens = self._tokens[:0]
        self._probs = self._probs[:0]

    def __str__(self) -> str:
        return f"{self.name}({self.target:g}, decay {self.decay:g})"
