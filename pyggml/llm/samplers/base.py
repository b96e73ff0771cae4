"""The base class of samplers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pyggml.errors import SamplerError
from pyggml.types import Floats

from .candidates import Candidates

if TYPE_CHECKING:
    from pyggml.llm.vocab import Vocab

    from .params import SamplingParams

# Takes the ids so far and the logits of the next token, which it may change; returns the logits to go on with.
LogitsProcessor = Callable[[npt.NDArray[np.int64], Floats], Floats]


class Setting(NamedTuple):
    """What a sampler is made for: the parameters of its chain, the vocabulary, and random numbers to draw with."""

    params: SamplingParams
    vocab: Vocab
    rng: np.random.Generator


class Sampler:
    """One step of a chain.

    name        what the chain calls it
    keeps_best  whether the likeliest token stays the likeliest (greedy sampling can do without the sampler)
    """

    name = ""
    keeps_best = False

    @classmethod
    def of(cls, setting: Setting) -> Sampler | None:
        """The sampler that the parameters ask for, or None when they switch it off."""
        raise NotImplementedError

    def apply(self, c: Candidates) -> None:
        """Narrow the candidates down, or change their logits."""
        raise NotImplementedError

    def prime(self, tokens: Sequence[int]) -> None:
        """Take note of the prompt."""

    def accept(self, token: int) -> None:
        """Take note of the token that was chosen."""

    def reset(self) -> None:
        """Forget all tokens."""

    def __str__(self) -> str:
        return self.name


class Processors(Sampler):
    """The caller's functions, one after the other: each takes the logits that the one before returned. Raises
    SamplerError for logits of another shape."""

    name = "logits-processor"

    def __init__(self, functions: Sequence[LogitsProcessor]) -> None:
        self._functions = tuple(functions)
        self._ids: list[int] = []
        for f in self._functions:
            if not callable(f):
                raise SamplerError(f"a logits_processor must be a function, not {f!r:.60}")

    def apply(self, c: Candidates) -> None:
        logits, ids = np.array(c.logits), np.array(self._ids, np.int64)
        for f in self._functions:
            logits = np.asarray(f(ids, logits), np.float32)
            if logits.shape != c.logits.shape:
                raise SamplerError(
                    f"a logits_processor must return logits of shape {c.logits.shape}, not {logits.shape}"
                )
        c.replace(logits, False)

    def prime(self, tokens: Sequence[int]) -> None:
        self._ids += tokens

    def accept(self, token: int) -> None:
        self._ids.append(token)

    def reset(self) -> None:
        self._ids.clear()
