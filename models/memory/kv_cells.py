"""The cells of a KV cache: which token each cell holds, and of which sequences. They are NumPy arrays, so that masks
are computed quickly.

Semantics: llama.cpp's llama_kv_cache (cells with pos, delta and a set of sequence ids; head; find_slot).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pyggml.errors import GGMLError, KVCacheFull, whole
from pyggml.lock import Lock, changing
from pyggml.types import Ints

from .members import Members

P = ParamSpec("P")
T = TypeVar("T")
SeqSets = Sequence[tuple[int, ...]]
Cells = TypeVar("Cells", bound="Copyable")
KV = TypeVar("KV", bound="KVCells")

INT32_MAX = 2**31 - 1
EMPTY, SHARED = -1, -2  # no sequence; several
LAST_POS = INT32_MAX - 1
_COPIED = ("pos", "delta", "drift", "pos_max", "seq_end", "owner")


def _within(pos: Ints, p0: int, p1: int) -> npt.NDArray[np.bool_]:
    """Which positions are in p0 <= p < p1 (p1 < 0: to the end), and not negative."""
    first, end = whole("p0", p0), whole("p1", p1)
    return (pos >= min(max(first, 0), INT32_MAX)) & (pos < (INT32_MAX if end < 0 else min(end, INT32_MAX)))


def _owners(seq: npt.NDArray[np.bool_]) -> Ints:
    """The owner of each column of `seq`, bool [n_seq_max, n], see `KVCells.owner`."""
    n = np.count_nonzero(seq, axis=0)
    return np.where(n == 1, seq.argmax(axis=0), np.where(n, SHARED, EMPTY)).astype(np.int32)


class Copyable(Protocol):
    """An object that can be copied, so that a change is tried on the copy first. `is_trial`: it is such a copy."""

    is_trial: bool

    def copied(self: Cells) -> Cells:
        """The same, with arrays of its own."""
        ...


def change(cells: Sequence[Cells], op: Callable[[Cells], T]) -> list[T]:
    """Change each of `cells` by `op`, and return what `op` returned for each. All of them are changed, or none when
    `op` raises or a signal comes: `op` works on copies, and `list` puts these in place in one call, in which no signal
    is handled."""
    copies = [c.copied() for c in cells]
    for c in copies:
        c.is_trial = True
    results = [op(c) for c in copies]
    for c in copies:
        c.is_trial = False
    list(map(dict[str, Any].update, map(vars, cells), map(vars, copies)))
    return results


def at_once(op: Callable[Concatenate[Cells, P], T]) -> Callable[Concatenate[Cells, P], T]:
    """Make a method an operation that is done as a whole or not at all, see `change`."""

    @wraps(op)
    def run(cells: Cells, *args: P.args, **kwargs: P.kwargs) -> T:
        if cells.is_trial:
            return op(cells, *args, **kwargs)
        return change((cells,), lambda c: op(c, *args, **kwargs))[0]

    return run


def is_negative(seq_id: int) -> bool:
    """Whether `seq_id` stands for all sequences. Raises GGMLError when it is no whole number."""
    return whole("a sequence", seq_id) < 0


def checked_seq(seq_id: int, n_seq_max: int) -> int:
    """`seq_id`. Raises GGMLError when there is no such sequence."""
    seq = whole("a sequence", seq_id)
    if not 0 <= seq < n_seq_max:
        raise GGMLError(f"sequence {seq} is outside 0..{n_seq_max - 1} (n_seq_max = {n_seq_max})")
    return seq


class Slot(NamedTuple):
    """Cells `start` .. `start + n` for `n` tokens, and the head before they are taken."""

    start: int
    n: int
    head: int


class Cell(NamedTuple):
    """What one cell holds: the position of a token (-1: empty) and the sequences it belongs to."""

    pos: int
    seq_id: frozenset[int]


class KVCells:
    """`size` cells for up to `n_seq_max` sequences; attention looks at multiples of `padding` cells.

    pos     int32 [size]: the position of the token a cell holds, -1 for an empty cell
    delta   int32 [size]: what was added to the position since its K was roped (see `has_shift`), 0 for an empty cell
    drift   int32 [size]: the position of the next token of text in the rope, minus its position in the sequence. It is
            not 0 behind a picture in models whose tokens have positions in time, height and width, because a picture
            of 3 x 4 rows moves the positions of the rope on by 4
    members which sequences a cell belongs to
    pos_max int32 [n_seq_max]: the largest position of each sequence, -1 when it has no cells
    seq_end int32 [n_seq_max]: one past the last cell of each sequence, 0 when it has no cells
    owner   int32 [size]: the sequence of a cell, EMPTY, or SHARED when it belongs to several
    head    where the search for the next slot starts
    used    cells that are not empty
    end     one past the last cell that is not empty
    fixed   the reason why positions cannot be changed, for the errors of seq_add and seq_div; empty when they can
    version rises by one with every change of the cells (a `hold` is one change)
    lock    held by operations on sequences and, as it is the context's, by everything that a context does

    The cells of each sequence ascend in position. Attention sums in the order of cells, so the result of a token does
    not depend on where they lie (docs/memory.md). Tokens are put behind the last cell of their sequence; when there is
    no room, the holes before have to be closed. An operation that leaves a sequence out of order wants its cells sorted
    before the next step, see `order`.

    Operations are done as a whole or, when they raise or a signal comes, not at all; `hold` alone changes the cells
    bit by bit, for speed, and is taken back with `undo`.
    """

    pos: Ints
    delta: Ints
    drift: Ints
    members: Members
    pos_max: Ints
    seq_end: Ints
    owner: Ints
    head: int
    used: int
    end: int
    has_shift: bool
    wants_defrag: bool
    fixed: str = ""
    is_trial: bool = False

    def __init__(self, size: int, n_seq_max: int = 1, padding: int = 32) -> None:
        self.size, self.n_seq_max, self.padding = -(-size // padding) * padding, n_seq_max, padding
        self.version, self.lock = 0, Lock()
        self.clear()

    @changing
    def clear(self) -> None:
        """Empty all cells."""
        vars(self).update(
            pos=np.full(self.size, -1, np.int32),
            delta=np.zeros(self.size, np.int32),
            drift=np.zeros(self.size, np.int32),
            members=Members(self.n_seq_max, self.size),
            pos_max=np.full(self.n_seq_max, -1, np.int32),
            seq_end=np.zeros(self.n_seq_max, np.int32),
            owner=np.full(self.size, EMPTY, np.int32),
            **dict.fromkeys(("head", "used", "end"), 0),
            **dict.fromkeys(("has_shift", "wants_defrag"), False),
            version=self.version + 1,
        )

    def copied(self: KV) -> KV:
        """The same, with cells of its own."""
        new = object.__new__(type(self))
        arrays = {name: getattr(self, name).copy() for name in _COPIED}
        vars(new).update(vars(self), **arrays, members=self.members.copied())
        return new

    @property
    def cells(self) -> list[Cell]:
        """All cells as they are now, to look at."""
        seq = self.seq
        return [Cell(int(self.pos[i]), frozenset(np.flatnonzero(seq[:, i]).tolist())) for i in range(self.size)]

    @property
    def seq(self) -> npt.NDArray[np.bool_]:
        """bool [n_seq_max, size]: which sequences a cell belongs to now, to look at."""
        return self.members.of(slice(None))

    # -- slots ----------------------------------------------------------------------------------------------------

    def find_slot(self, n: int, behind: int = 0) -> int:
        """Find `n` consecutive empty cells from cell `behind` on, and return the first of them. The search begins at
        the head, and then at `behind`. When most cells before the head are empty, it begins there at once. Raises
        KVCacheFull."""
        first = max(behind, 0 if self.head > self.used + 2 * n else self.head)
        if first + n <= self.size and (self.pos.item(first) < 0 if n == 1 else self.pos[first : first + n].max() < 0):
            return first
        if n <= self.size - self.used:
            taken = np.zeros(self.size + 1, np.int32)
            np.cumsum(self.pos >= 0, out=taken[1:])
            starts = np.flatnonzero(taken[n:] == taken[: self.size + 1 - n])
            starts = starts[starts >= behind]
            if len(starts):
                later = starts[starts >= first]
                return int(later[0] if len(later) else starts[0])
        raise self.full(n)

    def full(self, n: int) -> KVCacheFull:
        """The error to raise when `n` tokens do not fit."""
        free = self.size - self.used
        where = "" if free < n else ", but not side by side behind the cells of the sequences"
        text = f"{n} cells are needed; {free} of the {self.size} cells of the KV cache are free{where}"
        return KVCacheFull(text, n, free)

    def slot_of(self, n: int, seq: Ints, sets: SeqSets | None = None) -> Slot:
        """Where `hold` may put `n` tokens of these sequences: behind all cells that these have. Raises KVCacheFull."""
        behind = self.seq_end.item(seq.item(0)) if n == 1 else int(self.seq_end[seq].max())
        for ids in sets or ():
            behind = max(behind, *(self.seq_end.item(s) for s in ids))
        return Slot(self.find_slot(n, behind), n, self.head)

    def hold(self, slot: Slot, pos: Ints, seq: Ints, sets: SeqSets | None = None, drift: Ints | None = None) -> None:
        """Put tokens at positions `pos` into a slot. Token i belongs to sequence seq[i], or to all of sets[i]. `drift`:
        see there; None: 0 for all.

        The head moves to the end of the slot. When a signal breaks this off, `undo` takes back what was done.
        """
        n, start = slot.n, slot.start
        stop = start + n
        if drift is not None:
            self.drift[start:stop] = drift
        if n == 1 and sets is None:
            s, p = seq.item(0), pos.item(0)
            self.pos[start], self.owner[start] = p, s
            self.members.add(s, start)
            self.seq_end[s] = stop
            if p > self.pos_max.item(s):
                self.pos_max[s] = p
        else:
            self.pos[start:stop] = pos
            self.owner[start:stop] = seq
            cells = np.arange(start, stop, dtype=np.int32)
            self.members.add_each(seq, cells)
            np.maximum.at(self.pos_max, seq, pos)
            self.seq_end[seq] = cells + 1
            for i, ids in enumerate(sets or ()):
                if any(s != seq[i] for s in ids):
                    self.owner[start + i] = SHARED
                for s in ids:
                    self.members.add(s, start + i)
                    self.pos_max[s], self.seq_end[s] = max(self.pos_max[s], pos[i]), start + i + 1
        self.used += n
        if stop > self.end:
            self.end = stop
        self.head = 0 if stop >= self.size else stop
        self.version += 1

    @at_once
    def undo(self, slots: Sequence[Slot]) -> None:
        """Take back slots (in the order they were taken): all is as it was before the first of them."""
        for slot in slots:
            self._free(np.arange(slot.start, slot.start + slot.n))
        self._settle()
        self.head = slots[0].head if slots else self.head

    @at_once
    def put(self, cells: Ints, pos: Ints, delta: Ints, drift: Ints | int, seq: npt.NDArray[np.bool_]) -> None:
        """Fill empty `cells` as they were when saved; `seq` is bool [n_seq_max, n]. The head stays."""
        self.pos[cells], self.delta[cells], self.drift[cells] = pos, delta, drift
        self.members.put(cells, seq)
        self.owner[cells] = _owners(seq)
        self.has_shift |= bool(delta.any())
        self._settle()
        self._want_order()

    # -- what a graph needs ---------------------------------------------------------------------------------------

    def n_kv(self, end: int = 0) -> int:
        """How many cells attention looks at: up to the last one in use (at least `end`), padded."""
        end = max(self.end, end, 1)
        return min(self.size, -(-end // self.padding) * self.padding)

    def end_drift(self, seq_id: int) -> int:
        """The `drift` behind the last token of a sequence; 0 for an empty one."""
        cells = np.flatnonzero(self.members.cells_of(seq_id))
        return int(self.drift[cells[self.pos[cells].argmax()]]) if len(cells) else 0

    # -- operations on sequences ----------------------------------------------------------------------------------

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position of a sequence, -1 when it has no cells."""
        return int(self.pos_max[self._checked(seq_id)])

    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position of a sequence, -1 when it has no cells."""
        pos = self.pos[self.members.cells_of(self._checked(seq_id))]
        return int(pos.min()) if len(pos) else -1

    @changing
    @at_once
    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Remove the positions p0 <= p < p1 (p1 < 0: to the end) of a sequence (seq_id < 0: of all). Returns True."""
        if is_negative(seq_id):
            seqs = None
            empty = np.flatnonzero(_within(self.pos, p0, p1))
        else:
            seqs = (seq_id,)
            removed = self._cells_at(seq_id, p0, p1)
            is_shared = self.owner[removed] == SHARED
            empty, shared = removed[~is_shared], removed[is_shared]
            if len(shared):
                self.members.remove(seq_id, shared)
                self.owner[shared] = _owners(self.members.of(shared))
        self._free(empty)
        self._settle(seqs)
        if len(empty):
            self.head = min(self.head, int(empty[0]))
        return True

    @changing
    def forget(self, first: Ints) -> None:
        """Remove from each sequence s the positions before first[s], int32 [n_seq_max], as `seq_rm` of each would do,
        in one pass over the cells."""
        pos, owner = self.pos[: self.end], self.owner[: self.end]
        before = np.append(first, (-1, -1)).astype(np.int32)  # the last two: for SHARED and EMPTY
        old = np.flatnonzero(pos < before[owner])
        shared = np.flatnonzero((owner == SHARED) & (pos < first.max()))
        before_of = self.members.of(shared)
        seq = before_of & (pos[shared] >= first[:, None])
        owners = _owners(seq)
        freed = np.append(old, shared[owners == EMPTY])
        if not len(freed) and (seq == before_of).all():
            return
        end = self.end
        if len(freed) and freed.max() == end - 1:
            taken = pos >= 0
            taken[freed] = False
            end = int(np.flatnonzero(taken).max(initial=-1)) + 1
        head = min(self.head, int(freed.min())) if len(freed) else self.head
        new = self.copied()
        new.members.put(shared, seq)
        new.owner[shared] = owners
        new.pos_max[new.pos_max < first] = -1
        new.seq_end[new.pos_max < 0] = 0
        new._free(freed)
        new.used, new.end, new.head, new.version = self.used - len(freed), end, head, self.version + 1
        vars(self).update(vars(new))  # one call: a signal comes before or after it

    @changing
    @at_once
    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """Let the cells of sequence `src` in a range of positions belong to `dst` too; no data moves."""
        where = self._cells_at(src, p0, p1)
        self.members.add(self._checked(dst), where)
        self.owner[where] = _owners(self.members.of(where))
        self._settle((dst,))
        self._want_order((dst,))
        self.head = 0

    @changing
    @at_once
    def seq_keep(self, seq_id: int) -> None:
        """Remove all sequences but one."""
        keep = self.members.cells_of(self._checked(seq_id))
        empty = np.flatnonzero(~keep)
        self._free(empty)
        self.members.clear(keep)
        self.members.add(seq_id, keep)
        self.owner[keep] = seq_id
        self._settle()
        if len(empty):
            self.head = min(self.head, int(empty[0]))

    @changing
    @at_once
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add `delta` to the positions of a sequence in p0 <= p < p1; cells that would get a negative one are freed.

        K is roped again before the next step (`has_shift`).
        """
        delta = whole("seq_add: delta", delta, -INT32_MAX, INT32_MAX)
        if delta == 0:
            return
        where = self._cells_at(seq_id, p0, p1)
        freed = self._move(where, self.pos[where].astype(np.int64) + delta)
        self.head = int(freed[0]) if len(freed) else 0

    @changing
    @at_once
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions of a sequence in p0 <= p < p1 by `d` (whole numbers, as self-extend does)."""
        d = min(whole("seq_div: the divisor", d), INT32_MAX)
        if d < 1:
            raise GGMLError(f"seq_div: the divisor must be at least 1, not {d}")
        if d == 1:
            return
        where = self._cells_at(seq_id, p0, p1)
        self._move(where, self.pos[where].astype(np.int64) // d)

    @at_once
    def shift_done(self) -> None:
        """Note that K was roped to the positions that the cells have now."""
        self.delta.fill(0)
        self.has_shift = False

    # -- defragmentation ------------------------------------------------------------------------------------------

    def defrag(self) -> None:
        """Close the holes between cells before the next step; the data moves through a graph then. (An operation that
        leaves a sequence out of order calls for it, too.)"""
        self.wants_defrag = True

    def fragmentation(self) -> float:
        """The share of empty cells among those up to the last one in use (the padding does not count); 0 for fewer than
        128 cells, in which holes cost nothing."""
        n = self.n_kv()
        return max(0.0, 1.0 - (self.used + self.padding) / n) if n >= 128 else 0.0

    def order(self) -> Ints:
        """Cells in use: cell order()[i] is the one that `defrag_done` puts at i. They stay in their order, unless a
        sequence is out of order; then they are sorted by position, which brings every sequence into order."""
        cells = np.flatnonzero(self.pos >= 0).astype(np.int32)
        return cells if self._ascends() else cells[np.argsort(self.pos[cells], kind="stable")]

    @at_once
    def defrag_done(self) -> None:
        """The data of cell order()[i] was moved to cell i: number the cells accordingly."""
        order = self.order()
        n = len(order)
        for a in (self.pos, self.delta, self.drift, self.owner):
            a[:n] = a[order]
        self.members.put(slice(n), self.members.of(order))
        self._free(np.arange(n, self.size))
        self._settle()
        self.head = 0 if n >= self.size else n
        self.wants_defrag = False

    def is_packed(self) -> bool:
        """Whether `defrag_done` would leave all cells where they are."""
        return self.used == self.end and self._ascends()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _checked(self, seq_id: int) -> int:
        return checked_seq(seq_id, self.n_seq_max)

    def _cells_at(self, seq_id: int, p0: int, p1: int) -> npt.NDArray[Any]:
        """The cells of a sequence whose position is in p0 <= p < p1."""
        cells = self._cells_of(self._checked(seq_id))
        return cells[_within(self.pos[cells], p0, p1)]

    def _free(self, cells: npt.NDArray[Any]) -> None:
        self.pos[cells] = -1
        self.delta[cells] = self.drift[cells] = 0
        self.owner[cells] = EMPTY
        self.members.clear(cells)

    def _settle(self, seqs: Sequence[int] | None = None) -> None:
        """Bring the counts up to date after cells of some sequences (None: all) were taken or freed."""
        taken = self.pos >= 0
        self.used = int(np.count_nonzero(taken))
        self.end = taken.tobytes().rfind(1) + 1  # a tenth of the time of NumPy's ways, in large caches
        self.version += 1
        for s in range(self.n_seq_max) if seqs is None else seqs:
            cells = self._cells_of(s)
            self.pos_max[s] = self.pos[cells].max(initial=-1)
            self.seq_end[s] = cells[-1] + 1 if len(cells) else 0

    def _cells_of(self, seq: int) -> npt.NDArray[Any]:
        return np.flatnonzero(self.members.cells_of(seq, self.end))  # most of a large cache is often empty

    def _ascends(self, seqs: Sequence[int] | None = None) -> bool:
        """Whether the cells of some sequences (None: of each) ascend in position."""
        positions = (self.pos[self._cells_of(s)] for s in (range(self.n_seq_max) if seqs is None else seqs))
        return all(bool((p[1:] >= p[:-1]).all()) for p in positions)

    def _want_order(self, seqs: Sequence[int] | None = None) -> None:
        self.wants_defrag |= not self._ascends(seqs)

    def _move(self, cells: npt.NDArray[Any], pos: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Put `cells` at positions `pos`; returns those that were freed as theirs is negative."""
        if not len(cells):
            return cells
        if self.fixed:
            raise GGMLError(f"the tokens of this cache cannot be given other positions: {self.fixed}")
        if pos.max() >= INT32_MAX:
            raise GGMLError(f"a position would be {pos.max()}, beyond {LAST_POS}")
        self.delta[cells] += (pos - self.pos[cells]).astype(np.int32)
        self.pos[cells] = pos
        self.has_shift = True
        freed = cells[pos < 0]
        self._free(freed)
        self._settle()
        self._want_order()
        return freed
