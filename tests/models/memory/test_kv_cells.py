"""The cells of the KV cache against a plain model of them: a list of cells, each a position and a set of sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyggml.models.memory.kv_cells import EMPTY, SHARED, KVCells

from pyggml.errors import GGMLError, KVCacheFull

from ...plain_llama import take

SIZE, N_SEQ = 32, 3
INF = 1 << 30


class Plain:
    """The same, cell by cell, after llama.cpp's description."""

    def __init__(self) -> None:
        self.cells: list[tuple[int, frozenset[int]]] = [(-1, frozenset())] * SIZE
        self.head = 0

    def used(self) -> int:
        return sum(p >= 0 for p, _ in self.cells)

    def find_slot(self, n: int, seqs: set[int]) -> int | None:
        behind = max((i + 1 for i, (_, s) in enumerate(self.cells) if s & seqs), default=0)
        head = max(behind, 0 if self.head > self.used() + 2 * n else self.head)
        starts = [*range(head, SIZE - n + 1), *range(behind, min(head, SIZE - n + 1))]
        return next((i for i in starts if all(p < 0 for p, _ in self.cells[i : i + n])), None)

    def ascends(self) -> bool:
        return all(self.pos(s) == sorted(self.pos(s)) for s in range(N_SEQ))

    def take(self, start: int, tokens: list[tuple[int, frozenset[int]]]) -> None:
        self.cells[start : start + len(tokens)] = tokens
        self.head = (start + len(tokens)) % SIZE

    def change(self, f: Any, head: str = "freed") -> None:
        """Apply f to every cell (position, sequences); those left without sequences or below 0 are freed."""
        freed = None
        for i, (p, s) in enumerate(self.cells):
            new = f(p, s) if p >= 0 else (p, s)
            if p >= 0 and (not new[1] or new[0] < 0):
                new = (-1, frozenset())
                freed = i if freed is None else freed
            self.cells[i] = new
        if head == "freed" and freed is not None:
            self.head = min(self.head, freed)
        if head == "restart":
            self.head = 0 if freed is None else freed

    def pos(self, seq: int) -> list[int]:
        return [p for p, s in self.cells if seq in s]


seq_ids = st.integers(0, N_SEQ - 1)
positions = st.integers(-1, 40)
operations = st.one_of(
    st.tuples(st.just("take"), st.lists(st.sets(seq_ids, min_size=1, max_size=2), min_size=1, max_size=9)),
    st.tuples(st.just("undo"), st.lists(st.integers(1, 5), min_size=1, max_size=3)),
    st.tuples(st.just("rm"), st.integers(-1, N_SEQ - 1), positions, positions),
    st.tuples(st.just("cp"), seq_ids, seq_ids, positions, positions),
    st.tuples(st.just("keep"), seq_ids),
    st.tuples(st.just("add"), seq_ids, positions, positions, st.integers(-12, 12)),
    st.tuples(st.just("div"), seq_ids, positions, positions, st.integers(1, 4)),
    st.tuples(st.just("forget"), *[positions] * N_SEQ),
    st.tuples(st.just("defrag")),
    st.tuples(st.just("clear")),
)


def within(p: int, p0: int, p1: int) -> bool:
    return max(p0, 0) <= p < (INF if p1 < 0 else p1)


def apply(cells: KVCells, plain: Plain, op: tuple[Any, ...], next_pos: list[int]) -> None:
    match op:
        case ("take", sets):
            next_pos[0] = max(
                next_pos[0], 1 + max(p for p, _ in plain.cells)
            )  # sequences go on, as check_positions asks
            tokens = [(next_pos[0] + i, frozenset(s)) for i, s in enumerate(sets)]
            pos, seq = (np.array(a, np.int32) for a in ([p for p, _ in tokens], [min(s) for _, s in tokens]))
            start = plain.find_slot(len(tokens), set().union(*sets))
            if start is None:
                with pytest.raises(KVCacheFull, match=f"{len(tokens)} cells are needed; {SIZE - plain.used()} of"):
                    take(cells, pos, seq, [tuple(s) for s in sets])
                return
            assert take(cells, pos, seq, [tuple(s) for s in sets]).start == start
            plain.take(start, tokens)
            next_pos[0] += len(tokens)
        case ("undo", sizes):
            slots = []
            for n in sizes:
                try:
                    slots.append(take(cells, np.arange(50, 50 + n, dtype=np.int32), np.zeros(n, np.int32)))
                except KVCacheFull:
                    break
            cells.undo(slots)
        case ("rm", seq, p0, p1):
            cells.seq_rm(seq, p0, p1)
            gone = frozenset(range(N_SEQ)) if seq < 0 else frozenset({seq})
            plain.change(lambda p, s: (p, s - gone if within(p, p0, p1) else s))
        case ("cp", src, dst, p0, p1):
            cells.seq_cp(src, dst, p0, p1)
            plain.change(lambda p, s: (p, s | {dst} if src in s and within(p, p0, p1) else s))
            plain.head = 0
        case ("keep", seq):
            cells.seq_keep(seq)
            first = next((i for i, (_, s) in enumerate(plain.cells) if seq not in s), SIZE)
            plain.change(lambda p, s: (p, s & {seq}))
            plain.head = min(plain.head, first)
        case ("add", seq, p0, p1, delta):
            cells.seq_add(seq, p0, p1, delta)
            if delta:
                plain.change(lambda p, s: (p + delta if seq in s and within(p, p0, p1) else p, s), "restart")
        case ("div", seq, p0, p1, d):
            cells.seq_div(seq, p0, p1, d)
            plain.change(lambda p, s: (p // d if seq in s and within(p, p0, p1) else p, s))
        case ("forget", *first):
            for seq, p1 in enumerate(first):
                plain.change(lambda p, s, seq=seq, p1=p1: (p, s - {seq} if p < p1 else s))
            cells.forget(np.array(first, np.int32))
        case ("defrag",):
            order = [i for i, (p, _) in enumerate(plain.cells) if p >= 0]
            if not plain.ascends():
                order.sort(key=lambda i: plain.cells[i][0])
            assert cells.order().tolist() == order
            assert cells.is_packed() == (order == list(range(len(order))) and cells.used == cells.end)
            cells.defrag_done()
            used = [plain.cells[i] for i in order]
            plain.cells = used + [(-1, frozenset())] * (SIZE - len(used))
            plain.head = len(used) % SIZE
        case _:
            cells.clear()
            plain.__init__()


@settings(max_examples=300, deadline=None)
@given(st.lists(operations, max_size=14))
def test_cells_are_as_the_plain_model(ops: list[tuple[Any, ...]]) -> None:
    cells, plain, next_pos = KVCells(SIZE, N_SEQ), Plain(), [0]
    for op in ops:
        apply(cells, plain, op, next_pos)
        assert cells.cells == plain.cells
        assert (cells.head, cells.used) == (plain.head, plain.used())
        owners = [min(s) if len(s) == 1 else SHARED if s else EMPTY for _, s in plain.cells]
        assert cells.owner.tolist() == owners
        assert cells.end == max((i + 1 for i, (p, _) in enumerate(plain.cells) if p >= 0), default=0)
        assert cells.wants_defrag or plain.ascends()
        for s in range(N_SEQ):
            assert cells.seq_end[s] == max((i + 1 for i, (_, ids) in enumerate(plain.cells) if s in ids), default=0)
            assert cells.seq_pos_max(s) == max(plain.pos(s), default=-1)
            assert cells.seq_pos_min(s) == min(plain.pos(s), default=-1)


def test_delta_is_what_positions_moved_since_k_was_roped() -> None:
    cells = KVCells(32)
    take(cells, np.arange(8, dtype=np.int32), np.zeros(8, np.int32))
    cells.seq_add(0, 4, -1, 3)
    cells.seq_div(0, 0, 4, 2)
    assert cells.has_shift
    assert cells.pos[:8].tolist() == [0, 0, 1, 1, 7, 8, 9, 10]
    assert cells.delta[:8].tolist() == [0, -1, -1, -2, 3, 3, 3, 3]
    cells.shift_done()
    assert not cells.has_shift and not cells.delta.any()


def test_n_kv_is_padded() -> None:
    cells = KVCells(200, padding=64)
    assert cells.size == 256
    assert cells.n_kv() == 64
    take(cells, np.arange(65, dtype=np.int32), np.zeros(65, np.int32))
    assert cells.n_kv() == 128
    assert cells.n_kv(129) == 192


def test_errors() -> None:
    cells = KVCells(32, 2)
    for call in (cells.seq_pos_max, cells.seq_keep, lambda s: cells.seq_cp(0, s), lambda s: cells.seq_add(s, 0, 1, 1)):
        with pytest.raises(GGMLError, match=r"sequence 2 is outside 0\.\.1"):
            call(2)
    with pytest.raises(GGMLError, match="at least 1, not 0"):
        cells.seq_div(0, 0, -1, 0)
    take(cells, np.array([2**31 - 2], np.int32), np.zeros(1, np.int32))
    with pytest.raises(GGMLError, match="beyond"):
        cells.seq_add(0, 0, -1, 5)
