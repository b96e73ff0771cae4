"""Samplers in a row: from the logits of a step to a token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyggml.errors import SamplerError
from pyggml.llm.vocab import Vocab
from pyggml.native.sampling import TopDraw
from pyggml.types import Floats

from .adaptive import AdaptiveP
from .base import LogitsProcessor, Processors, Sampler, Setting
from .candidates import LONG, Candidates, Ids
from .mirostat import Mirostat
from .params import SAMPLERS, SamplingParams
from .penalties import LogitBias
from .temperature import COLDEST, Greedy, Temperature
from .trace import StepTrace, Tracer
from .truncate import MinP, TopK, TopP


class SamplerChain:
    """The samplers that `params` ask for, in order, and the draw at their end. `sample` chooses a token; `accept` tells
    the chain which token was taken (it may be another one). `processors` change the logits before all samplers.

    samplers   the samplers that have an effect, as objects
    traces     None, or a list to which `sample` appends what each sampler did

    Tokens that the model's file suppresses are never chosen. Raises SamplerError for a bias of a token outside the
    vocabulary and for a bad grammar.
    """

    def __init__(self, params: SamplingParams, vocab: Vocab, processors: Sequence[LogitsProcessor] = ()) -> None:
        self.params = params
        self.traces: list[StepTrace] | None = None
        seed = None if params.seed is None or params.seed < 0 else params.seed
        self._rng = np.random.default_rng(seed)
        self.samplers = _build(params, vocab, np.random.default_rng(None if seed is None else (seed, 1)))
        if processors:
            self.samplers.insert(0, Processors(processors))
        at = next((i for i, s in enumerate(self.samplers) if isinstance(s, (TopK, Greedy))), len(self.samplers))
        self._first, self._last = self.samplers[:at], self.samplers[at:]
        self._top_draw = _top_draw(params, [type(s) for s in self._last])
        self._is_greedy = len(self._last) == 1 and isinstance(self._last[0], Greedy)
        self._accepting = [s for s in self.samplers if type(s).accept is not Sampler.accept]

    def sample(self, logits: Floats) -> int:
        """A token for the logits [n_vocab] of one step, which stay as they are. Raises SamplerError when no token is
        left, or for NaN."""
        if self.traces is not None:
            return self._traced(logits, self.traces)
        c = Candidates(logits)
        for s in self._first:
            s.apply(c)
        if self._is_greedy:
            return c.token(c.best())
        if self._top_draw is not None:
            row = self._top_draw.draw(c.logits, self._rng)
            if row is not None:
                return c.token(row)
        for s in self._last:
            s.apply(c)
        return c.draw(self._rng)

    def distribution(self, logits: Floats) -> tuple[Ids, np.ndarray]:
        """The tokens that `sample` would choose from, and their probabilities (float64). With XTC they may differ from
        call to call, because it draws a random number."""
        c = Candidates(logits)
        for s in self.samplers:
            s.apply(c)
        return c.tokens(), c.probs()

    def sample_and_probs(self, logits: Floats) -> tuple[int, Ids, np.ndarray]:
        """As `sample`, with the tokens that were left to choose from and their probabilities (float64)."""
        c = Candidates(logits)
        for s in self.samplers:
            s.apply(c)
        return c.draw(self._rng), c.tokens(), c.probs()

    def prime(self, tokens: Sequence[int]) -> None:
        """Let the samplers that look back see the prompt."""
        for s in self.samplers:
            s.prime(tokens)

    def accept(self, token: int) -> None:
        """Let the samplers see the token that continues the text."""
        for s in self._accepting:
            s.accept(token)

    def reset(self) -> None:
        """Forget all tokens. The sequence of random numbers does not start again."""
        for s in self.samplers:
            s.reset()

    def _traced(self, logits: Floats, traces: list[StepTrace]) -> int:
        c = Candidates(logits)
        tracer = Tracer(c)
        for s in self.samplers:
            n_before = len(c)
            s.apply(c)
            tracer.watch(str(s), n_before, c)
        token = c.draw(self._rng)
        traces.append(tracer.step(token))
        return token

    def __str__(self) -> str:
        return " -> ".join(map(str, self.samplers)) or "draw"


def _build(p: SamplingParams, vocab: Vocab, rng: np.random.Generator) -> list[Sampler]:
    """The samplers with an effect, in order."""
    chain: list[Sampler] = []
    bias = dict(p.logit_bias)
    for token in bias:
        if not 0 <= token < vocab.n_tokens:
            raise SamplerError(f"logit_bias: token {token} is not in the vocabulary of {vocab.n_tokens}")
    bias |= dict.fromkeys(vocab.suppressed, -np.inf)
    if p.ignore_eos:
        bias |= dict.fromkeys(vocab.eog, -np.inf)
    if bias:
        chain.append(LogitBias(bias))
    if p.grammar is not None or p.json_schema is not None:
        from .grammar import Grammar  # slow to import, so only when it is needed

        chain.append(Grammar(vocab, p.grammar, p.json_schema))
    greedy = p.temp < COLDEST and p.dynatemp_range <= 0
    order = ("penalties", "dry", "temperature") if p.mirostat else p.order
    if not p.mirostat:  # it chooses among what all others leave, wherever it is named
        order = (*[name for name in order if name != AdaptiveP.name], AdaptiveP.name)
    for name in order:
        s = SAMPLERS[name].of(Setting(p, vocab, rng))
        if s is not None and not (greedy and s.keeps_best):
            chain.append(s)
    if greedy:
        chain.append(Greedy())
    elif p.mirostat:
        chain.append(Mirostat(p.mirostat, p.mirostat_tau, p.mirostat_eta, vocab.n_tokens))
    return chain


def _top_draw(p: SamplingParams, kinds: list[type[Sampler]]) -> TopDraw | None:
    """One call of C for these samplers and the draw, when they are top_k and, in this order, any of top_p, min_p and
    temperature, without `min_keep`; None for others."""
    usual = [kind for kind in (TopK, TopP, MinP, Temperature) if kind in kinds]
    if TopK not in kinds or kinds != usual or p.top_k > LONG or p.min_keep > 1:
        return None
    top_p = p.top_p if TopP in kinds else 1.0
    min_p = p.min_p if MinP in kinds else 0.0
    return TopDraw(p.top_k, top_p, min_p, p.temp if Temperature in kinds else 1.0)
