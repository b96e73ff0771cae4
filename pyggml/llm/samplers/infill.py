"""For text that is filled in between other text: it ends when the model is not sure how to go on.

Semantics: llama.cpp's infill sampler (llama_sampler_init_infill).
"""

from __future__ import annotations

import numpy as np

from pyggml.llm.vocab import Vocab

from .base import Sampler, Setting
from .candidates import Candidates

_LONGEST = 256  # candidates that are compared with each other
_MIN_P = 0.2


class Infill(Sampler):
    """Decides when a text that fills a gap should end. It stands after top_k and top_p in the chain.

    First it compares two numbers: the probability of all tokens that end the generation, times three times the number
    of candidates, and the probability of all other tokens. When the first is larger, only tokens that end the
    generation stay. Otherwise tokens that begin alike are combined into the likeliest of them. Then tokens with a
    probability below 0.2 are left out, and, when n tokens stay, those below 1 / (n + 1). When no token stays, the
    generation ends."""

    name = "infill"

    @classmethod
    def of(cls, setting: Setting) -> Sampler | None:
        return cls(setting.vocab)

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    def apply(self, c: Candidates) -> None:
        c.keep_top(min(len(c), _LONGEST))
        vocab, tokens, p = self._vocab, c.tokens().tolist(), c.probs()
        ends = np.array([vocab.is_eog(t) for t in tokens])
        if 3 * p[ends].sum() * len(p) > p[~ends].sum():
            c.keep(ends)
            return
        pieces = [vocab.token_to_piece(t) for t in tokens]
        for i in range(len(p)):
            for j in range(i + 1, len(p)):  # sorted: i is the likelier
                a, b = pieces[i], pieces[j]
                if p[i] > 0 and p[j] > 0 and not (ends[i] or ends[j]) and (a.startswith(b) or b.startswith(a)):
                    p[i] += p[j]
                    p[j] = 0
        keep = (p >= _MIN_P) | ends
        n_text = int(np.count_nonzero(keep & ~ends))
        end = vocab.eos if vocab.eot is None else vocab.eot
        if n_text == 0 and end is not None:
            c.ids, p, keep = np.array([end], np.int64), np.ones(1), np.ones(1, np.bool_)
        elif n_text:
            p /= p[keep].sum()
            keep &= (p >= 1 / (n_text + 1)) | ends
        with np.errstate(divide="ignore"):
            c.replace(np.log(p).astype(np.float32), False)
        c.keep(keep)
