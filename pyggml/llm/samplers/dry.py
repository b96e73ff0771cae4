"""DRY, "don't repeat yourself": tokens that would go on with a repeat of earlier text become unlikely.

Source: p-e-w, text-generation-webui #5677; parameters as in llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pyggml.llm.vocab import Vocab

from .base import Sampler, Setting
from .candidates import Candidates

_MAX_PENALTY = 3e38  # float32
_MAX_BREAKER_TAIL = 20  # tokens
Breakers = dict[int, set[tuple[int, ...]]]  # last token -> the tokens before it that make it a breaker


class Dry(Sampler):
    """When the last m >= allowed_length tokens occurred before, the token that followed them there loses
    multiplier * base ** (m - allowed_length), with the largest such m. Repeats are searched only among the last
    `last_n` tokens, and not beyond the last sequence breaker."""

    name = "dry"

    @classmethod
    def of(cls, setting: Setting) -> Sampler | None:
        p = setting.params
        if p.dry_multiplier <= 0 or p.dry_penalty_last_n == 0:
            return None
        breakers = find_breakers(p.dry_sequence_breakers, setting.vocab)
        return cls(p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_penalty_last_n, breakers)

    def __init__(self, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: Breakers) -> None:
        self.multiplier, self.base, self.allowed_length = multiplier, base, allowed_length
        self._last_n, self._breakers = last_n, breakers
        # The largest exponent: above it, the penalty would be infinite.
        most = min(_MAX_PENALTY / multiplier, 1e300)
        self._max = math.log(most) / math.log(base) if base > 1 else math.inf
        self.reset()

    def reset(self) -> None:
        self._n = 0  # tokens so far
        self._since_breaker = 0
        self._tokens = np.zeros(256, np.int64)
        self._repeat = np.zeros(257, np.int64)  # [j]: how many tokens before token j equal the last ones

    def prime(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.accept(token)

    def accept(self, token: int) -> None:
        n = self._n
        if n == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
            self._repeat = np.concatenate((self._repeat, np.zeros(n, np.int64)))
        self._repeat[1 : n + 1] = (self._repeat[:n] + 1) * (self._tokens[:n] == token)
        self._tokens[n] = token
        self._n = n + 1
        self._since_breaker = 0 if self._ends_breaker(token) else self._since_breaker + 1

    def apply(self, c: Candidates) -> None:
        n = self._n
        start = 0 if self._last_n < 0 else max(0, n - self._last_n)
        if min(self._since_breaker, n - start) < self.allowed_length:
            return
        places = np.arange(start, n)
        repeat = np.minimum(self._repeat[start:n], np.minimum(places - start, self._since_breaker))
        found = repeat >= self.allowed_length
        if not found.any():
            return
        longest: dict[int, int] = {}
        for token, m in zip(self._tokens[start:n][found].tolist(), repeat[found].tolist(), strict=True):
            longest[token] = max(m, longest.get(token, 0))
        over = np.minimum(np.array(list(longest.values()), np.float64) - self.allowed_length, self._max)
        rows, which = c.find(np.array(list(longest), np.int64))
        c.writable()[rows] -= (self.multiplier * self.base**over)[which].astype(np.float32)

    def _ends_breaker(self, token: int) -> bool:
        for before in self._breakers.get(token, ()):
            m = len(before)
            if m == 0 or tuple(self._tokens[max(0, self._n - 1 - m) : self._n - 1].tolist()) == before:
                return True
        return False

    def __str__(self) -> str:
        return f"{self.name}({self.multiplier:g} * {self.base:g} ** (n - {self.allowed_length}))"


def find_breakers(texts: Sequence[str], vocab: Vocab) -> Breakers:
    """The token sequences that contain one of `texts`: a single token that contains it, or a token that ends with its
    beginning, followed by the tokens of the rest."""
    breakers: Breakers = {}
    pieces = [vocab.token_to_piece(i) for i in range(vocab.n_tokens)]
    for text in texts:
        needle = text.encode()
        if not needle:
            continue
        tails = {k: tuple(_tokens_of(needle[k:], vocab)[:_MAX_BREAKER_TAIL]) for k in range(1, len(needle))}
        for token, piece in enumerate(pieces):
            if needle in piece:
                breakers.setdefault(token, set()).add(())
                continue
            for k, tail in tails.items():
                if tail and piece.endswith(needle[:k]):
                    breakers.setdefault(tail[-1], set()).add((token, *tail[:-1]))
    return breakers


def _tokens_of(text: bytes, vocab: Vocab) -> list[int]:
    """The tokens of a text that continues another text. None when it starts within a character."""
    try:
        return vocab.tokenize(text.decode(), add_special=False, continued=True)
    except UnicodeDecodeError:
        return []
