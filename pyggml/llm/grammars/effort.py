"""A bound on the work that a grammar makes before its first token."""

from __future__ import annotations

from pyggml import limits
from pyggml.errors import SamplerError


class Effort:
    """Counts the steps taken for one grammar. A short text can ask for very many, by rules that double or by words that
    are all compared with each other."""

    def __init__(self) -> None:
        self._n = 0

    def spend(self, n: int) -> None:
        """Count `n` steps. Raises SamplerError when there are too many."""
        self._n += n
        if self._n > limits.GRAMMAR_STEPS:
            raise SamplerError(
                f"the grammar is too large: it takes more steps than limits.GRAMMAR_STEPS ({limits.GRAMMAR_STEPS});"
                " have fewer repetitions, or fewer alternatives that begin alike"
            )
