"""Recurrent cells, driven by a model whose state is a number: after tokens t1, t2 it is (1 * 31 + t1) * 31 + t2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyggml.models import get_architecture
from pyggml.models.blocks.ssm import SSM
from pyggml.models.mamba import MambaHParams
from pyggml.models.memory.recurrent import NOTHING, RecurrentCells, StateSlot

from pyggml.errors import BatchError, GGMLError
from pyggml.llm.batch import Batch
from pyggml.llm.ubatch import SBatch, ubatches_of_tokens

N_SEQ = 4
MOD = 1_000_003


def hparams(n_head_kv: tuple[int, ...] = (0, 0)) -> MambaHParams:
    return MambaHParams(
        n_vocab=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_head_kv=n_head_kv,
        n_ff=8,
        n_ctx_train=64,
        ssm=SSM(d_conv=4, d_inner=32, d_state=8, dt_rank=2),
    )


def new_cells() -> RecurrentCells:
    return RecurrentCells(hparams(), 64, N_SEQ)


def run(cells: RecurrentCells, state: np.ndarray, batch: Batch) -> list[StateSlot]:
    """Decode a batch as a recurrent architecture does: equal splits, states read, moved on, and stored."""
    s = SBatch(batch, simple_split=False)
    slots: list[StateSlot] = []
    while s.n_tokens:
        u = s.split_equal(6)
        assert u.token is not None
        slot = cells.slot(u, slots)
        slots.append(slot)
        cells.take(slot, u)
        assert NOTHING not in slot.write
        assert len(set(slot.write.tolist())) == u.n_seqs
        x = state[slot.read]
        for i in range(u.n_seqs):
            for t in u.token[i * u.n_seq_tokens : (i + 1) * u.n_seq_tokens].tolist():
                x[i] = (x[i] * 31 + t) % MOD
        state[slot.write] = x
    return slots


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
    st.tuples(st.just("failed"), st.dictionaries(seq_ids, tokens, min_size=1, max_size=N_SEQ)),
    st.tuples(st.just("shared"), st.lists(seq_ids, min_size=1, max_size=3, unique=True), tokens),
    st.tuples(st.just("cp"), seq_ids, seq_ids, st.integers(-1, 8)),
    st.tuples(st.just("rm"), st.integers(-1, N_SEQ - 1)),
    st.tuples(st.just("part"), seq_ids, st.integers(0, 8), st.integers(-1, 8)),
    st.tuples(st.just("keep"), seq_ids),
)


def batch_of(texts: dict[int, list[int]], added: dict[int, list[int]]) -> Batch:
    batch = Batch()
    for s, new in added.items():
        for i, t in enumerate(new):
            batch.add(t, len(texts[s]) + i, s)
    return batch


@settings(max_examples=300, deadline=None)
@given(st.lists(operations, max_size=14))
def test_every_sequence_has_the_state_of_its_tokens(ops: list[tuple[Any, ...]]) -> None:
    cells, state = new_cells(), np.zeros(2 * N_SEQ + 1, np.int64)
    state[NOTHING] = 1
    texts: dict[int, list[int]] = {s: [] for s in range(N_SEQ)}
    kept: dict[int, list[int]] = {s: [] for s in range(N_SEQ)}
    for name, *args in ops:
        if name in ("decode", "failed"):
            slots = run(cells, state, batch_of(texts, args[0]))
            if name == "failed":
                cells.undo(slots)
                for s, pos in enumerate(cells.kept_pos.tolist()):
                    kept[s] = kept[s] if pos == len(kept[s]) - 1 else []
            else:
                for s, new in args[0].items():
                    kept[s], texts[s] = texts[s], texts[s] + new
        elif name == "shared":
            ids, new = args
            batch = Batch()
            for i, t in enumerate(new):
                batch.add(t, len(texts[ids[0]]) + i, ids)
            if len(set(cells.tail[ids].tolist())) > 1:
                before = str(cells)
                with pytest.raises(BatchError, match="share tokens, but"):
                    run(cells, state, batch)
                assert str(cells) == before
            else:
                run(cells, state, batch)
                for s in ids:
                    kept[s], texts[s] = texts[s], texts[s] + new
        elif name == "cp":
            src, dst, end = args
            known = {len(text): text for text in ([], kept[src], texts[src])}
            of = texts[src] if end < 0 else known.get(min(end, len(texts[src])))
            if src != dst and of is None:
                with pytest.raises(GGMLError, match="have no state"):
                    cells.seq_cp(src, dst, 0, end)
            else:
                cells.seq_cp(src, dst, 0, end)
                if of is not None and src != dst:
                    texts[dst], kept[dst] = of, []
        elif name == "rm":
            assert cells.seq_rm(args[0])
            for s in range(N_SEQ) if args[0] < 0 else [args[0]]:
                texts[s], kept[s] = [], []
        elif name == "keep":
            cells.seq_keep(args[0])
            for s in set(range(N_SEQ)) - {args[0]}:
                texts[s], kept[s] = [], []
        else:
            s, p0, p1 = args
            last, end = len(texts[s]) - 1, p1 if p1 >= 0 else 99
            nothing = end <= p0 or p0 > last
            possible = nothing or (end > last and (p0 == 0 or (kept[s] and len(kept[s]) == p0)))
            assert cells.seq_rm(s, p0, p1) == bool(possible)
            if possible and not nothing:
                texts[s] = texts[s][:p0]
                kept[s] = kept[s] if p0 else []
        for s, text in texts.items():
            assert cells.seq_pos_max(s) == len(text) - 1
            assert state[cells.tail[s]] == expected(text)
            assert state[cells.kept[s]] == expected(kept[s])


def test_positions_move_as_a_whole() -> None:
    cells, state = new_cells(), np.zeros(9, np.int64)
    run(cells, state, batch_of({0: [], 1: []}, {0: [1, 2, 3], 1: [4]}))
    cells.seq_add(0, 0, -1, 4)
    assert cells.pos_max.tolist() == [6, 0, -1, -1]
    cells.seq_add(0, 0, 6, 4)  # the last one is not among them
    cells.seq_div(0, 0, -1, 2)
    assert cells.pos_max.tolist() == [3, 0, -1, -1]
    assert not cells.seq_rm(0, 1), "what was kept has another place now"
    cells.seq_add(1, 0, -1, -1)
    assert cells.pos_max.tolist() == [3, -1, -1, -1]
    assert [tuple(c) for c in cells.cells] == [(3, {0})]
    with pytest.raises(GGMLError, match="beyond"):
        cells.seq_add(0, 0, -1, 2**31 - 2)
    with pytest.raises(GGMLError, match="divisor"):
        cells.seq_div(0, 0, -1, 0)
    with pytest.raises(GGMLError, match="sequence 4 is outside"):
        cells.seq_cp(0, 4)


def test_sizes() -> None:
    cells = new_cells()
    assert {t.name: t.ne[:2] for t in cells.tensors} == {
        f"cache_{part}_l{il}": (n, 9) for il in (0, 1) for part, n in (("r", 3 * 32), ("s", 8 * 32))
    }
    assert cells.nbytes == 4 * 9 * 2 * (3 * 32 + 8 * 32)
    cells.allocate("cpu")
    assert not any(rows.any() for rows in cells.rows())


def test_a_hybrid_changes_both_or_none() -> None:
    memory = get_architecture("jamba").new_memory(hparams((0, 2)), 64, n_seq_max=2)
    assert memory.states is not None
    assert memory.caches[0].layers == (1,)
    assert list(memory.states.s_l) == [0]
    for n in (3, 2):
        (u,) = ubatches_of_tokens(np.zeros(n, np.int32), memory.seq_pos_max(0) + 1, n)
        memory.take(memory.slot(u, []), u)
    before = str(memory)
    assert not memory.seq_rm(0, 4)
    with pytest.raises(GGMLError, match="have no state"):
        memory.seq_cp(0, 1, 0, 2)
    with pytest.raises(GGMLError, match="sequence 2"):
        memory.seq_keep(2)
    assert str(memory) == before
    memory.seq_cp(0, 1)
    assert memory.seq_rm(0, 3)
    assert memory.states.pos_max.tolist() == memory.pos_max.tolist() == [2, 4]
    memory.seq_add(1, 0, -1, 5)
    assert memory.states.pos_max.tolist() == memory.pos_max.tolist() == [7, 9], "they share cells"
    memory.clear()
    assert memory.states.pos_max.tolist() == memory.pos_max.tolist() == [-1, -1]
