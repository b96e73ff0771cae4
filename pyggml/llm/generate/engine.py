"""The one loop behind all generations: admit, evaluate together, choose, stream.

A generation says step by step which tokens it wants evaluated (`Pending`) and which token it has chosen (`Token`), see
`Generation.steps`. An `Engine` evaluates in one batch what all of them wait for, and hands the chosen tokens on. This
is continuous batching: each decode has a token of every text that is under way, and the prompts of those that join as
others end. A generation of one is an engine that has one to run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pyggml.types import Floats

from ..batch import Batch
from .prefixes import common_prefix

if TYPE_CHECKING:
    from ..context import LlamaContext
    from .generation import Generation, Token

_WORTH_WAITING = 16  # a prompt waits for another's evaluation to share this many tokens more than it can now


class Pending(NamedTuple):
    """Tokens that a generation wants evaluated next, with logits of the last `n_outputs` of them.

    When a batch has no room for all of a prompt, it takes the first tokens. `Generation.n_done` tells how many it took,
    and the generation asks for the others.

    pos   where each token stands in its sequence; None: behind what sequence 0 holds
    seqs  the sequence of each token
    """

    tokens: Sequence[int]
    pos: Sequence[int] | None = None
    seqs: Sequence[int] = ()
    n_outputs: int = 1


Steps: TypeAlias = "Generator[Pending | Token, Floats, None]"  # a Pending is answered with logits [n_outputs, n_vocab]
Failed: TypeAlias = "Callable[[Generation, Exception], None]"  # a generation, and what ended it


@dataclass
class _Slot:
    """A sequence of the context, and the generation in it. One that has ended stays until another comes, which may
    begin alike."""

    generation: Generation
    steps: Steps | None  # None: it has ended
    pending: Pending | None = None

    @property
    def text(self) -> list[int]:
        """Prompt and continuation, of which the first `n_done` tokens are evaluated."""
        return [*self.generation.prompt, *self.generation.ids]


_Turn: TypeAlias = "tuple[_Slot, Floats | None]"  # what goes on, with the logits of its Pending


class Engine:
    """Runs generations in the sequences of a context."""

    def __init__(self, ctx: LlamaContext, generations: Iterable[Generation], failed: Failed | None = None) -> None:
        """Each of the generations begins when a sequence is free for it. One that raises an error ends; `failed` is
        told why, and without it the error ends all."""
        self._ctx, self._waiting, self._failed = ctx, iter(generations), failed
        self._next: Generation | None = None  # the first of those that wait
        self._slots: list[_Slot | None] = [None] * ctx.memory.n_seq_max

    def run(self) -> Generator[tuple[Generation, Token]]:
        """The tokens of all generations as they are chosen. Closing it ends those that are under way."""
        try:
            while turns := self._admitted() or self._evaluated():
                for slot, logits in turns:
                    token = self._resume(slot, logits)
                    while token is not None:
                        yield slot.generation, token
                        token = self._resume(slot)
        finally:
            for slot in self._slots:
                if slot is not None and slot.steps is not None:
                    slot.steps.close()

    def _admitted(self) -> list[_Turn]:
        """Give free sequences to the generations that wait, in their order. Returns those that begin."""
        turns: list[_Turn] = []
        for seq, slot in enumerate(self._slots):
            if slot is None or slot.steps is None:
                g = self._next = self._next or next(self._waiting, None)
                if g is None or not self._place(g, seq):
                    break
                slot = self._slots[seq] = _Slot(g, g.steps())
                self._next = None
                turns.append((slot, None))
        return turns

    def _place(self, g: Generation, seq: int) -> bool:
        """Let sequence `seq` hold what the prompt has in common with an evaluated text. False when it is worth waiting
        until another generation has evaluated more of it."""
        if g.n_cells is None:  # it goes on behind what sequence 0 holds
            return True
        memory, prompt = self._ctx.memory, list(g.prompt)
        known = [s for s in self._slots if s is not None]
        source, n = seq, 0
        if memory.keeps_all and known:  # else the beginnings of texts are not there any more
            alike = [common_prefix(prompt[:-1], s.text) for s in known]
            evaluated = [min(k, s.generation.n_done) for k, s in zip(alike, known, strict=True)]
            n = max(evaluated)
            best = known[evaluated.index(n)]
            soon = max(k for k, s in zip(alike, known, strict=True) if s.steps is not None or s is best)
            if soon >= n + _WORTH_WAITING:
                return False
            source = best.generation.seq
        if source == seq:
            memory.seq_rm(seq, n, -1)
        else:
            memory.seq_rm(seq)
            memory.seq_cp(source, seq, 0, n)
        g.seq, g.n_past, g.n_done = seq, n, n
        return True

    def _evaluated(self) -> list[_Turn]:
        """Evaluate what generations wait for, single tokens before prompts, as far as a batch has room. Returns those
        that had their turn."""
        ctx = self._ctx
        active = [(s, s.pending) for s in self._slots if s is not None and s.pending is not None]
        if len(active) == 1 and active[0][1].pos is None:
            slot, pending = active[0]
            tokens = pending.tokens[: ctx.n_batch]
            ctx.decode(tokens)
            slot.generation.n_done += len(tokens)
            return [(slot, ctx.logits)]
        batch, taken = Batch(), list[tuple[_Slot, int, int]]()  # how many tokens of each, and rows of logits
        for slot, (tokens, pos, seqs, n_outputs) in sorted(active, key=lambda a: len(a[1].tokens) > 1):
            n = min(len(tokens), ctx.n_batch - len(batch))
            n_rows = n_outputs if n == len(tokens) else 0
            batch.extend(tokens[:n], pos[:n] if pos else (), seqs[:n], n_rows)
            taken.append((slot, n, n_rows))
        if taken:
            ctx.decode(batch)
        turns: list[_Turn] = []
        row = 0
        for slot, n, n_rows in taken:
            slot.generation.n_done += n
            turns.append((slot, ctx.logits[row : row + n_rows]))
            row += n_rows
        return turns

    def _resume(self, slot: _Slot, logits: Floats | None = None) -> Token | None:
        """Let a generation go on. Returns the token that it has chosen; None when it waits for an evaluation, or has
        ended."""
        assert slot.steps is not None
        slot.pending = None
        try:
            item = next(slot.steps) if logits is None else slot.steps.send(logits)
        except StopIteration:
            slot.steps = None
            return None
        except Exception as e:
            if self._failed is None:
                raise
            slot.steps = None
            self._failed(slot.generation, e)
            return None
        if not isinstance(item, Pending):
            return item
        slot.pending = item
        return None
