"""Prompt lookup that nobody asked for: a text that repeats itself comes faster, and any other one as it would without.

A guess that is only compared with the next token costs next to nothing. So each token is guessed that way, and not
before several guesses in a row were right are further ones evaluated together. What that takes is measured.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

import numpy as np

from pyggml.types import Floats

from ..context import LlamaContext
from .drafters import Drafter, Guess
from .engine import Pending, Steps
from .generation import Generation
from .speculative import SpeculativeGeneration

_LEAST, _MOST = 4, 7  # guesses that are evaluated together: one graph runs for 5 to 8 tokens
_LARGEST_LEAST = 256
_LONG_BUILD = 32  # tokens: a graph that takes longer to build than they take to evaluate is not built
_PART_SAVED = 0.6  # of the time of a token that is guessed right: the rest is what it takes in a batch


class _Copy:
    """A text, and the place in it that it goes on as.

    text     the tokens so far
    at       index in `text` of the guess of the next token; 0 for no guess
    n_right  how many guesses in a row were right
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.text, self.at, self.n_right = list(text), 0, 0
        # Two tokens: the index of the token that followed them the last time. Nothing follows those at the end yet.
        self._after = {pair: i for i, pair in enumerate(zip(self.text[:-2], self.text[1:-1], strict=True), 2)}
        self._before_last, self._last = [-1, -1, *text][-2:]
        self._look()

    def add(self, token: int) -> None:
        """Compare the next token with its guess, and guess the one after it."""
        at, text = self.at, self.text
        is_right = at and text[at] == token
        text.append(token)
        self._before_last, self._last = self._last, token
        if is_right:
            self.n_right += 1
            self._after[self._before_last, token] = len(text)
            self.at = at + 1
        else:
            self.n_right = 0
            self._look()

    def _look(self) -> None:
        """Find where the last two tokens were before."""
        pair = self._before_last, self._last
        self.at = self._after.get(pair, 0)
        self._after[pair] = len(self.text)

    def draft(self, tokens: Sequence[int], n: int) -> list[Guess]:
        """The tokens at `at` and behind it. When they reach the end of the text, it begins again with them."""
        found = self.text[self.at : self.at + n]
        period = len(self.text) - self.at
        while len(found) < n:
            found.append(found[-period])
        return [Guess(t) for t in found]


@dataclass(eq=False)
class LookupGeneration(SpeculativeGeneration):
    """A generation that evaluates guesses from its own text, `_LEAST` to `_MOST` at a time, and no more than were right
    in a row before. When they take longer than the tokens that they give would alone, twice as many must be right
    before the next time.

    The first time needs another graph. It is not built before the guesses that were right until then would have saved
    as much time as building takes, and not at all for a model whose tokens take a fraction of a millisecond.

    Nothing is evaluated on a guess beside other texts, while nodes are watched or hidden states kept, and with
    self-extend. Until the next token is evaluated the memory may hold guesses; whoever reads it meanwhile, a stopping
    criterion, too, changes or saves the context, or watches nodes, finds it without them.
    `draft_stats` is None, because nobody asked for drafts. `before`: text that stands before the prompt.
    """

    drafter: Drafter = field(init=False, repr=False)  # a `_Copy`
    n_max: int = field(default=_MOST, init=False)
    before: Sequence[int] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._least = _LEAST  # how many guesses in a row must have been right
        self._of_one, self._of_batch = inf, 0.0  # seconds of a token alone, and of the last batch with guesses
        self._saved = 0.0  # seconds that right guesses would have saved
        self._builds = False  # whether the last batch needed a new graph

    @property
    def draft_stats(self) -> None:
        return None

    def steps(self) -> Steps:
        self._copy = self.drafter = _Copy([*self.before, *self.prompt])  # a text that waits for its turn has none
        yield from super().steps()

    def _refuse(self) -> None:
        """Nothing is refused: where guesses are not possible, none are evaluated."""

    def _forget(self) -> None:
        with (lock := self.ctx.memory.lock):  # once, though another thread reads the memory just now
            if self._guesses:  # else another text of the context may have some
                lock.take_back = None
            n_left = len(self._guesses)
            super()._forget()
            if self.n_cells is None:
                self.n_done -= n_left

    def _has_room(self) -> bool:
        return super()._has_room() if self._guesses else Generation._has_room(self)

    def _step(self, token: int) -> Generator[Pending, Floats, Floats]:
        lock = self.ctx.memory.lock
        with lock:  # else another thread might be taking the guesses back just now
            take_back, lock.take_back = lock.take_back, None
        if take_back is not None and (not self._guesses or self.ctx.model.watches.patterns):
            take_back()  # another text of the context has guesses, or nodes of this one are to be seen
        self._copy.add(token)
        if self._guesses:  # the first of them was right
            row = yield from super()._step(token)
        else:
            if self.stats.n_drafted > self._counted[0]:
                self._judge()
            start = perf_counter()
            if self._copy.n_right < self._least or not self._is_worth_it():
                row = yield from Generation._step(self, token)
                self._of_one = min(perf_counter() - start, 1.05 * self._of_one)
                return row
            row = yield from super()._step(token)
            self._of_batch = perf_counter() - start
        if self.n_cells is None and isinstance(self.ctx, LlamaContext):
            self.ctx.logits, self.ctx.outputs = row[None], np.zeros(1, np.int32)  # as after this token alone
        if self._guesses and self.n_cells is None:  # else nobody but the engine uses the context
            lock.take_back = self._forget
        return row

    def _is_worth_it(self) -> bool:
        """Count what the last guess, which was right, would have saved, and say whether to evaluate guesses now."""
        extends = self.long is not None and self.long.grp_attn_n > 1
        self._end = self.ctx.memory.seq_pos_max(self.seq) + 1
        is_seen = self.ctx.model.watches.patterns or (isinstance(self.ctx, LlamaContext) and len(self.ctx.hidden))
        if not self.is_alone or extends or is_seen or self._n_guesses() < _LEAST:
            return False
        self._saved += _PART_SAVED * self._of_one
        seconds = self.ctx.seconds_to_build(1 + _MOST) if isinstance(self.ctx, LlamaContext) else inf
        self._builds = seconds > 0
        return seconds < min(self._saved, _LONG_BUILD * self._of_one)

    def _draft(self) -> list[Guess]:
        guesses = self.drafter.draft((), min(self._n_guesses(), self._copy.n_right))
        self._counted = self.stats.n_drafted, self.stats.n_accepted
        self.stats.n_drafts += 1
        self.stats.n_drafted += len(guesses)
        return guesses

    def _judge(self) -> None:
        """Take note of what the last guesses gained."""
        n_accepted = self.stats.n_accepted - self._counted[1]
        self._counted = self.stats.n_drafted, self.stats.n_accepted
        if (1 + n_accepted) * self._of_one > self._of_batch:
            self._least = max(self._least // 2, _LEAST)
        elif not self._builds:
            self._least, self._copy.n_right = min(2 * self._least, _LARGEST_LEAST), 0


def with_lookup(g: Generation, before: Sequence[int] = ()) -> Generation:
    """Let a generation that has not begun make use of prompt lookup, where that cannot change its text: a token must
    have the same bits alone and in a batch, and it must be possible to take tokens back. Other generations stay as they
    are. `before`: text that stands before the prompt."""
    ctx = g.ctx
    is_plain = type(g) is Generation and g.guidance is None and g.media is None and not g.source
    if not is_plain or not isinstance(ctx, LlamaContext) or ctx.n_ubatch <= _MOST:
        return g
    if not ctx.model.hparams.causal_attn:  # a token sees those behind it
        return g
    if not ctx.memory.keeps_all or not ctx.same_bits_in_batches:
        return g
    return LookupGeneration.like(g, before=before)
