"""A limit on how long a model may reason before it answers."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

import numpy as np
import numpy.typing as npt

from pyggml.types import Floats

from ..vocab import Vocab


class ReasoningBudget:
    """A logits processor that ends reasoning after `n` tokens, or when `stop` is set: then the tokens of `end` are the
    only ones that can be chosen, one after the other.

    n_prompt  tokens of the prompt, which are no part of the reply
    n         tokens that the model may reason for; -1: any number
    begin     the text that begins reasoning; "" when the prompt has begun it
    mark      the text that ends reasoning; a model that writes it by itself is left alone
    end       the tokens that are written when the budget is spent: of a message, if there is one, and of `mark`
    stop      ends the reasoning, from any thread
    """

    def __init__(
        self,
        vocab: Vocab,
        n_prompt: int,
        n: int,
        begin: str,
        mark: str,
        end: Sequence[int],
        stop: Event | None = None,
    ) -> None:
        self.stop = stop or Event()
        self._vocab, self._at, self._n, self._begin, self._mark = vocab, n_prompt, n, begin, mark
        self._end = end
        self._text, self._n_thought = b"", 0
        self._forced: int | None = None  # how many tokens of `end` were forced
        self._over = False

    def __call__(self, ids: npt.NDArray[np.int64], logits: Floats) -> Floats:
        """The logits, or logits that leave one token."""
        while self._at < len(ids) and not self._over and self._forced is None:
            self._read(int(ids[self._at]))
            self._at += 1
        if self._over or self._waits():
            return logits
        spent = self.stop.is_set() or 0 <= self._n <= self._n_thought
        if self._forced is None and not spent:
            return logits
        at = self._forced or 0
        self._forced, self._over = at + 1, at + 1 == len(self._end)
        only = np.full_like(logits, -np.inf)
        only[self._end[at]] = 0
        return only

    def _waits(self) -> bool:
        """Whether reasoning has not begun yet."""
        return bool(self._begin) and self._forced is None

    def _read(self, token: int) -> None:
        """Read a token of the reply."""
        self._text += self._vocab.token_to_piece(token, special=True)
        said = self._text.decode("utf-8", "ignore")
        if self._begin:
            start = said.lstrip()
            if start.startswith(self._begin):
                self._text, self._begin = start[len(self._begin) :].encode(), ""
            elif not self._begin.startswith(start):
                self._over = True  # the reply does not reason
            return
        self._n_thought += 1
        self._over = self._mark in said
        self._text = self._text[-4 * len(self._mark.encode()) - 64 :]
