"""Texts that sequences held, kept in memory under a budget: a prompt that begins like one goes on from there."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from pyggml.buffers.buffer import check_free_memory
from pyggml.errors import AllocError, GGMLError
from pyggml.models.memory.recurrent import RecurrentCells

from ..state.save_load import load_own_seq, own_seq_bytes
from .prefixes import common_prefix

if TYPE_CHECKING:
    from ..state.save_load import Stateful


@dataclass(eq=False)
class Snapshot:
    """The state of a sequence after `tokens`, which were evaluated with the adapters that `key` stands for."""

    key: Hashable
    tokens: list[int]
    data: bytes = field(repr=False)
    is_checkpoint: bool
    worth: float = 0.0
    last_use: int = 0  # when it was used last: the uses of all snapshots are numbered


class Snapshots:
    """Snapshots of the sequences of `ctx`, in `n_bytes` at most. A snapshot is found by its own tokens and adapters.

    What is worth least goes first: worth is what evaluating the tokens again would take for each byte, and grows with
    each use (GreedyDual-Size; Cao and Irani 1997). Checkpoints, of prompts that are not at their end yet, are
    `n_checkpoints` at most.
    """

    def __init__(self, ctx: Stateful, n_bytes: int, n_checkpoints: int = 0) -> None:
        self._ctx, self.n_bytes, self._n_checkpoints = ctx, n_bytes, n_checkpoints
        self.nbytes = 0  # of all snapshots
        self._sorted: dict[Hashable, list[Snapshot]] = {}  # those of a key, by their tokens: those alike are neighbours
        self._floor = 0.0  # the worth of what was dropped last: what is kept or used now counts above it
        self._n_uses = 0
        self._by_use: dict[int, Snapshot] = {}  # all snapshots, by `last_use`
        # A heap: the worth and `last_use` of each snapshot. What a later use has made untrue stays until it is on top.
        self._by_worth: list[tuple[float, int]] = []
        self._marks: list[Snapshot] = []  # the checkpoints

    @property
    def kept(self) -> list[Snapshot]:
        """All snapshots."""
        return [*self._by_use.values()]

    @property
    def checkpoints(self) -> bool:
        """Whether the memory needs checkpoints, because it cannot be cut at any position, and may have them."""
        return not self._ctx.memory.keeps_all and self._n_checkpoints > 0 and self.n_bytes > 0

    def keep(self, key: Hashable, tokens: Sequence[int], seq: int, is_checkpoint: bool = False) -> None:
        """Keep sequence `seq`, which holds `tokens`, unless another snapshot has them or there is no room."""
        tokens = list(tokens)
        cuts = self._ctx.memory.keeps_all
        for s in self._near(key, tokens):
            if s.tokens[: len(tokens)] == tokens and (cuts or len(s.tokens) == len(tokens)):
                self._use(s)
                return
        size = self._size(seq)
        try:
            check_free_memory(2 * size, "a snapshot")  # its arrays, and all of them joined
            self._make_room(size)
            if size > self.n_bytes:
                return
            data = own_seq_bytes(self._ctx, seq)
        except (AllocError, MemoryError):
            return
        self._make_room(len(data))
        if len(data) > self.n_bytes:
            return
        if cuts:
            for s in tuple(self._beginnings(key, tokens)):
                self._remove(s)
        self._use(new := Snapshot(key, tokens, data, is_checkpoint))
        insort(self._sorted.setdefault(key, []), new, key=_tokens)
        self.nbytes += len(data)
        if is_checkpoint:
            self._marks.append(new)
            if len(self._marks) > self._n_checkpoints:
                self._drop(min(self._marks, key=_worth))

    def find(self, key: Hashable, prompt: Sequence[int]) -> tuple[Snapshot | None, int]:
        """The snapshot that has most of the beginning of a prompt, and how many tokens of it are used; (None, 0) when
        there is none."""
        prompt = list(prompt)
        if self._ctx.memory.keeps_all:
            found = max(self._near(key, prompt), key=lambda s: common_prefix(s.tokens, prompt), default=None)
        else:
            found = next(self._beginnings(key, prompt), None)
        n = 0 if found is None else common_prefix(found.tokens, prompt)
        return (found, n) if n else (None, 0)

    def restore(self, snapshot: Snapshot, seq: int) -> bool:
        """Put a snapshot, which may be dropped by now, in the place of what sequence `seq` holds. False, with `seq`
        empty, when that cannot be."""
        try:
            load_own_seq(self._ctx, snapshot.data, seq)
        except (GGMLError, MemoryError):
            self._ctx.memory.seq_rm(seq)
            return False
        if self._by_use.get(snapshot.last_use) is snapshot:
            self._use(snapshot)
        return True

    def copy(self, source: int, seq: int) -> bool:
        """Let `seq` hold what `source` holds, in cells of its own. False, with `seq` empty, when that cannot be."""
        try:
            load_own_seq(self._ctx, own_seq_bytes(self._ctx, source), seq)
        except (GGMLError, MemoryError):
            self._ctx.memory.seq_rm(seq)
            return False
        return True

    def _near(self, key: Hashable, tokens: list[int]) -> Sequence[Snapshot]:
        """Of all snapshots of a key, those that share most of the beginning of a text: the last that is before it in
        their order, and the first two that are not (the first may be that of the text itself)."""
        alike = self._sorted.get(key, [])
        at = bisect_left(alike, tokens, key=_tokens)
        return alike[max(at - 1, 0) : at + 2]

    def _beginnings(self, key: Hashable, tokens: list[int]) -> Iterator[Snapshot]:
        """The snapshots of which the text has all tokens at its beginning, the longest first."""
        alike = self._sorted.get(key, [])
        while tokens and (at := bisect_right(alike, tokens, key=_tokens)):
            s = alike[at - 1]
            n = common_prefix(s.tokens, tokens)
            if n == len(s.tokens):
                yield s
                n -= 1
            tokens = tokens[:n]  # what is before `s` and begins the text, begins `s`

    def _use(self, s: Snapshot) -> None:
        """Count a use: it is worth the tokens that no other snapshot has."""
        n_shared = max(
            (common_prefix(s.tokens, o.tokens) for o in self._near(s.key, s.tokens) if o is not s), default=0
        )
        s.worth = self._floor + (len(s.tokens) - n_shared) / len(s.data)
        self._by_use.pop(s.last_use, None)
        self._n_uses += 1
        s.last_use = self._n_uses
        self._by_use[s.last_use] = s
        heappush(self._by_worth, (s.worth, s.last_use))
        if len(self._by_worth) > 2 * len(self._by_use) + 64:
            self._by_worth = [(kept.worth, use) for use, kept in self._by_use.items()]
            heapify(self._by_worth)

    def _least(self) -> Snapshot:
        """The snapshot that is worth least. There is one."""
        while (least := self._by_use.get(self._by_worth[0][1])) is None:
            heappop(self._by_worth)
        return least

    def _remove(self, s: Snapshot) -> None:
        del self._by_use[s.last_use]
        if s.is_checkpoint:
            self._marks.remove(s)
        alike = self._sorted[s.key]
        del alike[bisect_left(alike, s.tokens, key=_tokens)]
        if not alike:
            del self._sorted[s.key]
        self.nbytes -= len(s.data)

    def _drop(self, s: Snapshot) -> None:
        self._remove(s)
        self._floor = max(self._floor, s.worth)

    def _make_room(self, n: int) -> None:
        while self.nbytes and self.nbytes + n > self.n_bytes and n <= self.n_bytes:
            self._drop(self._least())

    def _size(self, seq: int) -> int:
        """About how many bytes a snapshot of a sequence has."""
        size = 0
        for store in self._ctx.memory.stores:
            if isinstance(store, RecurrentCells):
                size += store.nbytes // store.n_cells
            else:
                size += (store.nbytes // store.size + 16) * (store.seq_pos_max(seq) - store.seq_pos_min(seq) + 1)
        return size + 4096


def _tokens(s: Snapshot) -> list[int]:
    return s.tokens


def _worth(s: Snapshot) -> float:
    return s.worth
