"""What every sampler is."""

from __future__ import annotations

from collections.abc import Sequence

from .candidates import Candidates


class Sampler:
    """One step of a chain.

    name        what the chain calls it
    keeps_best  whether the likeliest token stays the likeliest (greedy sampling can do without the sampler)
    """

    name = ""
    keeps_best = False

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
