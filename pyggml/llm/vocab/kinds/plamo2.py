"""`tokenizer.ggml.model = plamo2`: the cut into tokens with the highest sum of scores, found from the end. No library
has it: scores are rounded to 1e-4, and a character without a token costs 1000 and becomes its bytes."""

from __future__ import annotations

import math

from pyggml.errors import ModelError

from ..tokens import KEY, Tokens, TokenType, utf8

_UNKNOWN = 10_000_000  # what a character without a token costs, in 1e-4
_INVALID = -20_000_000  # tokens with no more than this are not used


class PLaMo2:
    """Ids of texts by scores."""

    def __init__(self, tokens: Tokens) -> None:
        """Raises ModelError where a byte has no token."""
        self._texts, self._byte_ids = tokens.texts, list[int]()
        for byte, token in enumerate(tokens.byte_ids()):
            if token is None or tokens.types[token] != TokenType.BYTE:
                raise ModelError(f"{KEY}tokens: there is no token for byte 0x{byte:02X}")
            self._byte_ids.append(token)
        self._costs: dict[str, tuple[int, int]] = {}
        self._longest: dict[str, int] = {}  # token by first character
        for i, (text, score) in enumerate(zip(tokens.texts, tokens.scores, strict=True)):
            if tokens.types[i] == TokenType.BYTE or not math.isfinite(score):
                continue
            cost = -int(math.copysign(math.floor(abs(score * 1e4) + 0.5), score))
            if -cost > _INVALID:
                self._costs[text] = (i, cost)
                self._longest[text[0]] = max(len(text), self._longest.get(text[0], 1))

    def encode(self, text: str) -> list[int]:
        """Ids of a text; a byte order mark at its start is dropped."""
        text = text.removeprefix("\ufeff")
        n, costs, longest = len(text), self._costs, self._longest
        best = [0] * (n + 1)  # cost of what begins at each place
        step: list[tuple[int, int]] = [(-1, 0)] * n  # its first token, and where that ends
        for at in range(n - 1, -1, -1):
            least, first = 1 << 60, (-1, at + 1)
            for end in range(min(n, at + longest.get(text[at], 0)), at, -1):
                token = costs.get(text[at:end])
                if token is not None and best[end] + token[1] < least:
                    least, first = best[end] + token[1], (token[0], end)
            if best[at + 1] + _UNKNOWN < least:
                least, first = best[at + 1] + _UNKNOWN, (-1, at + 1)
            best[at], step[at] = least, first
        out, at = list[int](), 0
        while at < n:
            token, end = step[at]
            out += [token] if token >= 0 else [self._byte_ids[b] for b in utf8(text[at])]
            at = end
        return out

    def piece(self, token: int) -> bytes:
        """The bytes of a normal token."""
        return utf8(self._texts[token])
