"""Drafters for `Llama(draft_model=...)`: they guess tokens, which the model checks several at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..llm.generate.drafters import Guess

Ids = npt.NDArray[np.intc]


class LlamaDraftModel(ABC):
    """Called with the tokens of a text, [n]; returns guesses of the tokens that follow, as many as it likes."""

    @abstractmethod
    def __call__(self, input_ids: Ids, /, **kwargs: Any) -> Ids: ...


class LlamaPromptLookupDecoding(LlamaDraftModel):
    """Guesses that a text goes on as it did where its last tokens occurred first: up to `num_pred_tokens` tokens, found
    by the last `max_ngram_size` tokens, or by fewer."""

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        self.max_ngram_size, self.num_pred_tokens = max_ngram_size, num_pred_tokens

    @staticmethod
    def find_candidate_pred_tokens(input_ids: Ids, max_ngram_size: int, num_pred_tokens: int) -> Ids:
        """The tokens after the first place where the last tokens of a text occurred before; none without a place."""
        n = len(input_ids)
        for size in range(min(max_ngram_size, n - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(input_ids, size)[: n - size]
            places = np.flatnonzero((windows == input_ids[n - size :]).all(1))
            if len(places):
                return input_ids[places[0] + size :][:num_pred_tokens]
        return np.array([], np.intc)

    def __call__(self, input_ids: Ids, /, **kwargs: Any) -> Ids:
        return self.find_candidate_pred_tokens(input_ids, self.max_ngram_size, self.num_pred_tokens)


class CalledDrafter:
    """The drafter that asks a `LlamaDraftModel`."""

    def __init__(self, model: LlamaDraftModel) -> None:
        self._model = model

    def draft(self, tokens: Sequence[int], n: int) -> list[Guess]:
        """Up to `n` guesses of the tokens that follow `tokens`."""
        return [Guess(int(t)) for t in self._model(np.array(tokens, np.intc))[:n]]
