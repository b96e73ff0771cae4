"""The states of recurrent layers in a saved state: packed, unpacked and put back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyggml.errors import StateError
from pyggml.models.memory.kv_cells import LAST_POS
from pyggml.models.memory.recurrent import RecurrentCells
from pyggml.types import Ints

from .state_file import Array, Reader


@dataclass
class SavedStates:
    """`n` states: the positions they stand for, which sequences have them, and a row of each tensor for each."""

    pos: Ints
    seq: npt.NDArray[np.bool_]  # [n_seqs, n]
    rows: list[Array]

    def put(self, states: RecurrentCells, seq: int | None) -> None:
        """Give them to their sequences, or the only one to `seq`."""
        members = np.zeros((states.n_seq_max, len(self.pos)), np.bool_)
        if seq is None:
            n = min(len(members), len(self.seq))
            members[:n] = self.seq[:n]
        else:
            members[seq] = True
        cells = states.put(self.pos, members)
        for to, rows in zip(states.rows(), self.rows, strict=True):
            to[cells] = rows


def pack(states: RecurrentCells, seq: int | None) -> tuple[dict[str, int], list[Array]]:
    """What is saved of all sequences, or of one: what the header says of it, and the arrays."""
    found = [s for s in states.in_use() if seq is None or seq in s[2]]
    members = np.zeros((states.n_seq_max if seq is None else 1, len(found)), np.uint8)
    for i, (_, _, ids) in enumerate(found):
        members[ids if seq is None else 0, i] = 1
    cells = np.array([cell for _, cell, _ in found], np.int64)
    pos = np.array([pos for pos, _, _ in found], np.int32)
    return {"cells": len(found), "seqs": len(members)}, [pos, members, *(rows[cells] for rows in states.rows())]


def unpack(r: Reader, header: Mapping[str, Any], states: RecurrentCells) -> SavedStates:
    """The next arrays, checked. Raises StateError for what `pack` does not write."""
    n, n_seqs = r.count("cells", header), r.count("seqs", header)
    pos, members = r.array(np.int32, n), r.array(np.uint8, n_seqs, n)
    rows = [r.array(np.float32, n, view.shape[1]) for view in states.rows()]
    sound = bool(((pos >= 0) & (pos <= LAST_POS)).all()) and members.max(initial=0) <= 1
    if not sound or not members.any(axis=0).all() or members.sum(axis=1).max(initial=0) > 1:
        raise StateError("the state is damaged: the states of its sequences make no sense")
    return SavedStates(pos, members.view(np.bool_), rows)
