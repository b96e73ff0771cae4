"""The one loop behind all generations: admit, evaluate together, choose, stream.

A generation says step by step which tokens it wants evaluated (`Pending`) and which token it has chosen (`Token`), see
`Generation.steps`. An `Engine` evaluates the tokens that all generations wait for in one batch, and hands the chosen
tokens on. This is continuous batching: each decode has a token of every text that is under way, and the prompts of new
texts, which begin as others end. A single generation is run by an engine that has only this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias
from weakref import WeakSet

from pyggml.errors import BatchError
from pyggml.types import Floats

from ..batch import Batch
from .prefixes import common_prefix

if TYPE_CHECKING:
    from ..decoder import Decoder
    from ..samplers import StepTrace
    from .generation import Generation
    from .snapshots import Snapshot, Snapshots

FinishReason = Literal["eog", "stop", "length"]
_WORTH_WAITING = 16  # a prompt waits for another's evaluation to share this many tokens more than it can now
_WORTH_KEEPING = 16  # a snapshot is kept, and used, when it saves evaluating as many tokens
_CHECKPOINT = 16  # a checkpoint is so far before the end of a prompt: the next turn of a chat changes the end


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


def _too_large(g: Generation, n_batch: int) -> BatchError:
    """The error for tokens that see each other and do not fit one batch."""
    sizes = [row.n_group for row in g.media_at(range(g.n_done, len(g.prompt))).values()]
    return BatchError(f"{max(sizes)} tokens see each other, but a batch has at most n_batch = {n_batch}")


@dataclass
class Slot:
    """A sequence of the context, and the generation in it. When the generation has ended its tokens stay until another
    one comes, whose text may begin alike. `turn`: the number of the step in which it was evaluated last."""

    generation: Generation
    steps: Steps
    pending: Pending | None = None
    ended: bool = False
    turn: int = 0

    @property
    def text(self) -> list[int]:
        """Prompt and continuation, of which the first `n_done` tokens are evaluated; see `Generation.keys`."""
        return [*self.generation.keys, *self.generation.ids]

    def n_alike(self, tokens: list[int]) -> int:
        """How many tokens the text begins with as `tokens` does."""
        keys = self.generation.keys
        n = common_prefix(keys if isinstance(keys, list) else list(keys), tokens)
        return n if n < len(keys) else n + common_prefix(self.generation.ids, tokens[n:])

    @property
    def n_held(self) -> int:
        """How many tokens of the text its sequence holds at their own positions, where other texts can share them."""
        g = self.generation
        if g.source:
            return 0  # what the tokens see is the encoded text
        return min(g.n_done, g.long.n_keep) if g.long is not None and self.moved else g.n_done

    @property
    def moved(self) -> bool:
        """Whether tokens of the text are no longer at their own positions, or dropped."""
        return self.generation.long is not None and self.generation.long.moved

    @property
    def key(self) -> Hashable:
        """Stands for the adapters that its tokens were evaluated with."""
        return adapters_key(self.generation)

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

    def __init__(
        self,
        ctx: Decoder,
        generations: Iterable[Generation] = (),
        failed: Failed | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """Each generation begins when a sequence is free for it. The next one is taken from `generations` when the one
        before it has begun. When a generation raises an error, it ends, and `failed` is called with it and the error;
        without `failed` the error goes to the caller. `snapshots` keep texts that sequences have no room for."""
        self._ctx, self._failed, self._snapshots = ctx, failed, snapshots
        unwanted: WeakSet[Generation] = WeakSet()  # cancelled, and perhaps still to come from `generations`
        self._unwanted, self._more = unwanted, (g for g in generations if g not in unwanted)
        self._turn = 0
        self._adapters: Hashable = None  # those of the last batch, when a generation has some of its own
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
        self._unwanted.add(generation)
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
            empty = replace(generation, prompt=(), media=None)
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
        at = 0
        while at < len(self._waiting):
            g = self._waiting[at]
            free = self._free(g)
            seq = self._place(g, free) if free else None
            if seq is not None:
                del self._waiting[at]
                slot = Slot(g, g.steps(), turn=self._turn)
                self.slots[seq : seq + 1] = [slot]
                if not self._waiting:
                    self._waiting.extend(islice(self._more, 1))
                turns.append((slot, None))
            elif free or g.wants_seq is None:
                break
            else:  # it waits for its sequence, and holds up no other
                at += 1
        return turns

    def _free(self, g: Generation) -> list[int]:
        """The sequences that a generation could have now."""
        n = len(self.slots)
        free = [seq for seq in range(min(n + 1, self._ctx.memory.n_seq_max)) if seq == n or self.slots[seq].ended]
        if g.wants_seq is None:
            return free
        if g.wants_seq > n:
            self.hold(g.wants_seq - 1, replace(g, prompt=(), media=None))
        return [g.wants_seq] if g.wants_seq >= n or g.wants_seq in free else []

    def _place(self, g: Generation, free: Sequence[int]) -> int | None:
        """Let one of the free sequences hold the beginning that the prompt has in common with an evaluated text, and
        return it. Returns None when it is worth waiting until another generation has evaluated more of that
        beginning."""
        if g.n_cells is None:  # it has the context to itself, and continues sequence 0
            return free[0]
        prompt, key = list(g.keys[:-1]), adapters_key(g)
        source, n, snapshot = None, 0, None
        if g.reuses and not g.source:
            alike = [s.n_alike(prompt) if s.key == key else 0 for s in self.slots]
            usable = [self._usable(seq, k, free) for seq, k in enumerate(alike)]
            n = max(usable, default=0)
            source = usable.index(n) if n else None
            under_way = (k for k, s in zip(alike, self.slots, strict=True) if not s.ended and not s.moved)
            if self._ctx.memory.keeps_all and max(under_way, default=0) >= n + _WORTH_WAITING:
                return None
            if self._snapshots is not None:
                found, n_found = self._snapshots.find(key, prompt)
                if found is not None and n_found >= n + _WORTH_KEEPING:
                    source, n, snapshot = None, n_found, found
        n = g.whole(n)
        seq = self._chosen(free, source, n)
        self._keep(seq, n if seq == source else 0)
        g.n_past = g.n_done = self._filled(g, seq, source, snapshot, n)
        g.seq = seq
        if g.long is not None:
            g.long.seq = seq
        return seq

    def _usable(self, seq: int, n: int, free: Sequence[int]) -> int:
        """How many of `n` tokens, with which a prompt and the text of a slot begin alike, need not be evaluated."""
        n, memory = min(n, self.slots[seq].n_held), self._ctx.memory
        if memory.keeps_all:
            return n
        # other memories cannot be cut anywhere, and the sequence itself must go on
        return n if seq in free and memory.can_remove(seq, n) else 0

    def _chosen(self, free: Sequence[int], source: int | None, n: int) -> int:
        """The sequence for a prompt of which `source` holds `n` tokens: `source` itself when it loses less than half of
        its text, or the one that nobody has needed for longest, empty ones first."""
        if (
            source is not None
            and source in free
            and (not self._ctx.memory.keeps_all or 2 * n >= self.slots[source].n_held)
        ):
            return source
        turns = {seq: self.slots[seq].turn if seq < len(self.slots) and self.slots[seq].n_held else -1 for seq in free}
        return min(free, key=lambda seq: (turns[seq], seq == source))

    def _keep(self, seq: int, n: int) -> None:
        """Keep a snapshot of a sequence that is to lose all but `n` tokens, when no other one has them."""
        if self._snapshots is None or seq >= len(self.slots):
            return
        slot = self.slots[seq]
        held = slot.text[: slot.n_held]
        lost = len(held) - n
        if not slot.generation.reuses or slot.moved or lost < max(_WORTH_KEEPING, len(held) / 2):
            return
        others = [s for i, s in enumerate(self.slots) if i != seq and s.key == slot.key and s.n_held >= len(held)]
        if not any(s.n_alike(held) == len(held) for s in others):
            self._snapshots.keep(slot.key, held, seq)

    def _filled(self, g: Generation, seq: int, source: int | None, snapshot: Snapshot | None, n: int) -> int:
        """Let sequence `seq` hold the first `n` tokens of `source`, or of a snapshot. Returns how many it holds."""
        memory, snapshots = self._ctx.memory, self._snapshots
        if snapshot is not None and snapshots is not None:
            snapshots.restore(snapshot, seq)
        elif source is None:
            memory.seq_rm(seq)
        elif source != seq:
            memory.seq_rm(seq)
            if g.long is None and self.slots[source].generation.long is None:
                memory.seq_cp(source, seq, 0, n)
            elif snapshots is not None:  # a context shift moves cells, which must belong to one sequence alone
                snapshots.copy(source, seq)
        if memory.seq_pos_max(seq) + 1 < n or not memory.seq_rm(seq, n, -1):
            memory.seq_rm(seq)
            return 0
        return n

    def _evaluated(self) -> list[_Turn]:
        """Evaluate what generations wait for, single tokens before prompts, those first that have waited for longest,
        as far as a batch has room. Returns those that had their turn."""
        ctx = self._ctx
        for slot in self.slots:
            if slot.pending is not None and not isinstance(slot.pending, Placed):  # it has the context to itself
                g = slot.generation
                tokens = slot.pending[: g.n_next(min(len(slot.pending), ctx.n_batch))]
                if not tokens and len(slot.pending):
                    raise _too_large(g, ctx.n_batch)
                media = g.media_at(range(g.n_done, g.n_done + len(tokens)))
                if media:
                    batch = Batch.prompt(tokens, ctx.memory.seq_pos_max(0) + 1)
                    batch.media = media
                    ctx.decode(batch)
                else:
                    ctx.decode(tokens)
                g.n_done += len(tokens)
                return [(slot, ctx.logits)]
        parts = sorted(self._together(), key=_by_turn)
        batch, taken = Batch(), list[tuple[Slot, int, int]]()  # tokens of each, and rows of logits
        for (slot, (tokens, pos, seqs, n_outputs)), n in zip(parts, self._sizes(parts), strict=True):
            g, base = slot.generation, len(batch)
            if g.media is not None and seqs[0] == g.seq:
                batch.media |= {base + i: row for i, row in g.media_at(pos[:n]).items()}
            n_rows = n_outputs if n == len(tokens) else 0
            batch.extend(tokens[:n], pos[:n], seqs[:n], n_rows)
            taken.append((slot, n, n_rows))
        if taken:
            ctx.decode(batch)
        turns: list[_Turn] = []
        row = 0
        self._turn += 1
        for slot, n, n_rows in taken:
            is_checkpoint = self._to_checkpoint(slot.generation) == n
            slot.generation.n_done += n
            slot.generation.is_alone = len(taken) == 1
            slot.turn = self._turn if n else slot.turn
            if is_checkpoint and self._snapshots is not None:
                self._snapshots.keep(slot.key, slot.text[: slot.n_held], slot.generation.seq, True)
            row += n_rows
            turns.append((slot, ctx.logits[row - n_rows : row]))
        return turns

    def _together(self) -> list[tuple[Slot, Placed]]:
        """The slots that can be evaluated in one batch, those with the adapters whose turn is the longest ago, and what
        they wait for."""
        active = [(slot, slot.pending) for slot in self.slots if isinstance(slot.pending, Placed)]
        if not active:
            return []
        first, _ = min(active, key=lambda a: a[0].turn)
        if first.generation.loras is not None and self._adapters != first.key:
            self._ctx.set_loras(first.generation.loras)
            self._adapters = first.key
        return [(slot, pending) for slot, pending in active if slot.key == first.key]

    def _sizes(self, parts: Sequence[tuple[Slot, Placed]]) -> list[int]:
        """How many tokens of each part go into a batch: as many as there is room for; of a prompt those up to its
        checkpoint, and of tokens that see each other, or whose logits are wanted together, all or none."""
        n_batch, sizes = self._ctx.n_batch, list[int]()
        for slot, want in parts:
            g, room = slot.generation, n_batch - sum(sizes)
            n = min(len(want.tokens), room, self._to_checkpoint(g) or len(want.tokens))
            if want.n_outputs > 1 and n < len(want.tokens):
                n = 0
            elif g.media is not None and want.seqs[0] == g.seq:
                n = g.n_next(n) or g.n_next(min(len(want.tokens), room))
                if not n and not sum(sizes):
                    raise _too_large(g, n_batch)
            sizes.append(n)
        return sizes

    def _to_checkpoint(self, g: Generation) -> int:
        """How many tokens of a prompt are evaluated before a checkpoint is made; 0 when none is."""
        if self._snapshots is None or not self._snapshots.checkpoints or not g.reuses or g.source:
            return 0
        at = len(g.prompt) - _CHECKPOINT
        return at - g.n_done if at > max(g.n_done, _CHECKPOINT) else 0


def _by_turn(active: tuple[Slot, Placed]) -> tuple[bool, int]:
    """The order in which slots have room in a batch: tokens that may be evaluated in several batches come after those
    that may not, and of each kind first what had no turn for longest."""
    slot, (tokens, _, _, n_outputs) = active
    return len(tokens) > 1 and n_outputs == 1, slot.turn


def adapters_key(g: Generation) -> Hashable:
    """Stands for the adapters of a generation: equal for those that may be evaluated together, or share tokens."""
    return None if g.loras is None else tuple((id(lora), scale) for lora, scale in g.loras if scale)
