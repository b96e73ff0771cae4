"""How much work a grammar makes before its first token, and the end of it."""

from __future__ import annotations

from pyggml import limits
from pyggml.errors import SamplerError


class Effort:
    """Counts the steps that are taken for one grammar. Small texts can ask for very many: rules that double, or words
    that are all compared with each other."""

    def __init__(self) -> None:
        self._n = 0

    def spend(self, n: int) -> None:
        """Take note of `n` steps. Raises SamplerError when they are too many."""
        self._n += n
        if self._n > limits.GRAMMAR_STEPS:
            raise SamplerError(
                f"the grammar is too large: it takes more steps than limits.GRAMMAR_STEPS ({limits.GRAMMAR_STEPS});"
                " have fewer repetitions, or fewer alternatives that begin alike"
            )
