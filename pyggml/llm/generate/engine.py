"""The one loop behind all generations: admit, evaluate together, choose, stream.

A generation says step by step which tokens it wants evaluated (`Pending`) and which token it has chosen (`Token`), see
`Generation.steps`. An `Engine` evaluates the tokens that all generations wait for in one batch, and hands the chosen
tokens on. This is continuous batching: each decode has a token of every text that is under way, and the prompts of new
texts, which begin as others end. A single generation is run by an engine that has only this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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

    text           the text that can be shown now: whole characters. It is empty, or the text of several tokens, when a
                   character or a possible stop string spans tokens
    id             the token
    logprob        the model's log-probability of it, before any sampler (None when it was not asked for)
    top            the likeliest tokens with their log-probabilities, `n_probs` of them
    finish_reason  on the last token: "eog" (the model ended the text: `id` is the token for the end, which is no part
                   of the text), "stop" (a stop string), "length" (n_predict, or the context is full). None on others
    trace          what each sampler did, when the chain keeps traces
    """

    text: str
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    trace: StepTrace | None = None


class Placed(NamedTuple):
    """Tokens to evaluate: the position of each, the sequence of each, and how many of the last give logits."""

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
class Slot:
    """A sequence of the context, and the generation in it. When the generation has ended its tokens stay until another
    one comes, whose text may begin alike."""

    generation: Generation
    steps: Steps
    pending: Pending | None = None
    ended: bool = False

    @property
    def text(self) -> list[int]:
        """Prompt and continuation, of which the first `n_done` tokens are evaluated."""
        return [*self.generation.prompt, *self.generation.ids]

    def end(self) -> None:
        """Break the generation off."""
        self.pending, self.ended = None, True
        self.steps.close()


_Turn: TypeAlias = "tuple[Slot, Any]"  # a slot, and the logits of its Pending; None lets its generation begin


class Engine:
    """Runs generations in the sequences of a context, all of them in one thread.

    A batch is given to the constructor and `run`. A server calls `submit` as requests come, `cancel` as clients leave,
    and `step` while the engine is `busy`.
    """

    def __init__(self, ctx: Decoder, generations: Iterable[Generation] = (), failed: Failed | None = None) -> None:
        """Each generation begins when a sequence is free for it. The next one is taken from `generations` when the one
        before it has begun. When a generation raises an error, it ends, and `failed` is called with it and the error;
        without `failed` the error goes to the caller."""
        self._ctx, self._more, self._failed = ctx, iter(generations), failed
        self._waiting = deque(islice(self._more, 1))
        self.slots: list[Slot] = []  # by sequence, for the sequences that have been used: to look at between two steps

    @property
    def busy(self) -> bool:
        """Whether a generation waits or is under way."""
        return bool(self._waiting) or any(not slot.ended for slot in self.slots)

    def submit(self, generation: Generation) -> None:
        """Add a generation to the end of the queue: it begins as soon as a sequence is free for it. Others may be under
        way, or all may have ended."""
        self._waiting.append(generation)

    def cancel(self, generation: Generation) -> None:
        """End a generation, whether it waits or is under way; no further token of it comes, and the cells of its
        sequence are free. (A generation that has the context to itself leaves there what it has evaluated.) Does
        nothing when the generation has ended. It is called between two tokens, of this generation or another one."""
        self._waiting = deque(g for g in self._waiting if g is not generation)
        self._more = filter(lambda g: g is not generation, self._more)
        for seq, slot in enumerate(self.slots):
            if slot.generation is generation and not slot.ended:
                slot.end()
                if generation.n_cells is not None:
                    self._ctx.memory.seq_rm(seq)
                    generation.n_done = 0

    def hold(self, seq: int, generation: Generation) -> None:
        """Tell that sequence `seq`, in which nothing is under way, holds the prompt of a generation, which does not
        run: prompts that begin alike need not be evaluated there. An empty prompt stands for an empty sequence."""
        while len(self.slots) <= seq:
            empty = replace(generation, prompt=())
            self.slots.append(Slot(empty, empty.steps(), ended=True))
        generation.n_done = len(generation.prompt)
        self.slots[seq] = Slot(generation, generation.steps(), ended=True)

    def run(self) -> Generator[tuple[Generation, Token]]:
        """The tokens of all generations as they are chosen, until none is left. Closing it ends those that are under
        way."""
        try:
            while turns := self._turns():
                yield from self._taken(turns)
        finally:
            for slot in self.slots:
                slot.end()

    def step(self) -> Generator[tuple[Generation, Token]]:
        """Let generations begin, or evaluate one batch. Yields the tokens that are chosen then; take all of them before
        the next step."""
        yield from self._taken(self._turns())

    def _turns(self) -> list[_Turn]:
        """The slots that have their turn now, those that begin before all others; empty when no generation is left."""
        return (self._admitted() if self._waiting else None) or self._evaluated()

    def _taken(self, turns: list[_Turn]) -> Generator[tuple[Generation, Token]]:
        """Let each slot choose tokens, until it wants more evaluated."""
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
                slot.ended = True
                if self._failed is None:
                    raise
                self._failed(slot.generation, e)

    def _admitted(self) -> list[_Turn]:
        """Give free sequences to the generations that wait, in their order. Returns those that begin."""
        turns: list[_Turn] = []
        for seq in range(self._ctx.memory.n_seq_max):
            if seq == len(self.slots) or self.slots[seq].ended:
                if not self._waiting or not self._place(self._waiting[0], seq):
                    break
                g = self._waiting.popleft()
                slot = Slot(g, g.steps())
                self.slots[seq : seq + 1] = [slot]
                if not self._waiting:
                    self._waiting.extend(islice(self._more, 1))
                turns.append((slot, None))
        return turns

    def _place(self, g: Generation, seq: int) -> bool:
        """Let sequence `seq` hold the beginning that the prompt has in common with an evaluated text. Returns False
        when it is worth waiting until another generation has evaluated more of that beginning."""
        if g.n_cells is None:  # it has the context to itself, and continues sequence 0
            return True
        memory, prompt = self._ctx.memory, list(g.prompt)
        source, n = seq, 0
        if memory.keeps_all and self.slots and g.reuses:  # in other memories the beginnings of texts are gone
            alike = [common_prefix(prompt[:-1], s.text) for s in self.slots]
            evaluated = [min(k, s.generation.n_done) for k, s in zip(alike, self.slots, strict=True)]
            n = max(evaluated)
            source = evaluated.index(n)
            under_way = (k for k, s in zip(alike, self.slots, strict=True) if not s.ended)
            if max(under_way, default=0) >= n + _WORTH_WAITING:
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
        for slot in self.slots:
            if slot.pending is not None and not isinstance(slot.pending, Placed):  # it has the context to itself
                tokens = slot.pending[: ctx.n_batch]
                ctx.decode(tokens)
                slot.generation.n_done += len(tokens)
                return [(slot, ctx.logits)]
        active = [(slot, slot.pending) for slot in self.slots if isinstance(slot.pending, Placed)]
        parts = sorted(active, key=lambda a: len(a[1].tokens) > 1)
        batch, taken = Batch(), list[tuple[Slot, int, int, int]]()  # tokens of each; rows of logits, and spare ones
        sizes, n_spare = _rounded([want for _, want in parts], ctx.n_batch)
        for (slot, (tokens, pos, seqs, n_outputs)), n in zip(parts, sizes, strict=True):
            n_rows = n_outputs if n == len(tokens) else 0
            spare = min(n_spare, n - n_rows)
            n_spare -= spare
            batch.extend(tokens[:n], pos[:n], seqs[:n], n_rows + spare)
            taken.append((slot, n, n_rows, spare))
        if taken:
            ctx.decode(batch)
        turns: list[_Turn] = []
        row = 0
        for slot, n, n_rows, spare in taken:
            slot.generation.n_done += n
            row += spare + n_rows
            turns.append((slot, ctx.logits[row - n_rows : row]))
        return turns


def _rounded(wants: Sequence[Placed], n_batch: int) -> tuple[list[int], int]:
    """How many tokens of each go into a batch, in their order, and how many rows of logits it has that nobody reads.

    A graph is built for each number of tokens and of rows, which takes as long as some steps. Where prompts are
    evaluated beside other texts, these numbers hardly ever come again, so they are rounded: what is left of a prompt
    goes with the next tokens of the others, and rows are cheap.
    """
    sizes: list[int] = []
    for want in wants:
        sizes.append(min(len(want.tokens), n_batch - sum(sizes)))
    total = sum(sizes)
    if len(sizes) < 2 or total == len(sizes):
        return sizes, 0
    too_many = total - _round(total)
    for i in reversed(range(len(sizes))):
        if wants[i].n_outputs == 1 and sizes[i] > 1:
            cut = min(too_many, sizes[i] - 1)
            sizes[i] -= cut
            too_many -= cut
    n_rows = sum(want.n_outputs for want, n in zip(wants, sizes, strict=True) if n == len(want.tokens))
    return sizes, (1 << max(n_rows - 1, 0).bit_length()) - n_rows  # a power of two in all


def _round(n: int) -> int:
    """The largest number up to `n` that is a power of two times 4, 5, 6 or 7; up to 8 `n` itself."""
    grain = 1 << max(n.bit_length() - 3, 0)
    return n // grain * grain
