"""Speculative decoding: tokens are guessed cheaply and evaluated in one batch; those that the model would have chosen
itself are kept. Leviathan et al. 2022 and Chen et al. 2023 (a draft model), Saxena 2023 (prompt lookup).

With greedy sampling the tokens are those of plain decoding. With other sampling they have the same distribution. When
the guesses are not drawn at random (prompt lookup), the same seed even gives the same text. docs/company.md has the
exceptions, in which several tokens are rounded in another way than one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyggml.errors import ModelError, SamplerError
from pyggml.types import Floats

from ..context import LlamaContext
from ..decoder import Decoder
from ..loaded import LoadedModel
from .drafters import (
    Drafter,
    DraftPool,
    Guess,
    HeadDrafter,
    LookupDrafter,
    ModelDrafter,
    PooledDrafter,
    Probs,
    draw,
    rng_of,
)
from .engine import Pending, Placed, Steps
from .generation import Generation

if TYPE_CHECKING:
    from ..vocab import Vocab


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


_COST = 0.25  # what a guess in a batch costs, where evaluating a token alone costs 1
_CREDIT = 2.0  # the most that earlier gains count, in tokens
_PAUSE, _MAX_TRIAL_PAUSE, _MAX_PAUSE = 2, 8, 64  # how many tokens a pause lasts: at first, and at most


class _Pays:
    """Decides whether guessing pays, from what the last guesses gained and cost.

    When they did not pay, guessing pauses, each time longer. After a pause a single guess is made on trial: it is not
    evaluated, only compared with the next token.
    """

    def __init__(self) -> None:
        self._credit, self._next, self._pause = 0.0, _PAUSE, 0
        self.on_trial = False

    def count(self, n_drafted: int, n_accepted: int) -> None:
        """Count guesses that were evaluated, and how many of them were right."""
        self._credit = min(self._credit + n_accepted - _COST * n_drafted, _CREDIT)
        if n_accepted > _COST * n_drafted:
            self._next = _PAUSE
        elif self._credit < 0:
            self._credit, self.on_trial = 0.0, True
            self._rest(_MAX_PAUSE)

    def tried(self, right: bool) -> None:
        """Take note whether the guess on trial was right."""
        self.on_trial = not right
        if not right:
            self._rest(_MAX_TRIAL_PAUSE)

    def _rest(self, most: int) -> None:
        self._pause = min(self._next, most)
        self._next = min(2 * self._next, _MAX_PAUSE)

    def guesses(self) -> bool:
        """Whether to guess what follows the next token."""
        self._pause -= self._pause > 0
        return self._pause == 0


@dataclass(eq=False)
class SpeculativeGeneration(Generation):
    """A generation that lets `drafter` guess up to `n_max` tokens at a time, as long as enough guesses are right.
    `stats` counts the guesses that were evaluated and those that were right.

    Raises SamplerError when guidance is asked for too.
    """

    drafter: Drafter = field(kw_only=True)
    n_max: int = field(default=3, kw_only=True)
    follow: Callable[[Sequence[int], int], None] | None = field(default=None, kw_only=True)  # see HeadDrafter
    stats: DraftStats = field(default_factory=DraftStats, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guidance is not None:
            raise SamplerError("speculative decoding and classifier-free guidance cannot be combined")
        self._rng = rng_of(self.chain.params, 3)
        self._pays, self._counted = _Pays(), (0, 0)  # what `_pays` has been told: guesses, and right guesses
        self._trial: tuple[int, int] | None = None  # the guess on trial, and the index that it would have in `ids`
        self._guesses: list[Guess] = []  # guesses of the next tokens, which the context has evaluated
        self._rows: Iterator[Floats] = iter(())  # the logits after each of them
        self._end = 0  # the position after the last token that belongs to the text for sure
        self._batch: list[int] = []  # the tokens that were evaluated last, from the position _start on
        self._start = 0
        self._again: list[int] = []  # tokens of _batch that belong to the text but must be evaluated again

    @property
    def draft_stats(self) -> DraftStats | None:
        return self.stats

    def steps(self) -> Steps:
        self._refuse()
        try:
            yield from super().steps()
        finally:
            self._forget()
            for kv in self.ctx.memory.caches:
                kv.n_rewind = 0
            if isinstance(self.drafter, PooledDrafter):
                self.drafter.release()

    def rest(self) -> str:
        self._forget()
        return super().rest()

    def _refuse(self) -> None:
        """Raise SamplerError for what cannot be combined with guesses."""
        if self.long is not None and self.long.grp_attn_n > 1:
            raise SamplerError("speculative decoding and self-extend cannot be combined")

    def _prefill(self) -> Generator[Pending, Floats, Floats]:
        logits = yield from super()._prefill()
        self._end = self.ctx.memory.seq_pos_max(self.seq) + 1
        windows = [kv for kv in self.ctx.memory.caches if kv.n_swa]
        if windows:  # they hold a window and n_batch tokens; removing a batch may need twice its length (see n_rewind)
            self.n_max = min(self.n_max, (self.ctx.n_batch - 1) // 4)
        for kv in windows:
            kv.n_rewind = 2 * self.n_max + 1
        return logits

    def _part(self, tokens: Sequence[int]) -> Generator[Pending, Floats, Floats]:
        at = self.n_done
        rows = yield from super()._part(tokens)
        self._followed(tokens[: self.n_done - at], at)
        return rows

    def _followed(self, tokens: Sequence[int], at: int) -> None:
        if self.follow is not None:
            self.follow(tokens, at)

    def _forget(self) -> None:
        """Remove the guesses that were not taken from the memory."""
        if self._guesses:
            memory, seq = self.ctx.memory, self.seq
            if not memory.seq_rm(seq, self._end, -1):  # recurrent states go back to before the batch only
                memory.seq_rm(seq, self._start, -1)
                self._again = self._batch[: self._end - self._start]
            self._guesses = []
            if self.n_cells is not None:
                self.n_done = memory.seq_pos_max(seq) + 1

    def _sample(self, logits: Floats) -> int:
        guess = next(iter(self._guesses), None)  # another thread may take them back (Lock.end_trial)
        if guess is None or guess.probs is None or self.chain.traces is not None:  # a trace shows the chain's draw
            token = self.chain.sample(logits)
        else:
            ids, p = self.chain.distribution(logits)
            token = chosen(ids, p, guess.token, guess.probs, self._rng)
        if guess is not None and guess.token == token:
            self.stats.n_accepted += 1
        return token

    def _has_room(self) -> bool:
        if any(guess.token == self.ids[-1] for guess in self._guesses[:1]):
            return True  # the token is in the context already
        self._forget()
        has_room = super()._has_room()
        # the context may have been shifted
        self._end = self.ctx.memory.seq_pos_max(self.seq) + 1 + len(self._again)
        return has_room

    def _step(self, token: int) -> Generator[Pending, Floats, Floats]:
        if self._guesses:  # the first guess was right, see _has_room
            del self._guesses[0]
            n = 0  # nothing is evaluated
        else:
            at = len(self.prompt) + len(self.ids) - 1 - len(self._again)
            self.n_done = at if self.n_cells is None else self._end - len(self._again)
            if len(self._again) > self.n_max:  # evaluate them now, so that they do not become ever more
                yield from self._part(self._again)
                at += len(self._again)
                self._again = []
            self._guesses = self._draft()
            self._start = self._end - len(self._again)
            self._batch = [*self._again, token, *(g.token for g in self._guesses)]
            n, n_rows = len(self._batch), 1 + len(self._guesses)
            placed = Placed(self._batch, range(self._start, self._start + n), (self.seq,) * n, n_rows)
            rows = yield placed if self._guesses or self.n_cells is not None else self._batch
            self._followed(self._batch, at)
            self._again, self._rows = [], iter(rows)
        if self.n_cells is None and n != 1:  # else the context has counted it, perhaps beside other texts
            self.ctx.perf_guessed(n)
        self._end += 1
        return next(self._rows)

    def _n_guesses(self) -> int:
        """How many guesses there is room for. A context is shifted before it is quite full."""
        memory, n_again = self.ctx.memory, len(self._again)
        room = memory.size - memory.used - n_again if self.n_cells is None else self.n_cells - self._end
        n = min(self.n_max, room - 2, self.ctx.n_batch - n_again - 1)
        return n if self.n_predict < 0 else min(n, self.n_predict - len(self.ids) - 1)

    def _draft(self) -> list[Guess]:
        stats = self.stats
        before, self._counted = self._counted, (stats.n_drafted, stats.n_accepted)
        if self._counted[0] > before[0]:
            self._pays.count(self._counted[0] - before[0], self._counted[1] - before[1])
        if self._trial is not None:
            self._pays.tried(self.ids[self._trial[1]] == self._trial[0])
            self._trial = None
        if not self._pays.guesses():
            return []
        n = self._n_guesses()
        if self._pays.on_trial:
            n = min(n, 1)
        guesses = self.drafter.draft([*self.prompt, *self.ids], n) if n > 0 else []
        if self._pays.on_trial:
            self._trial = (guesses[0].token, len(self.ids)) if guesses else None
            return []
        self.stats.n_drafts += bool(guesses)
        self.stats.n_drafted += len(guesses)
        return guesses


def with_draft(
    g: Generation,
    by: LoadedModel | Sequence[LoadedModel] | DraftPool | Drafter | None,
    draft_max: int = 3,
    draft_min: int = 0,
    draft_p_min: float = 0.0,
) -> SpeculativeGeneration:
    """Make a speculative generation of `g`, which has not begun.

    by           who guesses: a smaller model, or a pool of its contexts, the draft heads of the model itself
                 (`Model.heads`), a `Drafter` of one's own, or prompt lookup (None)
    draft_max    the most tokens that are guessed at a time
    draft_min    the fewest: a model guesses so many even when it is not sure, and a shorter find of prompt lookup is
                 not used
    draft_p_min  a model stops guessing when the probability of its likeliest token is below this

    Raises SamplerError for numbers that make no sense, and ModelError when the models' vocabularies differ or the model
    has no draft heads.
    """
    if not 0 <= draft_min <= draft_max or draft_max < 1:
        raise SamplerError(f"drafts of {draft_min} to {draft_max} tokens make no sense")
    if not 0 <= draft_p_min <= 1:
        raise SamplerError(f"draft_p_min must be from 0 to 1, not {draft_p_min}")
    drafter: Drafter
    if by is None:
        drafter = LookupDrafter(n_min=draft_min)
    elif isinstance(by, DraftPool):
        drafter = PooledDrafter(by, g.chain.params, draft_min, draft_p_min)
    elif isinstance(by, Drafter):
        drafter = by
    elif isinstance(by, LoadedModel):
        check_vocabularies(g.ctx.model.vocab, by.vocab)
        drafter = ModelDrafter(_context_like(g.ctx, by), g.chain.params, draft_min, draft_p_min)
    else:
        heads = [_context_like(g.ctx, head) for head in by]
        drafter = HeadDrafter(g.ctx, heads, g.chain.params, draft_min, draft_p_min)
    follow = drafter.follow if isinstance(drafter, HeadDrafter) else None
    return SpeculativeGeneration.like(g, drafter=drafter, n_max=draft_max, follow=follow)


def _context_like(ctx: Decoder, model: LoadedModel) -> LlamaContext:
    flash_attn = any(kv.flash_attn for kv in ctx.memory.caches)
    return LlamaContext(model, ctx.n_ctx, n_threads=ctx.n_threads, flash_attn=flash_attn)


def chosen(ids: npt.NDArray[np.int64], p: Probs, guess: int, q: Probs, rng: np.random.Generator) -> int:
    """Draw a token with the probabilities `p` (of the tokens `ids`), given a guess that was drawn with the
    probabilities `q` (of all tokens).

    The guess is taken with probability min(1, p / q). Otherwise a token is drawn in proportion to p - q, where that is
    positive."""
    at = np.flatnonzero(ids == guess)
    p_guess = p[at[0]] if len(at) else 0.0
    if rng.random() * q[guess] < p_guess:
        return guess
    rest = np.maximum(p - q[ids], 0.0)
    if not rest.any():  # p and q differ by rounding only
        return guess
    return int(ids[draw(rest, rng)])


def check_vocabularies(target: Vocab, draft: Vocab) -> None:
    """Raise ModelError when a draft model's tokens are not those of the model."""
    if target.n_tokens != draft.n_tokens:
        raise ModelError(f"the draft model has {draft.n_tokens} tokens, the model {target.n_tokens}")
    for i in range(target.n_tokens):
        if target.text(i) != draft.text(i):
            raise ModelError(f"token {i} is {draft.text(i)!r} for the draft model and {target.text(i)!r} for the model")
