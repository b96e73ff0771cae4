"""Masks against a cell by cell rule, and what is written from step to step against a mask made from scratch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyggml.models.hparams import SwaType
from pyggml.models.memory.kv_cells import KVCells
from pyggml.models.memory.kv_mask import KVMask

from pyggml.types import Ints

from ...plain_llama import take

SIZE, ROWS, N_SEQ = 64, 8, 4


def in_window(p: int, q: int, n: int, swa_type: SwaType) -> bool:
    if swa_type == "chunked":
        return q // n >= p // n
    return abs(p - q) <= n // 2 if swa_type == "symmetric" else p - q < n


def rule(cells: KVCells, p: int, s: int, causal: bool, n_swa: int, alibi: bool, swa_type: SwaType) -> list[float]:
    row: list[float] = []
    for q, ids in cells.cells:
        visible = s in ids and (not causal or q <= p) and (not n_swa or in_window(p, q, n_swa, swa_type))
        row.append((-float(abs(p - q)) if alibi else 0.0) if visible else -np.inf)
    return row


def ints(values: list[int]) -> Ints:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("causal", "n_swa", "alibi", "swa_type"),
    [
        (True, 0, False, "standard"),
        (False, 0, False, "standard"),
        (True, 5, False, "standard"),
        (True, 0, True, "standard"),
        (False, 0, True, "standard"),
        (True, 3, True, "standard"),
        (True, 5, False, "prefix"),
        (False, 5, False, "prefix"),
        (True, 4, False, "chunked"),
        (False, 5, False, "symmetric"),
    ],
)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_step_writes_what_the_rule_says(
    data: st.DataObject, causal: bool, n_swa: int, alibi: bool, swa_type: SwaType
) -> None:
    """Rows and columns that a step does not name hold garbage first; cells change between steps now and then."""
    cells = KVCells(SIZE, N_SEQ)
    mask = KVMask(cells, np.full((ROWS, SIZE), 7, np.float32), causal, n_swa, alibi, swa_type)
    same = ints([0])
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["step", "step", "step", "new", "rm", "cp", "add", "undo", "shared"]))
        if kind == "rm":
            cells.seq_rm(data.draw(st.integers(0, N_SEQ - 1)), data.draw(st.integers(0, 9)))
        elif kind == "cp":
            cells.seq_cp(0, 1, 0, 4)
        elif kind == "add":
            cells.seq_add(0, 2, -1, 1)
        elif kind == "undo":
            cells.undo([take(cells, ints([50]), ints([0]))])
        if kind == "new":
            same = ints(data.draw(st.lists(st.integers(0, N_SEQ - 1), min_size=1, max_size=5)))
        pos = [cells.seq_pos_max(s) + 1 + same.tolist()[:i].count(s) for i, s in enumerate(same.tolist())]
        if len(same) > SIZE - cells.used:
            return
        sets = [tuple({s, 3}) for s in same.tolist()] if kind == "shared" else None
        slot = take(cells, ints(pos), same, sets)
        n_kv = cells.n_kv()
        mask.write(ints(pos), same, slot, n_kv, sets is not None)
        expected = [
            rule(cells, p, s, causal, n_swa, alibi, swa_type)[:n_kv] for p, s in zip(pos, same.tolist(), strict=True)
        ]
        assert mask.memory[: len(pos), :n_kv].tolist() == expected


def test_a_step_writes_only_the_new_cells() -> None:
    cells = KVCells(SIZE, N_SEQ)
    mask = KVMask(cells, np.zeros((ROWS, SIZE), np.float32))
    seq = ints([0, 1, 2])
    for p in range(3):
        slot = take(cells, ints([p] * 3), seq)
        mask.memory[1, 40] = 5  # written by nobody while n_kv is 32
        mask.write(ints([p] * 3), seq, slot, 32)
        assert mask.memory[1, 40] == 5
        mask.memory[0, 31] = 9 if p == 0 else mask.memory[0, 31]
    assert mask.memory[0, 31] == 9  # the second and third step did not touch it
    assert mask.memory[0, [0, 3, 6]].tolist() == [0, 0, 0] and mask.memory[0, 1] == -np.inf


@pytest.mark.parametrize(("swa_type", "reaches"), [("standard", False), ("prefix", True)])
def test_a_group_and_a_window(swa_type: SwaType, reaches: bool) -> None:
    """Tokens 0 to 5 see each other: within their window (Gemma 3), or beyond it (PaliGemma 2)."""
    cells = KVCells(SIZE, N_SEQ)
    pos, seq, group = ints([*range(8)]), ints([0] * 8), ints([0] * 6 + [-1] * 2)
    slot = take(cells, pos, seq)
    mask = KVMask(cells, np.full((ROWS, SIZE), 7, np.float32), True, 3, False, swa_type)
    mask.write(pos, seq, slot, 8, group=group)
    for p in range(8):
        seen = {q for q in range(8) if p - 3 < q <= p or (max(p, q) < 6 and (reaches or q > p - 3))}
        assert set(np.flatnonzero(mask.memory[p, :8] == 0).tolist()) == seen
