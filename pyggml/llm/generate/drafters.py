"""Drafters guess the next tokens of a text, so that the model can check several at once.

There are three: one looks the text up in itself, one asks a smaller model, and one asks the draft heads in the model's
own file (multi-token prediction; Gloeckle et al. 2024, arXiv 2404.19737, and DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pyggml.errors import ModelError, SamplerError
from pyggml.types import Floats

from ..batch import Batch
from ..context import LlamaContext
from ..decoder import Decoder
from ..samplers import SamplerChain, SamplingParams
from ..vocab import Vocab
from .prefixes import common_prefix, keep_prefix

Probs = npt.NDArray[np.float64]


class Guess(NamedTuple):
    """A guessed token.

    probs  the probabilities [n_vocab] that the token was drawn from; None when it was not drawn, because the drafter
           has only this one guess
    """

    token: int
    probs: Probs | None = None


@runtime_checkable
class Drafter(Protocol):
    """Guesses how a text goes on."""

    def draft(self, tokens: Sequence[int], n: int) -> list[Guess]:
        """Up to `n` guesses of the tokens that follow `tokens`. Whether a guess is left out must not depend on which
        token was drawn for it."""
        ...


class LookupDrafter:
    """Guesses that the text goes on as it did before.

    It looks for the last place where the last `ngram_max` tokens occurred before, and guesses the tokens that followed.
    When there is no such place it tries fewer tokens, down to `ngram_min`. A draft of fewer than `n_min` tokens is not
    made: it is not worth a batch.
    """

    def __init__(self, ngram_max: int = 4, ngram_min: int = 2, n_min: int = 0) -> None:
        if not 1 <= ngram_min <= ngram_max:
            raise SamplerError(f"prompt lookup: n-grams from {ngram_min} to {ngram_max} tokens make no sense")
        self._sizes, self._n_min = range(ngram_max, ngram_min - 1, -1), n_min
        self._seen: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram: the index of the token after its last occurrence

    def draft(self, tokens: Sequence[int], n: int) -> list[Guess]:
        tokens = list(tokens)
        if common_prefix(self._seen, tokens) < len(self._seen):
            self._after.clear()
            self._seen = []
        # Only n-grams that end before the last token: nothing follows the one at the end yet.
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
    """Guesses what a smaller model says, drawn by the samplers of `params` that need no memory of the text.

    After `n_min` tokens it stops when its likeliest token has a probability below `p_min`. `ctx` is the context of the
    smaller model, with an empty sequence 0. A text that does not fit into `ctx` is cut: the smaller model sees its end.
    """

    def __init__(
        self,
        ctx: LlamaContext,
        params: SamplingParams,
        n_min: int = 0,
        p_min: float = 0.0,
        done: list[int] | None = None,
    ) -> None:
        """`done`: the tokens that sequence 0 of the context holds already; the list is kept up to date."""
        if ctx.model.architecture.encode is not None:
            raise ModelError(f"{ctx.model.arch} is an encoder-decoder, which cannot draft: it goes on with no text")
        if ctx.memory.equal_seqs:
            raise ModelError("a model with recurrent layers cannot draft: its state goes back by one decode only")
        self.ctx, self._n_min, self._p_min = ctx, n_min, p_min
        self._guesser = _Guesser(params, ctx.model.vocab)
        self._start = 0  # index in the text of the first token that the smaller model sees
        self._done = [] if done is None else done  # the tokens that it has evaluated, from `_start` on

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
            guesses.append(self._guesser.guess(logits))
            token = guesses[-1].token
            if len(guesses) == n or ctx.model.vocab.is_eog(token):
                return guesses
            ctx.decode((token,))
            self._done.append(token)

    def _evaluate(self, tokens: Sequence[int]) -> None:
        """Bring the context to the end of `tokens`."""
        ctx = self.ctx
        n = keep_prefix(ctx.memory, 0, self._done, tokens)
        del self._done[n:]
        for i in range(n, len(tokens), ctx.n_batch):
            part = tokens[i : i + ctx.n_batch]
            ctx.decode(part)
            self._done += part


class DraftPool:
    """Contexts of a smaller model for texts that go on side by side. A text takes one when it needs the first guess,
    that which holds most of its beginning, and gives it back at its end. `new_context` makes further ones. Raises
    ModelError for a model that cannot draft."""

    def __init__(self, new_context: Callable[[], LlamaContext]) -> None:
        self._new_context = new_context
        first = ModelDrafter(new_context(), SamplingParams())
        self._free: list[tuple[LlamaContext, list[int]]] = [(first.ctx, [])]

    def take(self, tokens: Sequence[int]) -> tuple[LlamaContext, list[int]]:
        """A context, and the list of the tokens that it holds."""
        if not self._free:
            return self._new_context(), []
        best = max(self._free, key=lambda f: common_prefix(f[1], list(tokens)))
        self._free.remove(best)
        return best

    def give(self, taken: tuple[LlamaContext, list[int]]) -> None:
        """Take a context back."""
        self._free.append(taken)


class PooledDrafter:
    """Guesses as a `ModelDrafter` does, in a context of a pool, until it is released."""

    def __init__(self, pool: DraftPool, params: SamplingParams, n_min: int, p_min: float) -> None:
        self._pool, self._options = pool, (params, n_min, p_min)
        self._taken: tuple[LlamaContext, list[int]] | None = None
        self._drafter: ModelDrafter | None = None

    def draft(self, tokens: Sequence[int], n: int) -> list[Guess]:
        if self._taken is None or self._drafter is None:
            self._taken = ctx, done = self._pool.take(tokens)
            self._drafter = ModelDrafter(ctx, *self._options, done)
        return self._drafter.draft(tokens, n)

    def release(self) -> None:
        """Give the context back."""
        if self._taken is not None:
            self._pool.give(self._taken)
            self._taken = self._drafter = None


class _Pair(NamedTuple):
    """What a draft head reads at an index of the text: the token there, and the hidden state of the token before."""

    token: int
    hidden: Floats


class _DraftHead:
    """A draft head with its context.

    The context has evaluated the pairs of the text from index `start` to `end`. The pair of index `base` has position 0
    in it, even when that pair has been forgotten.
    """

    def __init__(self, ctx: LlamaContext) -> None:
        ctx.keep_hidden()
        self.ctx, self.base, self.start, self.end = ctx, 0, 0, 0

    def evaluate(self, pairs: Sequence[_Pair], end: int) -> None:
        """Evaluate the pairs up to index `end` of the text that the head has not evaluated yet.

        `pairs` are the last pairs before `end`. When the context is full, the oldest pairs are forgotten. When `pairs`
        do not reach back to the last one evaluated, all earlier pairs are forgotten.
        """
        ctx, n = self.ctx, end - self.end
        most = min(len(pairs), ctx.n_ctx)
        if n > most:
            ctx.memory.clear()
            self.base = self.start = self.end = end - most
            n = most
        elif end - self.start > ctx.n_ctx:
            self.start = end - max(ctx.n_ctx // 2, n)
            ctx.memory.seq_rm(0, 0, self.start - self.base)
        todo = pairs[len(pairs) - n :]
        for i in range(0, n, ctx.n_batch):
            batch = Batch()
            for pos, pair in enumerate(todo[i : i + ctx.n_batch], self.end - self.base + i):
                batch.add_hidden(pair.token, pair.hidden, pos)
            batch.logits[-1] = True
            ctx.decode(batch)
        self.end = end

    def rewind(self, end: int) -> None:
        """Forget the pairs from index `end` on."""
        if self.end > end:
            self.end = end
            if end > self.start:
                self.ctx.memory.seq_rm(0, end - self.base, -1)
            else:
                self.ctx.memory.clear()
                self.base = self.start = end


class HeadDrafter:
    """Guesses what the draft heads of a model's file say, drawn by the samplers of `params` that need no memory of the
    text.

    A draft head reads a token and the hidden state of the token before, and guesses the next token. For the first guess
    the hidden state is the model's; for further guesses it is the head's own. A single head makes all guesses. When
    there are several, the first makes the first guess, the second makes the second, and so on.

    `ctx` is the model's context, which keeps its hidden states from now on. `follow` must be called after each of its
    decodes. `heads` are empty contexts of `Model.heads`. After `n_min` tokens guessing stops when the likeliest token
    has a probability below `p_min`.
    """

    def __init__(
        self,
        ctx: Decoder,
        heads: Sequence[LlamaContext],
        params: SamplingParams,
        n_min: int = 0,
        p_min: float = 0.0,
    ) -> None:
        if not heads:
            raise ModelError("the model's file has no heads that draft (multi-token prediction)")
        ctx.keep_hidden()
        self.ctx, self._heads, self._n_min, self._p_min = ctx, [_DraftHead(h) for h in heads], n_min, p_min
        self._guesser = _Guesser(params, ctx.model.vocab)
        self._pairs: list[_Pair] = []  # the last pairs before index _end: at least one head must still evaluate them
        self._end = 0
        # The last decode of `ctx`: its tokens, the index of the first one in the text, and their hidden states.
        self._at = 0
        self._tokens: list[int] = []
        self._hidden: Floats = np.empty((0, 0), np.float32)

    def follow(self, tokens: Sequence[int], at: int) -> None:
        """Take note that the model's context has just evaluated `tokens`, the first of which has index `at` in the
        text. Tokens that it evaluated earlier stay in the text up to index `at`; from there on they are replaced."""
        self._settle(at, tokens[0])
        self._at, self._tokens, self._hidden = at, list(tokens), self.ctx.hidden
        if len(self._pairs) >= self.ctx.n_batch:  # in a long prompt: do not let the pairs pile up
            self._evaluate(self._heads)

    def draft(self, tokens: Sequence[int], n: int) -> list[Guess]:
        last = len(tokens) - 1
        self._settle(last, tokens[-1])
        pairs, guesses = list(self._pairs), list[Guess]()
        for i in range(n if len(self._heads) == 1 else min(n, len(self._heads))):
            head = self._heads[min(i, len(self._heads) - 1)]
            head.evaluate(pairs, self._end + i)
            logits = head.ctx.logits[-1]
            if i >= self._n_min and _p_best(logits) < self._p_min:
                break
            guesses.append(self._guesser.guess(logits))
            if self.ctx.model.vocab.is_eog(guesses[-1].token):
                break
            pairs.append(_Pair(guesses[-1].token, head.ctx.hidden[-1]))
        for head in self._heads:
            head.rewind(self._end)
        self._drop()
        return guesses

    def _settle(self, end: int, token: int) -> None:
        """Make the pairs of the text up to index `end`, where `token` stands, from the last decode. The tokens up to
        there are known to stay in the text."""
        known = min(end, self._at + len(self._tokens))  # up to here the hidden state of the token before is known
        for i in range(max(self._end, self._at + 1), known + 1):
            self._pairs.append(_Pair(token if i == end else self._tokens[i - self._at], self._hidden[i - 1 - self._at]))
            self._end = i + 1

    def _evaluate(self, heads: Sequence[_DraftHead]) -> None:
        for head in heads:
            head.evaluate(self._pairs, self._end)
        self._drop()

    def _drop(self) -> None:
        """Drop the pairs that all heads have evaluated."""
        n = self._end - min(head.end for head in self._heads)
        del self._pairs[: max(len(self._pairs) - n, 0)]


class _Guesser:
    """Draws tokens by the samplers of `params` that need no memory of the text."""

    def __init__(self, params: SamplingParams, vocab: Vocab) -> None:
        self._chain = SamplerChain(params.without_memory(), vocab)
        self._is_greedy = params.temp <= 0 and params.dynatemp_range <= 0
        self._rng = rng_of(params, 2)

    def guess(self, logits: Floats) -> Guess:
        """Draw a token from `logits` [n_vocab]."""
        if self._is_greedy:
            return Guess(self._chain.sample(logits))
        ids, p = self._chain.distribution(logits)
        probs = np.zeros(len(logits))
        probs[ids] = p
        return Guess(int(ids[draw(p, self._rng)]), probs)


def rng_of(params: SamplingParams, stream: int) -> np.random.Generator:
    """A generator of random numbers with the seed of `params`. Each `stream` gives other numbers, and none gives those
    of the sampler chain."""
    seed = params.seed
    return np.random.default_rng(None if seed is None or seed < 0 else (seed, stream))


def draw(weights: Probs, rng: np.random.Generator) -> int:
    """Draw an index, with probabilities in proportion to `weights`."""
    sums = np.cumsum(weights)
    total = sums.item(-1)
    row = int(np.searchsorted(sums, rng.random() * total, "right"))
    return min(row, int(np.searchsorted(sums, total)))


def _p_best(logits: Floats) -> float:
    """The probability of the likeliest token."""
    return 1.0 / float(np.exp(logits - logits.max()).sum(dtype=np.float64))
