"""Speculative decoding: tokens are guessed cheaply and evaluated in one batch; those that the model would have chosen
itself are kept. Leviathan et al. 2022 and Chen et al. 2023 (a draft model), Saxena 2023 (prompt lookup).

Under greedy sampling the tokens are those of plain decoding; under any other they have the same distribution, and for
guesses that are no random choice (prompt lookup) the same seed gives the same text. This holds as far as logits do not
depend on how many tokens are evaluated together: they differ in their last bits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pyggml.errors import ModelError, SamplerError
from pyggml.models.memory.kv_cells import Floats

from ..batch import Batch
from ..context import LlamaContext
from ..samplers import SamplerChain, SamplingParams
from .generation import Generation, Token

if TYPE_CHECKING:
    from ..loaded import LoadedModel
    from ..vocab import Vocab

Probs = npt.NDArray[np.float64]


class Guess(NamedTuple):
    """A token, and the probabilities [n_vocab] it was drawn from; None where it was not drawn but is the only guess."""

    token: int
    probs: Probs | None = None


class Drafter(Protocol):
    """Guesses how a text goes on."""

    def draft(self, tokens: Sequence[int], n: int) -> list[Guess]:
        """Up to `n` guesses of what follows `tokens`. How many there are must not depend on the last ones' draw."""
        ...


@dataclass
class DraftStats:
    """`n_drafted` tokens were guessed in `n_drafts` batches, and `n_accepted` of them were kept."""

    n_drafts: int = 0
    n_drafted: int = 0
    n_accepted: int = 0

    @property
    def acceptance(self) -> float:
        """The part of the guesses that were kept."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0

    def __str__(self) -> str:
        return f"draft acceptance = {self.acceptance:.5f} ({self.n_accepted} accepted / {self.n_drafted} drafted)"


class LookupDrafter:
    """Guesses that the text goes on as it did the last time its `ngram_max` last tokens occurred; else, its fewer last
    tokens, down to `ngram_min`. Drafts shorter than `n_min` are not worth a batch."""

    def __init__(self, ngram_max: int = 4, ngram_min: int = 2, n_min: int = 0) -> None:
        if not 1 <= ngram_min <= ngram_max:
            raise SamplerError(f"prompt lookup: n-grams from {ngram_min} to {ngram_max} tokens make no sense")
        self._sizes, self._n_min = range(ngram_max, ngram_min - 1, -1), n_min
        self._seen: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # where the text went on after an n-gram

    def draft(self, tokens: Sequence[int], n: int) -> list[Guess]:
        tokens = list(tokens)
        if common_prefix(self._seen, tokens) < len(self._seen):
            self._after.clear()
            self._seen = []
        # n-grams that end before the last token: that of the end itself leads nowhere yet
        for end in range(max(len(self._seen), 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._seen = tokens
        for size in self._sizes:
            at = self._after.get(tuple(tokens[-size:]))
            if at is not None:
                found = tokens[at : at + n]
                return [Guess(t) for t in found] if len(found) >= self._n_min else []
        return []


class ModelDrafter:
    """Lets a smaller model go on, by the samplers of `params` that need no memory of the text.

    It stops where its likeliest token has a probability below `p_min`, but not before `n_min` tokens. `ctx` is its own
    context, with an empty sequence 0; of a text that does not fit it sees the end.
    """

    def __init__(self, ctx: LlamaContext, params: SamplingParams, n_min: int = 0, p_min: float = 0.0) -> None:
        check_rewinds(ctx)
        if ctx.model.architecture.encode is not None:
            raise ModelError(f"{ctx.model.arch} is an encoder-decoder, which cannot draft: it goes on with no text")
        if ctx.memory.states is not None:
            raise ModelError("a model with recurrent layers cannot draft: its state goes back by one decode only")
        self.ctx, self._n_min, self._p_min = ctx, n_min, p_min
        self._chain = SamplerChain(_memoryless(params), ctx.model.vocab)
        self._is_greedy = params.temp <= 0 and params.dynatemp_range <= 0
        self._rng = _rng(params, 2)
        self._start = 0  # where in the text it begins to see it
        self._done: list[int] = []  # evaluated, from there on

    def draft(self, tokens: Sequence[int], n: int) -> list[Guess]:
        ctx, guesses = self.ctx, list[Guess]()
        n = min(n, ctx.n_ctx // 2)
        if not 0 < len(tokens) - self._start <= ctx.n_ctx - n:
            self._start = max(len(tokens) - ctx.n_ctx // 2, 0)
        self._evaluate(tokens[self._start :])
        while True:
            logits = ctx.logits[-1]
            if len(guesses) >= self._n_min and _p_best(logits) < self._p_min:
                return guesses
            guesses.append(self._guess(logits))
            token = guesses[-1].token
            if len(guesses) == n or ctx.model.vocab.is_eog(token):
                return guesses
            ctx.decode((token,))
            self._done.append(token)

    def _evaluate(self, tokens: Sequence[int]) -> None:
        """Bring the context to the end of `tokens`."""
        ctx = self.ctx
        n = min(common_prefix(self._done, tokens), len(tokens) - 1)
        del self._done[n:]
        ctx.memory.seq_rm(0, n, -1)
        for i in range(n, len(tokens), ctx.n_batch):
            part = tokens[i : i + ctx.n_batch]
            ctx.decode(part)
            self._done += part

    def _guess(self, logits: Floats) -> Guess:
        if self._is_greedy:
            return Guess(self._chain.sample(logits))
        ids, p = self._chain.distribution(logits)
        probs = np.zeros(len(logits))
        probs[ids] = p
        return Guess(int(ids[_draw(p, self._rng)]), probs)


@dataclass
class SpeculativeGeneration(Generation):
    """A generation that lets `drafter` guess up to `n_max` tokens at a time. `stats` tells how many were right.

    Raises SamplerError together with guidance, ModelError for a model whose cache cannot go back.
    """

    drafter: Drafter = field(kw_only=True)
    n_max: int = field(default=3, kw_only=True)
    stats: DraftStats = field(default_factory=DraftStats, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guidance is not None:
            raise SamplerError("speculative decoding and classifier-free guidance cannot be combined")
        check_rewinds(self.ctx)
        self._rng = _rng(self.chain.params, 3)
        self._guesses: list[Guess] = []  # of the tokens that follow, evaluated
        self._rows: Iterator[Floats] = iter(())  # the logits behind each of them
        self._end = 0  # the position behind what is sure
        self._batch: list[int] = []  # what was evaluated last, from the position _start on
        self._start = 0
        self._again: list[int] = []  # the part of it that is sure and must be evaluated again

    def __iter__(self) -> Generator[Token, None, None]:
        if self.long is not None and self.long.grp_attn_n > 1:
            raise SamplerError("speculative decoding and self-extend cannot be combined")
        try:
            yield from super().__iter__()
        finally:
            self._forget()

    def rest(self) -> str:
        self._forget()
        return super().rest()

    def _prefill(self) -> Floats:
        logits = super()._prefill()
        self._end = self.ctx.memory.seq_pos_max(0) + 1
        return logits

    def _forget(self) -> None:
        """Remove the guesses that were not taken."""
        if self._guesses:
            if not self.ctx.memory.seq_rm(0, self._end, -1):  # a state goes back to that before the batch
                self.ctx.memory.seq_rm(0, self._start, -1)
                self._again = self._batch[: self._end - self._start]
            self._guesses = []

    def _sample(self, logits: Floats) -> int:
        guess = self._guesses[0] if self._guesses else None
        if guess is None or guess.probs is None or self.chain.traces is not None:  # a trace shows a draw
            token = self.chain.sample(logits)
        else:
            ids, p = self.chain.distribution(logits)
            token = chosen(ids, p, guess.token, guess.probs, self._rng)
        if guess is not None and guess.token == token:
            self.stats.n_accepted += 1
        return token

    def _has_room(self) -> bool:
        if self._guesses and self._guesses[0].token == self.ids[-1]:
            return True  # it is evaluated
        self._forget()
        has_room = super()._has_room()
        self._end = self.ctx.memory.seq_pos_max(0) + 1 + len(self._again)  # the context may have been shifted
        return has_room

    def _step(self, token: int) -> Floats:
        if self._guesses:  # the first was right, see _has_room
            del self._guesses[0]
        else:
            if len(self._again) > self.n_max:  # so that they do not become ever more
                self.ctx.decode(self._again)
                self._again = []
            self._guesses = self._draft()
            self._start = self._end - len(self._again)
            self._batch = [*self._again, token, *(g.token for g in self._guesses)]
            batch = Batch()
            for i, t in enumerate(self._batch, self._start):
                batch.add(t, i, 0, i >= self._end)
            self.ctx.decode(batch)
            self._again = []
            self._rows = iter(self.ctx.logits)
        self._end += 1
        return next(self._rows)

    def _draft(self) -> list[Guess]:
        memory = self.ctx.memory
        # no guesses where the context is shifted before it is quite full
        n_again = len(self._again)
        n = min(self.n_max, memory.size - memory.used - n_again - 2, self.ctx.n_batch - n_again - 1)
        if self.n_predict >= 0:
            n = min(n, self.n_predict - len(self.ids) - 1)
        guesses = self.drafter.draft([*self.prompt, *self.ids], n) if n > 0 else []
        self.stats.n_drafts += bool(guesses)
        self.stats.n_drafted += len(guesses)
        return guesses


def with_draft(
    g: Generation, draft_model: LoadedModel | None, draft_max: int = 3, draft_min: int = 0, draft_p_min: float = 0.0
) -> SpeculativeGeneration:
    """The generation `g`, which has not begun, with guesses of `draft_model`, or by prompt lookup where it is None.

    draft_max    tokens guessed at a time, at most
    draft_min    ... and at least: a model goes on, unsure as it may be; what lookup finds is not used if it is shorter
    draft_p_min  a model stops where its likeliest token is less likely

    Raises SamplerError for numbers that make no sense, ModelError where the models' vocabularies differ.
    """
    if not 0 <= draft_min <= draft_max or draft_max < 1:
        raise SamplerError(f"drafts of {draft_min} to {draft_max} tokens make no sense")
    if not 0 <= draft_p_min <= 1:
        raise SamplerError(f"draft_p_min must be from 0 to 1, not {draft_p_min}")
    drafter: Drafter
    if draft_model is None:
        drafter = LookupDrafter(n_min=draft_min)
    else:
        check_vocabularies(g.ctx.model.vocab, draft_model.vocab)
        flash_attn = any(kv.flash_attn for kv in g.ctx.memory.caches)
        ctx = LlamaContext(draft_model, g.ctx.n_ctx, n_threads=g.ctx.n_threads, flash_attn=flash_attn)
        drafter = ModelDrafter(ctx, g.chain.params, draft_min, draft_p_min)
    of_g: dict[str, Any] = {f.name: getattr(g, f.name) for f in fields(g) if f.init}
    return SpeculativeGeneration(**of_g, drafter=drafter, n_max=draft_max)


def chosen(ids: npt.NDArray[np.int64], p: Probs, guess: int, q: Probs, rng: np.random.Generator) -> int:
    """A token with probabilities `p` (of the tokens `ids`), from a guess that was drawn with probabilities `q` (of all
    tokens): the guess with probability min(1, p / q), else one by what p has more than q."""
    at = np.flatnonzero(ids == guess)
    p_guess = p[at[0]] if len(at) else 0.0
    if rng.random() * q[guess] < p_guess:
        return guess
    rest = np.maximum(p - q[ids], 0.0)
    if not rest.any():  # p is q but for rounding
        return guess
    return int(ids[_draw(rest, rng)])


def check_rewinds(ctx: LlamaContext) -> None:
    """Raises ModelError where wrong guesses cannot be removed: a sliding window has dropped what came before."""
    if any(kv.n_swa for kv in ctx.memory.caches):
        raise ModelError("speculative decoding does not work with the cache of a sliding window: it cannot go back")


def check_vocabularies(target: Vocab, draft: Vocab) -> None:
    """Raises ModelError where a draft model's tokens are not those of the model."""
    if target.n_tokens != draft.n_tokens:
        raise ModelError(f"the draft model has {draft.n_tokens} tokens, the model {target.n_tokens}")
    for i in range(target.n_tokens):
        if target.text(i) != draft.text(i):
            raise ModelError(f"token {i} is {draft.text(i)!r} for the draft model and {target.text(i)!r} for the model")


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences (of the same type) begin with alike."""
    n = min(len(a), len(b))
    return n if a[:n] == b[:n] else bisect_left(range(n), True, key=lambda i: a[: i + 1] != b[: i + 1])


def _memoryless(p: SamplingParams) -> SamplingParams:
    """Without what depends on the text before: a draft that is rejected must leave no trace."""
    return replace(
        p,
        repeat_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        dry_multiplier=0.0,
        mirostat=0,
        grammar=None,
        json_schema=None,
    )


def _rng(params: SamplingParams, stream: int) -> np.random.Generator:
    """Random numbers of the seed, others than the chain's."""
    seed = params.seed
    return np.random.default_rng(None if seed is None or seed < 0 else (seed, stream))


def _draw(weights: Probs, rng: np.random.Generator) -> int:
    sums = np.cumsum(weights)
    total = sums.item(-1)
    row = int(np.searchsorted(sums, rng.random() * total, "right"))
    return min(row, int(np.searchsorted(sums, total)))


def _p_best(logits: Floats) -> float:
    """The probability of the likeliest token."""
    return 1.0 / float(np.exp(logits - logits.max()).sum(dtype=np.float64))
