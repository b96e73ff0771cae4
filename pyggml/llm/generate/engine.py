"""The one loop behind all generations: admit, evaluate together, choose, stream.

A generation says step by step which tokens it wants evaluated (`Pending`) and which token it has chosen (`Token`), see
`Generation.steps`. An `Engine` evaluates in one batch what all of them wait for, and hands the chosen tokens on. This
is continuous batching: each decode has a token of every text that is under way, and the prompts of those that join as
others end. A generation of one is an engine that has one to run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from pyggml.types import Floats

from ..batch import Batch
from .prefixes import common_prefix

if TYPE_CHECKING:
    from ..decoder import Decoder
    from ..samplers import StepTrace
    from .generation import Generation

FinishReason = Literal["eog", "stop", "length"]
_WORTH_WAITING = 16  # a prompt waits for another's evaluation to share this many tokens more than it can now


class Token(NamedTuple):
    """One step of a generation.

    text           what can be shown now: whole characters; of several tokens, or none, where characters or stop strings
                   span tokens
    id             the token
    logprob        the model's log-probability of it, before any sampler (None where it was not asked for)
    top            the likeliest tokens with their log-probabilities, `n_probs` of them
    finish_reason  on the last one: "eog" (the model ended: `id` is that end, no part of the text), "stop" (a stop
                   string), "length" (n_predict, or the context is full); else None
    trace          what each sampler did, where the chain keeps traces
    """

    text: str
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    trace: StepTrace | None = None


class Placed(NamedTuple):
    """Tokens to evaluate: where each stands in its sequence, which sequence that is, and how many of the last give
    logits."""

    tokens: Sequence[int]
    pos: Sequence[int]
    seqs: Sequence[int]
    n_outputs: int = 1


# What a generation wants evaluated: tokens alone go behind what sequence 0 holds, with logits of the last. When a batch
# has no room for all of a prompt it takes the first tokens. `Generation.n_done` tells how many it took.
Pending: TypeAlias = Sequence[int] | Placed
Steps: TypeAlias = "Generator[Pending | Token, Floats, None]"  # a Pending is answered with logits [n_outputs, n_vocab]
Failed: TypeAlias = "Callable[[Generation, Exception], None]"  # a generation, and what ended it


@dataclass
class _Slot:
    """A sequence of the context, and the generation in it. One that has ended stays until another comes, which may
    begin alike."""

    generation: Generation
    steps: Steps
    pending: Pending | None = None
    ended: bool = False

    @property
    def text(self) -> list[int]:
        """Prompt and continuation, of which the first `n_done` tokens are evaluated."""
        return [*self.generation.prompt, *self.generation.ids]


_Turn: TypeAlias = "tuple[_Slot, Any]"  # what goes on, with the logits of its Pending; with None it begins


class Engine:
    """Runs generations in the sequences of a context."""

    def __init__(self, ctx: Decoder, generations: Iterable[Generation], failed: Failed | None = None) -> None:
        """Each of the generations begins when a sequence is free for it. One that raises an error ends; `failed` is
        told why, and without it the error ends all."""
        self._ctx, self._waiting, self._failed = ctx, iter(generations), failed
        self._next = next(self._waiting, None)
        self._slots: list[_Slot] = []  # by sequence, of those that were used

    def run(self) -> Generator[tuple[Generation, Token]]:
        """The tokens of all generations as they are chosen. Closing it ends those that are under way."""
        try:
            while turns := (self._admitted() if self._next is not None else None) or self._evaluated():
                for slot, logits in turns:
                    slot.pending = None
                    try:
                        item = slot.steps.send(logits)
                        while isinstance(item, Token):
                            yield slot.generation, item
                            item = next(slot.steps)
                        slot.pending = item
                    except StopIteration:
                        slot.ended = True
                    except Exception as e:
                        if self._failed is None:
                            raise
                        slot.ended = True
                        self._failed(slot.generation, e)
        finally:
            for slot in self._slots:
                slot.steps.close()

    def _admitted(self) -> list[_Turn]:
        """Give free sequences to the generations that wait, in their order. Returns those that begin."""
        turns: list[_Turn] = []
        for seq in range(self._ctx.memory.n_seq_max):
            if seq == len(self._slots) or self._slots[seq].ended:
                g = self._next
                if g is None or not self._place(g, seq):
                    break
                slot = _Slot(g, g.steps())
                self._slots[seq : seq + 1] = [slot]
                self._next = next(self._waiting, None)
                turns.append((slot, None))
        return turns

    def _place(self, g: Generation, seq: int) -> bool:
        """Let sequence `seq` hold what the prompt has in common with an evaluated text. False when it is worth waiting
        until another generation has evaluated more of it."""
        if g.n_cells is None:  # it goes on behind what sequence 0 holds
            return True
        memory, prompt = self._ctx.memory, list(g.prompt)
        source, n = seq, 0
        if memory.keeps_all and self._slots:  # else the beginnings of texts are not there any more
            alike = [common_prefix(prompt[:-1], s.text) for s in self._slots]
            evaluated = [min(k, s.generation.n_done) for k, s in zip(alike, self._slots, strict=True)]
            n = max(evaluated)
            source = evaluated.index(n)
            if max(k for i, k in enumerate(alike) if i == source or not self._slots[i].ended) >= n + _WORTH_WAITING:
                return False
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
        for slot in self._slots:
            if slot.pending is not None and not isinstance(slot.pending, Placed):  # it has the context to itself
                tokens = slot.pending[: ctx.n_batch]
                ctx.decode(tokens)
                slot.generation.n_done += len(tokens)
                return [(slot, ctx.logits)]
        active = [(slot, slot.pending) for slot in self._slots if isinstance(slot.pending, Placed)]
        batch, taken = Batch(), list[tuple[_Slot, int, int]]()  # how many tokens of each, and rows of logits
        for slot, (tokens, pos, seqs, n_outputs) in sorted(active, key=lambda a: len(a[1].tokens) > 1):
            n = min(len(tokens), ctx.n_batch - len(batch))
            n_rows = n_outputs if n == len(tokens) else 0
            batch.extend(tokens[:n], pos[:n], seqs[:n], n_rows)
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
