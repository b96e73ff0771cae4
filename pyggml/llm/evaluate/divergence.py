"""Compare a model with another one (the base) whose log-probabilities were saved: the Kullback-Leibler divergence of
their predictions, with the statistics of llama.cpp's perplexity tool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pyggml.errors import ModelError
from pyggml.types import Floats

from ..decoder import Decoder
from ..options import ContextOptions
from .chunks import bos_of, new_context, predicted
from .logits_file import LogitsFile

if TYPE_CHECKING:
    from ..loaded import LoadedModel

_LEAST = -16.0  # tokens whose log-probability in the base is lower do not count
_FEW = 10  # with so few values no uncertainty is computed
Doubles = npt.NDArray[np.float64]


class Uncertain(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float


@dataclass
class Divergence:
    """What was measured for each predicted token, in order (arrays [n]), and statistics of it.

    nll, nll_base  negative log-likelihoods by the model and by the base
    kld            KL divergence of the model's distribution from the base's, in nats
    p_diff         probability of the token by the model, less that by the base
    same_top       whether model and base find the same token likeliest
    """

    n_done: int = 0
    n_chunks: int = 0
    nll: Doubles = field(default_factory=lambda: np.empty(0))
    nll_base: Doubles = field(default_factory=lambda: np.empty(0))
    kld: Doubles = field(default_factory=lambda: np.empty(0))
    p_diff: Doubles = field(default_factory=lambda: np.empty(0))
    same_top: Doubles = field(default_factory=lambda: np.empty(0))

    @property
    def ppl(self) -> Uncertain:
        """Perplexity of the model."""
        return _exponential(mean(self.nll))

    @property
    def ppl_base(self) -> Uncertain:
        """Perplexity of the base."""
        return _exponential(mean(self.nll_base))

    @property
    def correlation(self) -> float:
        """The correlation of the logarithms of the two perplexities."""
        errors = mean(self.nll).error * mean(self.nll_base).error
        return self._covariance / errors if errors > 0 else 0.0

    @property
    def log_ratio(self) -> Uncertain:
        """ln(PPL / PPL of the base)."""
        a, b = mean(self.nll), mean(self.nll_base)
        return Uncertain(a.value - b.value, _root(a.error**2 + b.error**2 - 2 * self._covariance))

    @property
    def ratio(self) -> Uncertain:
        """PPL / PPL of the base."""
        return _exponential(self.log_ratio)

    @property
    def difference(self) -> Uncertain:
        """PPL - PPL of the base."""
        a, b = self.ppl, self.ppl_base
        covariance = a.value * b.value * self._covariance
        return Uncertain(a.value - b.value, _root(a.error**2 + b.error**2 - 2 * covariance))

    @property
    def p_rms(self) -> Uncertain:
        """Root of the mean square of the differences of probabilities."""
        square = mean(self.p_diff**2)
        rms = sqrt(square.value)
        return Uncertain(rms, 0.5 / rms * square.error if rms > 0 else 0.0)

    @property
    def top(self) -> Uncertain:
        """The share of tokens for which model and base find the same token likeliest."""
        share, n = float(self.same_top.mean()), len(self.same_top)
        return Uncertain(share, sqrt(share * (1 - share) / (n - 1)) if n > 1 else 0.0)

    @property
    def _covariance(self) -> float:
        n = len(self.nll)
        if n < _FEW:
            return 0.0
        return float((self.nll * self.nll_base).mean() - self.nll.mean() * self.nll_base.mean()) / (n - 1)


def mean(values: Doubles) -> Uncertain:
    """The mean and its standard error (0 for very few values)."""
    n = len(values)
    value = float(values.mean())
    variance = float((values**2).mean()) - value**2
    return Uncertain(value, sqrt(variance / (n - 1)) if variance > 0 and n > _FEW else 0.0)


def divergence(model: LoadedModel, base: LogitsFile, context: ContextOptions | None = None) -> Iterator[Divergence]:
    """The divergence of a model from the base on the tokens saved in `base`. Yields after each chunk; the last one is
    the result.

    Raises ModelError for a model of another vocabulary, or that ends each text with eos.
    """
    if base.n_vocab != model.vocab.n_tokens:
        raise ModelError(f"the base has {base.n_vocab} tokens in its vocabulary, the model {model.vocab.n_tokens}")
    if model.vocab.add_eos:
        raise ModelError("the model ends each text with eos; what follows it could not be predicted")
    return _divergences(new_context(model, base.n_ctx, context), base)


def _divergences(ctx: Decoder, base: LogitsFile) -> Iterator[Divergence]:
    columns: list[list[float]] = [[] for _ in range(5)]
    with ctx:
        for i in range(base.n_chunks):
            saved = base.log_probs(i)
            for logits, tokens in predicted(ctx, base.tokens[i], base.n_ctx // 2, bos_of(ctx.model)):
                for row, token in zip(logits, tokens, strict=True):
                    for column, value in zip(columns, _compared(row, next(saved), int(token)), strict=True):
                        column.append(value)
            yield Divergence(i + 1, base.n_chunks, *map(np.array, columns))


def _compared(logits: Floats, base: Floats, token: int) -> tuple[float, float, float, float, float]:
    """The five of `Divergence` for one token."""
    top = logits.max()
    log_probs = logits - (top + np.float32(np.log(np.exp(logits - top).sum(dtype=np.float64))))
    counts = base > _LEAST
    kld = float((np.exp(base[counts]) * (base[counts] - log_probs[counts])).sum(dtype=np.float64))
    nll, nll_base = -log_probs.item(token), -base.item(token)
    return nll, nll_base, kld, exp(-nll) - exp(-nll_base), float(logits.argmax() == base.argmax())


def _exponential(x: Uncertain) -> Uncertain:
    return Uncertain(exp(x.value), exp(x.value) * x.error)


def _root(x: float) -> float:
    return sqrt(x) if x > 0 else 0.0
