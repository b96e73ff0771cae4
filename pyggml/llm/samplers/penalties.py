"""Logits changed by token: biases, and penalties for tokens that occurred lately (CTRL, Keskar et al. 2019; OpenAI)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np

from .base import Sampler, Setting
from .candidates import Candidates

_MOST = 1e15  # with it, logits stay finite at the coldest temperature


class LogitBias(Sampler):
    """A number added to the logits of some tokens; -inf forbids a token. Numbers beyond +-1e15 count as +-1e15."""

    name = "logit_bias"

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids = np.array(list(bias), np.int64)
        self._bias = np.array([x if x == -np.inf else min(max(x, -_MOST), _MOST) for x in bias.values()], np.float32)

    def apply(self, c: Candidates) -> None:
        rows, places = c.find(self._ids)
        c.writable()[rows] += self._bias[places]


class Penalties(Sampler):
    """Penalises tokens among the last n: positive logits are divided by `repeat`, negative ones multiplied by it; then
    `frequency` is subtracted for each occurrence, and `presence` once. The token `exempt` is left alone."""

    name = "penalties"

    @classmethod
    def of(cls, setting: Setting) -> Sampler | None:
        p, exempt = setting.params, None if setting.params.penalize_nl else setting.vocab.nl
        penalties = (p.repeat_penalty, p.frequency_penalty, p.presence_penalty)
        on = p.repeat_last_n != 0 and penalties != (1, 0, 0)
        return cls(p.repeat_last_n, *penalties, exempt) if on else None

    def __init__(
        self, last_n: int, repeat: float, frequency: float, presence: float, exempt: int | None = None
    ) -> None:
        self.repeat, self.frequency, self.presence, self._exempt = repeat, frequency, presence, exempt
        self._last: deque[int] = deque(maxlen=None if last_n < 0 else last_n)
        self._counts: Counter[int] = Counter()

    def apply(self, c: Candidates) -> None:
        if not self._counts:
            return
        seen = np.fromiter(self._counts.keys(), np.int64)
        counts = np.fromiter(self._counts.values(), np.float32)
        rows, places = c.find(seen)
        logits = c.writable()
        x = logits[rows]
        x = np.where(x > 0, x / np.float32(self.repeat), x * np.float32(self.repeat))
        logits[rows] = x - (counts[places] * np.float32(self.frequency) + np.float32(self.presence))

    def prime(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.accept(token)

    def accept(self, token: int) -> None:
        last, counts = self._last, self._counts
        if len(last) == last.maxlen and last[0] != self._exempt:
            counts[last[0]] -= 1
            if not counts[last[0]]:
                del counts[last[0]]
        last.append(token)
        if token != self._exempt:
            counts[token] += 1

    def reset(self) -> None:
        self._last.clear()
        self._counts.clear()

    def __str__(self) -> str:
        return f"{self.name}(repeat {self.repeat:g}, frequency {self.frequency:g}, presence {self.presence:g})"
