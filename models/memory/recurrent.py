"""The memory of recurrent layers (state-space models, linear attention, short convolutions): cells with whole states.

A cell that a decode has filled is not written again: the next decode puts the states that follow into other cells. So
sequences share a state until they go on, a decode that fails leaves what was, and each sequence keeps the state from
before its last decode, to which its end can be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyggml.buffers.buffer import check_memory
from pyggml.dtypes import DType
from pyggml.errors import BatchError, GGMLError, KVCacheFull, StateError, whole
from pyggml.lock import Lock, changing
from pyggml.tensor import Context, Tensor, allocate_tensors
from pyggml.types import Ints

from ..hparams import HParams
from .kv_cells import INT32_MAX, LAST_POS, Cell, at_once, checked_seq, is_negative
from .state_file import Array, StateReader, members_of

if TYPE_CHECKING:
    from ..ubatch import UBatch

NOTHING = 0  # the cell that is never written: the state (all 0) of sequences that have not begun
SCRATCH = 1  # the cell of a transient memory that is never read


@dataclass(frozen=True)
class StateSlot:
    """For each sequence of a ubatch, the cell with the state that it goes on from and the cell for the new state (int32
    [n_seqs]); and the arrays of the cells before the ubatch is computed and after it."""

    read: Ints
    write: Ints
    before: dict[str, Ints]
    after: dict[str, Ints]


class RecurrentCells:
    """The states of `n_seq_max` sequences. Printed, it shows in which cell each of them is.

    r_l       for each layer that has them, F32 ne [floats of a state, n_cells]: the last tokens, for a convolution or a
              token shift
    s_l       the same for the state proper; the sizes are `HParams.state`
    p_l       the same for the last tokens of a second convolution
    recent    F32 ne [tokens, n_cells], for models that read them (`HParams.n_recent`): the last tokens before the
              position of a state, each plus 1; 0 for no token
    tail      int32 [n_seq_max]: the cell with the state of a sequence, NOTHING when the sequence is empty
    pos_max   int32 [n_seq_max]: the position of the last token in that state, -1 when the sequence is empty
    kept, kept_pos   as `tail` and `pos_max`, for the state before the last decode
    size      the number of cells that a context was asked for; a state takes any number of tokens
    transient   sequences begin in each ubatch, from a state of zeros, and what follows from it is not stored

    Operations are done as a whole or, when they raise or a signal comes, not at all.
    """

    used = 0
    is_trial: bool = False
    tail: Ints
    pos_max: Ints
    kept: Ints
    kept_pos: Ints

    def __init__(
        self,
        hp: HParams,
        size: int,
        n_seq_max: int = 1,
        held: Container[int] | None = None,
        transient: bool = False,
    ) -> None:
        """Layers that are not `held` get no memory (None: all do). Raises AllocError when the machine has not that
        much."""
        self.transient = transient
        self.size, self.n_seq_max, self.n_cells = size, n_seq_max, 2 if transient else 2 * n_seq_max + 1
        self.lock = Lock()
        shapes = {il: hp.state(il) for il in range(hp.n_layer)}
        self._held = [il for il in shapes if held is None or il in held]
        n_recent = hp.n_recent
        floats = sum(sum(shapes[il]) for il in self._held) + n_recent
        check_memory(4 * floats * self.n_cells, f"the states of {n_seq_max} sequences")
        ctx = Context()
        self.r_l: dict[int, Tensor] = {}
        self.s_l: dict[int, Tensor] = {}
        self.p_l: dict[int, Tensor] = {}
        for il, n in shapes.items():
            for name, floats, tensors in (("r", n.r, self.r_l), ("s", n.s, self.s_l), ("p", n.p, self.p_l)):
                if floats:
                    tensors[il] = ctx.new_tensor(DType.F32, (floats, self.n_cells), f"cache_{name}_l{il}")
        self.recent = ctx.new_tensor(DType.F32, (n_recent, self.n_cells), "cache_tokens") if n_recent else None
        self.clear()

    @changing
    def clear(self) -> None:
        """Empty all sequences."""
        vars(self).update(self._filled())

    def copied(self) -> RecurrentCells:
        """The same, with arrays of its own."""
        new = object.__new__(type(self))
        vars(new).update(vars(self), **self._arrays())
        return new

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all layers held: r before s before p, and `recent` last."""
        layers = sorted({*self.r_l, *self.s_l} & set(self._held))
        of_layers = [t.get(il) for il in layers for t in (self.r_l, self.s_l, self.p_l)]
        return [t for t in (*of_layers, self.recent) if t is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: n_cells states."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def cells(self) -> list[Cell]:
        """The states of sequences as they are now, to look at."""
        return [Cell(pos, frozenset(seqs)) for pos, _, seqs in self.in_use()]

    def in_use(self) -> list[tuple[int, int, list[int]]]:
        """(position, cell, sequences) of each state that sequences have."""
        seqs: dict[tuple[int, int], list[int]] = {}
        for s in np.flatnonzero(self.tail != NOTHING).tolist():
            seqs.setdefault((int(self.pos_max[s]), int(self.tail[s])), []).append(s)
        return [(pos, cell, ids) for (pos, cell), ids in seqs.items()]

    def allocate(self, buft: str) -> None:
        """Give the states their memory, zeroed."""
        allocate_tensors(self.tensors, buft)

    # -- slots ----------------------------------------------------------------------------------------------------

    def slot(self, u: UBatch, taken: Sequence[StateSlot]) -> StateSlot:
        """Cells for a ubatch of equal sequences (several may share tokens, and the state after them). `taken`: the
        slots that the same decode has already.

        Raises BatchError when tokens are shared by sequences whose states differ.
        """
        before, now = self._arrays(), self._arrays()
        if self.transient:
            read, write = (np.full(u.n_seqs, cell, np.int32) for cell in (NOTHING, SCRATCH))
            return StateSlot(read, write, before, now)
        tail, kept = now["tail"], now["kept"]
        fresh = {int(c) for slot in taken for c in slot.write}
        read, write = (np.empty(u.n_seqs, np.int32) for _ in range(2))
        pos = u.last_pos
        for i, ids in enumerate(u.seq_id):
            members = list(ids)
            read[i] = cell = tail[members[0]]
            if (tail[members] != cell).any():
                raise BatchError(f"sequences {members} share tokens, but their states are not the same")
            if cell not in fresh:
                kept[members], now["kept_pos"][members] = cell, now["pos_max"][members]
            if cell not in fresh or (tail == cell).sum() > len(members):
                tail[members] = NOTHING
                cell = np.setdiff1d(np.arange(1, self.n_cells), np.union1d(tail, kept))[0]
            write[i] = tail[members] = cell
            now["pos_max"][members] = pos[i]
        return StateSlot(read, write, before, now)

    def take(self, slot: StateSlot, u: UBatch) -> None:
        """Give the sequences of a ubatch the states that will be computed in a slot, and tell the ubatch which cells
        these are."""
        u.states = slot
        vars(self).update(slot.after)

    def undo(self, slots: Sequence[StateSlot]) -> None:
        """Take back slots, in the order they were taken. Afterwards everything is as before the first of them, except
        that kept states are lost."""
        if not slots:
            return
        before: dict[str, Ints] = {name: a.copy() for name, a in slots[0].before.items()}
        written: Ints = np.concatenate([slot.write for slot in slots])
        lost = np.isin(before["kept"], written)
        before["kept"][lost], before["kept_pos"][lost] = NOTHING, -1
        vars(self).update(before)

    def settle(self) -> None:
        """Drop what no later token can see: nothing."""

    def defrag(self) -> None:
        """Nothing to do: there are no holes between cells."""

    def full(self, n: int) -> KVCacheFull:
        """The error to raise when `n` tokens do not fit."""
        return KVCacheFull(f"{n} tokens in one batch, where n_ctx is {self.size}", n, self.size)

    # -- operations on sequences ----------------------------------------------------------------------------------

    def seq_pos_max(self, seq_id: int) -> int:
        """The position of the last token of a sequence, -1 when the sequence is empty."""
        return int(self.pos_max[self._checked(seq_id)])

    def seq_pos_min(self, seq_id: int) -> int:
        """As seq_pos_max: a state stands for its last position only."""
        return self.seq_pos_max(seq_id)

    def can_remove(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Whether `seq_rm` would return True: for a whole sequence (seq_id < 0: each), for no positions, and for an end
        before which the state was kept."""
        first, end = self._range(p0, p1)
        ids = range(self.n_seq_max) if is_negative(seq_id) else (self._checked(seq_id),)
        return all(
            end <= first
            or self.pos_max[s] < first
            or (end > self.pos_max[s] and (first == 0 or self.kept_pos[s] == first - 1))
            for s in ids
        )

    @changing
    @at_once
    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Remove the positions p0 <= p < p1 (p1 < 0: to the end) of a sequence (seq_id < 0: of all). False, with
        nothing changed, when `can_remove` is False: a state cannot forget single tokens."""
        if not self.can_remove(seq_id, p0, p1):
            return False
        first, end = self._range(p0, p1)
        for s in range(self.n_seq_max) if is_negative(seq_id) else (seq_id,):
            if first <= self.pos_max[s] < end:
                if first == 0:
                    self._leave(s)
                else:
                    self.tail[s], self.pos_max[s] = self.kept[s], self.kept_pos[s]
        return True

    @changing
    @at_once
    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """Let sequence `dst` go on from the state of `src` too, or from the kept one; no data moves.

        Raises GGMLError when the positions p0 <= p < p1 do not end with either.
        """
        first, end = self._range(p0, p1)
        if self._checked(src) == self._checked(dst):
            return
        last = min(end - 1, int(self.pos_max[src]))
        known = {-1: NOTHING, int(self.kept_pos[src]): self.kept[src], int(self.pos_max[src]): self.tail[src]}
        if last not in known or (first > 0 and last >= 0):
            has = f"the states at position {self.pos_max[src]} and, kept, {self.kept_pos[src]}"
            raise GGMLError(f"seq_cp: positions {first}..{end - 1} of sequence {src} have no state: it has {has}")
        self._leave(dst)
        self.tail[dst], self.pos_max[dst] = known[last], last

    @changing
    @at_once
    def seq_keep(self, seq_id: int) -> None:
        """Remove all sequences but one."""
        keep = self._checked(seq_id)
        for s in range(self.n_seq_max):
            if s != keep:
                self._leave(s)

    @changing
    @at_once
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add `delta` to the position of a sequence's state, when it is one of p0 <= p < p1. A sequence whose position
        would be negative is removed."""
        delta = whole("seq_add: delta", delta, -INT32_MAX, INT32_MAX)
        self._move(seq_id, p0, p1, lambda pos: pos + delta)

    @changing
    @at_once
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the position of a sequence's state by `d` (whole numbers), see `seq_add`."""
        d = whole("seq_div: the divisor", d)
        if d < 1:
            raise GGMLError(f"seq_div: the divisor must be at least 1, not {d}")
        self._move(seq_id, p0, p1, lambda pos: pos // d)

    @at_once
    def place(self, pos: npt.NDArray[np.integer[Any]]) -> None:
        """Give the states of all sequences the positions `pos` [n_seq_max] (negative: remove the sequence). A moved
        sequence loses its kept state. Raises GGMLError for positions that are too large."""
        if pos.max() > LAST_POS:
            raise GGMLError(f"a position would be {pos.max()}, beyond {LAST_POS}")
        for s in np.flatnonzero(pos != self.pos_max).tolist():
            tail = self.tail[s]
            self._leave(s)
            if pos[s] >= 0:
                self.tail[s], self.pos_max[s] = tail, pos[s]

    # -- saved states ---------------------------------------------------------------------------------------------

    def save(self, header: dict[str, Any], seq: int | None) -> list[Array]:
        """See `Store.save`: the states that sequences have. Kept states are not saved."""
        only = None if seq is None else self._checked(seq)
        found = [state for state in self.in_use() if only is None or only in state[2]]
        members = np.zeros((self.n_seq_max if only is None else 1, len(found)), np.uint8)
        for i, (_, _, ids) in enumerate(found):
            members[ids if only is None else 0, i] = 1
        header["states"] = {"cells": len(found), "seqs": len(members)}
        cells = np.array([cell for _, cell, _ in found], np.int64)
        pos = np.array([pos for pos, _, _ in found], np.int32)
        return [pos, members, *(rows[cells] for rows in self.rows())]

    def load(self, r: StateReader, seq: int | None) -> Callable[[], None]:
        """See `Store.load`."""
        header = r.object("states")
        n, n_seqs = r.count("cells", header), r.count("seqs", header)
        pos, saved = r.array(np.int32, n), r.array(np.uint8, n_seqs, n)
        rows = [r.array(np.float32, n, view.shape[1]) for view in self.rows()]
        sound = bool(((pos >= 0) & (pos <= LAST_POS)).all()) and saved.max(initial=0) <= 1
        if not sound or not saved.any(axis=0).all() or saved.sum(axis=1).max(initial=0) > 1:
            raise StateError("the state is damaged: the states of its sequences make no sense")
        if seq is None:
            members = members_of(saved.view(np.bool_), self.n_seq_max)
        else:
            members = np.zeros((self.n_seq_max, n), np.bool_)
            members[seq] = True

        def put() -> None:
            if seq is None:
                self.clear()
            else:
                self.seq_rm(seq)
            free = np.setdiff1d(np.arange(1, self.n_cells), np.union1d(self.tail, self.kept))
            for i, cell in zip(range(n), free, strict=False):
                self.tail[members[:, i]], self.pos_max[members[:, i]] = cell, pos[i]
            for to, row in zip(self.rows(), rows, strict=True):
                to[free[:n]] = row

        return put

    def rows(self) -> list[npt.NDArray[np.float32]]:
        """The states as zero-copy views [n_cells, floats of a state], in the order of `tensors`."""
        return [t.numpy().reshape(self.n_cells, -1) for t in self.tensors]

    def report(self) -> str:
        """`states size 3.02 MiB: 3 cells, 24 layers`."""
        layers = len({*self.r_l, *self.s_l})
        return f"states size {self.nbytes / (1 << 20):.2f} MiB: {self.n_cells} cells, {layers} layers"

    def __str__(self) -> str:
        lines = [self.report()]
        for s in np.flatnonzero(self.tail != NOTHING).tolist():
            kept = f", kept: position {self.kept_pos[s]}" if self.kept[s] != NOTHING else ""
            lines.append(f"  seq {s}: cell {self.tail[s]}, position {self.pos_max[s]}{kept}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _filled(self) -> dict[str, Ints]:
        n = self.n_seq_max
        empty, none = np.full(n, NOTHING, np.int32), np.full(n, -1, np.int32)
        return {"tail": empty, "pos_max": none, "kept": empty.copy(), "kept_pos": none.copy()}

    def _arrays(self) -> dict[str, Ints]:
        return {name: getattr(self, name).copy() for name in ("tail", "pos_max", "kept", "kept_pos")}

    def _checked(self, seq_id: int) -> int:
        return checked_seq(seq_id, self.n_seq_max)

    def _range(self, p0: int, p1: int) -> tuple[int, int]:
        first, end = whole("p0", p0), whole("p1", p1)
        return max(first, 0), INT32_MAX if end < 0 else end

    def _leave(self, s: int) -> None:
        """A sequence has no state any more."""
        self.tail[s] = self.kept[s] = NOTHING
        self.pos_max[s] = self.kept_pos[s] = -1

    def _move(self, seq_id: int, p0: int, p1: int, moved: Callable[[int], int]) -> None:
        s, (first, end) = self._checked(seq_id), self._range(p0, p1)
        pos = self.pos_max.astype(np.int64)
        if first <= pos[s] < end:
            pos[s] = moved(int(pos[s]))
        self.place(pos)
