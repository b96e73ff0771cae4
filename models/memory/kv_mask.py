"""Attention masks over the cells of a KV cache, in memory that stays: each step writes only what changed."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from pyggml.types import Floats, Ints

from ..hparams import SwaType
from .kv_cells import KVCells, Slot

Pos = TypeVar("Pos", int, Ints)
_HIDDEN = np.uint32(0xFF800000)  # the bits of -inf; a product of bools with them makes a mask faster than np.where


def first_visible(pos: Pos, n_swa: int, swa_type: SwaType) -> Pos:
    """The first position in the window of a token at `pos`.

    standard   the window is the n_swa positions that end with the token's own
    chunked    it is the positions from the last multiple of n_swa on
    symmetric  it is n_swa / 2 (rounded down) positions before the token, and as many after it
    prefix     as standard; tokens that see each other (a group) do so beyond the window, too
    """
    if swa_type == "chunked":
        return pos - pos % n_swa
    return pos - (n_swa // 2 if swa_type == "symmetric" else n_swa - 1)


class KVMask:
    """The mask of one cache: `memory` is float32 [rows, cells.size], row i for token i of a ubatch.

    A cell that the token sees has 0, or with `alibi` minus the distance of the positions (the op multiplies it with a
    slope for each head). A cell of another sequence has -inf, and so has one after the token (`causal`) or outside of
    its window (`n_swa` > 0, `swa_type`: see `first_visible`).
    """

    def __init__(
        self,
        cells: KVCells,
        memory: Floats,
        causal: bool = True,
        n_swa: int = 0,
        alibi: bool = False,
        swa_type: SwaType = "standard",
    ) -> None:
        self.cells, self.memory = cells, memory
        self.causal, self.n_swa, self.alibi = causal, n_swa, alibi
        self.swa_type: SwaType = swa_type
        self._follows = causal and not n_swa and not alibi  # a step forward shows a row nothing but the new cell
        self._row = np.arange(len(memory))
        self._forget()

    def write(
        self, pos: Ints, seq: Ints, slot: Slot | None, n_kv: int, shared: bool = False, group: Ints | None = None
    ) -> None:
        """Write rows 0 .. n_tokens - 1, columns 0 .. n_kv - 1, for tokens at `pos` of sequences `seq` that were just
        put into `slot` (None: into another cache). `shared`: some tokens belong to several sequences. `group`: tokens
        of the same group (-1: of none) also see those of it that follow. Do not read other rows and columns.

        When each row's token follows the token that the row had last time, only the new cells are written.
        """
        n = len(pos)
        if (
            self._follows
            and slot is not None
            and not shared
            and group is None
            and self._version + 1 == self.cells.version
            and n == self._n
            and self._continued(pos, seq)
        ):
            if n_kv > self._written:
                self.memory[:n, self._written : n_kv] = -np.inf
                self._written = n_kv
            if n == 1:
                self.memory[0, slot.start] = 0.0
            else:
                self.memory[self._row[:n], slot.start + self._row[:n]] = 0.0
        else:
            self.write_cells(pos, seq, 0, self.memory[:n, :n_kv], None if slot is None else slot.start, group)
            if group is not None or len(set(seq.tolist())) != n:  # tokens of one sequence see each other
                self._forget()
                return
            self._n, self._written = n, n_kv
        self._pos, self._seq, self._version = pos, seq, self.cells.version

    def _continued(self, pos: Ints, seq: Ints) -> bool:
        """Whether the tokens are as many as last time, and follow the last ones in the same sequences."""
        if len(pos) == 1:
            return seq.item(0) == self._seq.item(0) and pos.item(0) == self._pos.item(0) + 1
        return bool((seq == self._seq).all() and (pos == self._pos + 1).all())

    def _forget(self) -> None:
        self._n, self._written, self._version = 0, 0, -1
        self._pos = self._seq = np.empty(0, np.int32)

    def write_cells(
        self, pos: Ints, seq: Ints, first: int, out: Floats, start: int | None = None, group: Ints | None = None
    ) -> None:
        """Write what tokens see of the cells from `first` on into `out`, float32 [tokens, cells]. `group`: see `write`;
        the tokens are in the cells from `start` on. A window counts among the tokens of a group, too, unless its type
        is "prefix"."""
        cells, p = slice(first, first + out.shape[1]), pos[:, None]
        cell_pos = self.cells.pos[cells]
        visible = self.cells.members.cells_of_each(seq, cells)
        before = self.causal and self.swa_type == "prefix"  # the window counts before the group
        if self.causal:
            seen = cell_pos <= p
            if self.n_swa and before:
                seen &= cell_pos >= first_visible(p, self.n_swa, self.swa_type)
            if group is not None and start is not None:
                seen[:, start - first : start - first + len(pos)] |= (group == group[:, None]) & (group >= 0)
            visible &= seen
        if self.n_swa and not before:
            visible &= cell_pos >= first_visible(p, self.n_swa, self.swa_type)
            if self.swa_type == "symmetric":
                visible &= cell_pos <= p + self.n_swa // 2
        if self.alibi:
            out[...] = np.where(visible, -np.abs(cell_pos - p), -np.inf)
        else:
            np.multiply(np.invert(visible, out=visible), _HIDDEN, out=out.view(np.uint32))
