"""Recurrent cells, driven by a model whose state is a number: after tokens t1, t2 it is (1 * 31 + t1) * 31 + t2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyggml.models.recurrent import RecurrentCells

from pyggml.errors import GGMLError, KVCacheFull
from pyggml.llm.batch import Batch
from pyggml.llm.ubatch import SBatch

N_SEQ = 4
MOD = 1_000_003


def run(cells: RecurrentCells, state: np.ndarray, batch: Batch) -> None:
    """Decode a batch as a recurrent architecture does: equal splits, states gathered, moved on, written back."""
    s = SBatch(batch, simple_split=False)
    while s.n_tokens:
        u = s.split_equal(6)
        assert u.token is not None
        slot = cells.take(u.seq_id, u.pos[u.n_seq_tokens - 1 :: u.n_seq_tokens])
        assert slot.n >= u.n_seqs
        x = state[slot.copy]
        x[slot.clear] = 1
        for i in range(u.n_seqs):
            for t in u.token[i * u.n_seq_tokens : (i + 1) * u.n_seq_tokens].tolist():
                x[i] = (x[i] * 31 + t) % MOD
        state[slot.head : slot.head + slot.n] = x


def expected(tokens: list[int]) -> int:
    x = 1
    for t in tokens:
        x = (x * 31 + t) % MOD
    return x


seq_ids = st.integers(0, N_SEQ - 1)
tokens = st.lists(st.integers(0, 99), min_size=1, max_size=5)
operations = st.one_of(
    st.tuples(st.just("decode"), st.dictionaries(seq_ids, tokens, min_size=1, max_size=N_SEQ)),
    st.tuples(st.just("decode"), st.dictionaries(seq_ids, tokens, min_size=1, max_size=N_SEQ)),
    st.tuples(st.just("cp"), seq_ids, seq_ids),
    st.tuples(st.just("rm"), st.integers(-1, N_SEQ - 1)),
    st.tuples(st.just("part"), seq_ids, st.integers(0, 6), st.integers(0, 6)),
    st.tuples(st.just("keep"), seq_ids),
    st.tuples(st.just("undo"), st.lists(seq_ids, min_size=1, max_size=3, unique=True)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(operations, max_size=14))
def test_every_sequence_has_the_state_of_its_tokens(ops: list[tuple[Any, ...]]) -> None:
    cells, state = RecurrentCells(N_SEQ), np.zeros(N_SEQ, np.int64)
    plain: dict[int, list[int]] = {s: [] for s in range(N_SEQ)}
    for op in ops:
        match op:
            case ("decode", new):
                batch = Batch()
                for s, ts in new.items():
                    for t in ts:
                        batch.add(t, len(plain[s]), s)
                        plain[s].append(t)
                run(cells, state, batch)
            case ("cp", a, b):
                cells.seq_cp(a, b)
                plain[b] = list(plain[a])
            case ("rm", s):
                assert cells.seq_rm(s)
                for q in range(N_SEQ) if s < 0 else (s,):
                    plain[q] = []
            case ("part", s, p0, p1):
                n = len(plain[s])
                done = cells.seq_rm(s, p0, p1)
                inside = min(p1, n) - p0
                assert done is (inside <= 0 or inside == n)
                if inside > 0 and inside == n:
                    plain[s] = []
            case ("keep", s):
                cells.seq_keep(s)
                plain = {q: ts if q == s else [] for q, ts in plain.items()}
            case ("undo", ids):
                before = cells.cells, cells.tail.tolist(), cells.src.tolist()
                cells.undo([cells.take([(s,)], np.array([90], np.int32)) for s in ids])
                assert before == (cells.cells, cells.tail.tolist(), cells.src.tolist())
        for s, ts in plain.items():
            assert cells.seq_pos_max(s) == cells.seq_pos_min(s) == len(ts) - 1
            if ts:
                assert state[cells.src[cells.tail[s]]] == expected(ts)
        assert cells.used == len({c for c in cells.tail.tolist() if c >= 0})


def test_branches_share_a_cell_until_one_goes_on() -> None:
    cells, state = RecurrentCells(3), np.zeros(3, np.int64)
    run(cells, state, Batch.prompt([5, 6]))
    cells.seq_cp(0, 2)
    assert cells.used == 1 and cells.tail.tolist() == [0, -1, 0] and cells.cells[0].seq_id == {0, 2}
    run(cells, state, Batch.one(7, 2, 2))
    assert cells.used == 2 and cells.seq_pos_max(0) == 1 and cells.seq_pos_max(2) == 2
    assert [state[cells.tail[s]] for s in (0, 2)] == [expected([5, 6]), expected([5, 6, 7])]


def test_shared_prompt_is_computed_once() -> None:
    cells, state = RecurrentCells(2), np.zeros(2, np.int64)
    run(cells, state, Batch.prompt([1, 2, 3], seq_ids=(0, 1)))
    assert cells.used == 1 and cells.tail.tolist() == [0, 0]
    batch = Batch()
    batch.add(4, 3, 0)
    batch.add(5, 3, 1)
    run(cells, state, batch)
    assert [state[cells.tail[s]] for s in (0, 1)] == [expected([1, 2, 3, 4]), expected([1, 2, 3, 5])]


def test_positions_and_errors() -> None:
    cells = RecurrentCells(2)
    cells.take([(0,)], np.array([9], np.int32))
    cells.seq_add(0, 0, -1, 3)
    cells.seq_div(0, 0, -1, 4)
    assert cells.seq_pos_max(0) == 3
    cells.seq_add(0, 4, -1, 100)
    assert cells.seq_pos_max(0) == 3
    for call, text in (
        (lambda: cells.seq_rm(2), r"sequence 2 is outside 0\.\.1"),
        (lambda: cells.take([(2,)], np.zeros(1, np.int32)), r"sequence 2 is outside 0\.\.1"),
        (lambda: cells.seq_div(0, 0, -1, 0), "at least 1, not 0"),
        (lambda: cells.seq_add(0, 0, -1, -9), "a position would be -6"),
    ):
        with pytest.raises(GGMLError, match=text):
            call()
    assert isinstance(cells.full(1), KVCacheFull) and cells.full(1).free == 1
    cells.clear()
    assert cells.used == 0 and cells.seq_pos_max(0) == -1
