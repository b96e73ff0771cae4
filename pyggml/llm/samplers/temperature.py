"""Temperature, fixed or by the entropy (Zhu et al. 2024; llama.cpp's temp_ext)."""

from __future__ import annotations

import numpy as np

from .base import Sampler, Setting
from .candidates import Candidates

COLDEST = 1e-20  # below it, differences of logits overflow: the likeliest token is certain
_HOTTEST = float(np.finfo(np.float32).max)


class Temperature(Sampler):
    """Logits divided by `temp`."""

    name, keeps_best = "temperature", True

    @classmethod
    def of(cls, setting: Setting) -> Sampler | None:
        p = setting.params
        if p.dynatemp_range > 0:
            return DynamicTemperature(p.temp, p.dynatemp_range, p.dynatemp_exponent)
        return cls(p.temp) if p.temp >= COLDEST and p.temp != 1 else None

    def __init__(self, temp: float) -> None:
        self.temp = temp
        self._temp = np.array(temp, np.float32)

    def apply(self, c: Candidates) -> None:
        with np.errstate(over="ignore"):  # a logit that is penalised beyond all numbers becomes -inf
            c.replace(np.divide(c.logits, self._temp), True)

    def __str__(self) -> str:
        return f"{self.name}({self.temp:g})"


class DynamicTemperature(Sampler):
    """Logits divided by low + (high - low) * e ** exponent; e is the entropy, 1 when all candidates are equal."""

    name = "temperature"

    def __init__(self, temp: float, spread: float, exponent: float) -> None:
        self.low, self.high, self.exponent = max(0.0, temp - spread), min(temp + spread, _HOTTEST), exponent

    def apply(self, c: Candidates) -> None:
        if len(c) < 2:
            return
        p = c.probs()
        entropy = -float(np.dot(p, np.log(p, out=np.zeros_like(p), where=p > 0)))
        temp = self.low + (self.high - self.low) * min(max(0.0, entropy / np.log(len(c))), 1.0) ** self.exponent
        if temp < 1e-6:  # the entropy and `low` are 0: only the best token remains
            c.keep_top(1)
        else:
            with np.errstate(over="ignore"):  # a logit that is penalised beyond all numbers becomes -inf
                c.replace(np.divide(c.logits, np.float32(temp), dtype=np.float32), True)

    def __str__(self) -> str:
        return f"{self.name}({self.low:g}..{self.high:g}, {self.exponent:g})"


class Greedy(Sampler):
    """The likeliest."""

    name, keeps_best = "greedy", True

    def apply(self, c: Candidates) -> None:
        best = c.best()
        c.keep(slice(best, best + 1))
