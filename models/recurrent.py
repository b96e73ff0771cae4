"""The memory of recurrent models (Mamba, RWKV): one cell per sequence holds its whole state. No K, no V, no mask.

Semantics: llama.cpp's recurrent cells (tail, src, copy on branching). The operations are those of KVCells; what would
need a state of the past (removing a part of a sequence) is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyggml.errors import GGMLError, KVCacheFull

from .kv_cells import Cell, Ints

_END = np.iinfo(np.int32).max

Bools = npt.NDArray[np.bool_]
Saved = tuple[Ints, Ints, Ints, Bools]  # pos, src, tail, seq


@dataclass(frozen=True)
class RecurrentSlot:
    """Cells head .. head + n: those of the ubatch's sequences, in its order, and what lies between.

    The graph reads the states `copy` (int32 [n]: cells), clears those where `clear` (bool [n]) is set, lets the ubatch
    go on from the first ones, and writes all n to the cells from `head` on. `before` is what `undo` restores.
    """

    head: int
    n: int
    copy: Ints
    clear: Bools
    before: Saved


class RecurrentCells:
    """A cell for each of `n_seq_max` sequences.

    pos   int32 [size]: the position of the last token in the state, -1 for an empty cell
    src   int32 [size]: the cell whose state this one starts from in the next step; itself, or, after sequences
          branched, another; -1: from nothing
    seq   bool [n_seq_max, size]: which sequences a cell belongs to
    tail  int32 [n_seq_max]: the cell of a sequence, -1 where it has none
    head  the first cell of the last slot
    """

    def __init__(self, n_seq_max: int = 1) -> None:
        self.size = self.n_seq_max = n_seq_max
        self.pos: Ints = np.empty(n_seq_max, np.int32)
        self.src: Ints = np.empty(n_seq_max, np.int32)
        self.tail: Ints = np.empty(n_seq_max, np.int32)
        self.seq: Bools = np.empty((n_seq_max, n_seq_max), np.bool_)
        self.clear()

    def clear(self) -> None:
        """Empty all cells."""
        for a in (self.pos, self.src, self.tail):
            a.fill(-1)
        self.seq.fill(False)
        self.head = 0

    @property
    def used(self) -> int:
        """Cells that are not empty."""
        return int((self.pos >= 0).sum())

    @property
    def cells(self) -> list[Cell]:
        """All cells as they are now, to look at."""
        return [Cell(int(self.pos[i]), frozenset(np.flatnonzero(self.seq[:, i]).tolist())) for i in range(self.size)]

    @property
    def pos_max(self) -> Ints:
        """int32 [n_seq_max]: the last position of each sequence, -1 where it is empty."""
        return np.where(self.tail < 0, np.int32(-1), self.pos[self.tail])

    # -- slots ----------------------------------------------------------------------------------------------------

    def take(self, seq_id: Sequence[tuple[int, ...]], pos: Ints) -> RecurrentSlot:
        """Cells for a ubatch of equal sequences: `seq_id` are the sequences of each, pos [n_seqs] their last positions.

        A sequence that shares its cell with others gets one of its own, which starts from the shared state. The cells
        are brought side by side, in the order of the ubatch. Raises KVCacheFull, with nothing changed, where a cell
        is missing; GGMLError for a sequence that does not exist.
        """
        for s in {s for ids in seq_id for s in ids}:
            self._checked(s)
        before: Saved = np.array(self.pos), np.array(self.src), np.array(self.tail), np.array(self.seq)
        try:
            for ids in seq_id:
                for s in ids[1:]:  # they continue in the cell of the first one
                    self._leave(s)
                self._own(ids[0])
        except KVCacheFull:
            self._restore(before)
            raise
        tails = self.tail[[ids[0] for ids in seq_id]]
        head, n = int(tails.min()), int(tails.max() - tails.min()) + 1
        for i, ids in enumerate(seq_id):
            self._swap(head + i, int(self.tail[ids[0]]))
            self.pos[head + i] = pos[i]
            self.seq[list(ids), head + i] = True
            self.tail[list(ids)] = head + i
        cells = np.arange(head, head + n, dtype=np.int32)
        source = self.src[cells]
        slot = RecurrentSlot(head, n, np.where(source < 0, cells, source), source < 0, before)
        self.src[cells] = np.where(self.pos[cells] >= 0, cells, -1)
        self.head = head
        return slot

    def undo(self, slots: Sequence[RecurrentSlot]) -> None:
        """Take back slots (in the order they were taken): the cells are as they were before the first of them. States
        that were written in between are lost, however."""
        if slots:
            self._restore(slots[0].before)

    def full(self, n: int) -> KVCacheFull:
        """The error where `n` cells are not free."""
        free = self.size - self.used
        return KVCacheFull(f"{n} cells are needed; {free} of the {self.size} cells are free", n, free)

    # -- operations on sequences ----------------------------------------------------------------------------------

    def seq_pos_max(self, seq_id: int) -> int:
        """The position of the last token of a sequence, -1 where it is empty."""
        cell = self.tail[self._checked(seq_id)]
        return int(self.pos[cell]) if cell >= 0 else -1

    def seq_pos_min(self, seq_id: int) -> int:
        """As seq_pos_max: a state stands for its last position only."""
        return self.seq_pos_max(seq_id)

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Remove a sequence (seq_id < 0: all). False, with nothing changed, for a part of one: its state cannot forget.

        A range of positions p0 <= p < p1 (p1 < 0: to the end) must hold all of a sequence or nothing of it.
        """
        p0, p1 = max(p0, 0), _END if p1 < 0 else p1
        ids = range(self.n_seq_max) if seq_id < 0 else (self._checked(seq_id),)
        last = {s: self.seq_pos_max(s) for s in ids}
        if any(p0 < p1 and p0 <= p and (p0 > 0 or p1 <= p) for p in last.values()):
            return False
        for s, p in last.items():
            if p0 <= p < p1:
                self._leave(s)
        return True

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """Let sequence `dst` share the state of `src`; it gets its own when one of them goes on. The range of positions
        is not looked at: a state is whole."""
        if self._checked(src) == self._checked(dst):
            return
        self._leave(dst)
        cell = self.tail[src]
        if cell >= 0:
            self.seq[dst, cell] = True
            self.tail[dst] = cell

    def seq_keep(self, seq_id: int) -> None:
        """Remove all sequences but one."""
        self._checked(seq_id)
        for s in range(self.n_seq_max):
            if s != seq_id:
                self._leave(s)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add `delta` to the position of a sequence where it is in p0 <= p < p1 (p1 < 0: no end)."""
        cell = self._in_range(seq_id, p0, p1)
        if cell is not None:
            self._set_pos(cell, int(self.pos[cell]) + delta)

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the position of a sequence where it is in p0 <= p < p1 by `d` (whole numbers)."""
        if d < 1:
            raise GGMLError(f"seq_div: the divisor must be at least 1, not {d}")
        cell = self._in_range(seq_id, p0, p1)
        if cell is not None:
            self._set_pos(cell, int(self.pos[cell]) // d)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _checked(self, seq_id: int) -> int:
        if not 0 <= seq_id < self.n_seq_max:
            raise GGMLError(f"sequence {seq_id} is outside 0..{self.n_seq_max - 1} (n_seq_max = {self.n_seq_max})")
        return seq_id

    def _in_range(self, seq_id: int, p0: int, p1: int) -> int | None:
        p = self.seq_pos_max(seq_id)
        return int(self.tail[seq_id]) if p >= 0 and max(p0, 0) <= p < (_END if p1 < 0 else p1) else None

    def _set_pos(self, cell: int, pos: int) -> None:
        if not 0 <= pos < _END:
            raise GGMLError(f"a position would be {pos}, outside 0..{_END - 1}")
        self.pos[cell] = pos

    def _leave(self, s: int) -> None:
        """Take a sequence out of its cell; the cell is empty where it was the only one."""
        cell = self.tail[s]
        if cell < 0:
            return
        self.seq[s, cell] = False
        self.tail[s] = -1
        if not self.seq[:, cell].any():
            self.pos[cell] = self.src[cell] = -1

    def _own(self, s: int) -> None:
        """Give a sequence a cell that no other one shares, with the state it has."""
        old = int(self.tail[s])
        if old >= 0 and self.seq[:, old].sum() == 1:
            return
        empty = next((i for k in range(self.size) if not self.seq[:, i := (self.head + k) % self.size].any()), None)
        if empty is None:
            raise self.full(1)
        if old >= 0:
            self.pos[empty], self.src[empty] = self.pos[old], self.src[old]
            self.seq[s, old] = False
        self.seq[s, empty] = True
        self.tail[s] = empty

    def _swap(self, a: int, b: int) -> None:
        """Exchange two cells; `src` still says where their states are."""
        if a == b:
            return
        for x in (self.pos, self.src):
            x[[a, b]] = x[[b, a]]
        self.seq[:, [a, b]] = self.seq[:, [b, a]]
        for cell in (a, b):
            self.tail[self.seq[:, cell]] = cell

    def _restore(self, saved: Saved) -> None:
        self.pos[:], self.src[:], self.tail[:], self.seq[:] = saved
