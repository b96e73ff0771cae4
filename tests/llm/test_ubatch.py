"""Batches split: the worked examples of the issue, and that every token comes out once, in its place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml.errors import BatchError
from pyggml.llm.batch import Batch
from pyggml.llm.ubatch import SBatch, UBatch, ubatches_of_tokens


def batch_of(*tokens: tuple[int, int | tuple[int, ...]], logits: tuple[int, ...] = ()) -> Batch:
    """(pos, sequences) of each token; token i has the id 100 + i."""
    batch = Batch()
    for i, (pos, seq) in enumerate(tokens):
        batch.add(100 + i, pos, seq, i in logits)
    return batch


def test_the_last_of_each_of_two_sequences() -> None:
    """13 tokens: 6 of one sequence and 7 of another."""
    s = SBatch(batch_of(*((i, 0) for i in range(6)), *((i, 1) for i in range(7)), logits=(5, 12)))
    (u,) = s.parts(512)
    assert s.out_ids.tolist() == [5, 12]
    assert (u.equal_seqs, u.n_tokens, u.n_seq_tokens, u.n_seqs) == (False, 13, 1, 13)
    assert u.outputs.tolist() == [5, 12]
    assert u.seq_id == [(0,)] * 6 + [(1,)] * 7 and u.n_seq_id == [1] * 13


def test_75_tokens_in_parts_of_32() -> None:
    s = SBatch(Batch.prompt(range(75)))
    seen: list[tuple[int, int]] = []
    while s.n_tokens:
        offset = s.seq[0].offset
        seen.append((offset, s.split_simple(32).n_tokens))
    assert seen == [(0, 32), (32, 32), (64, 11)]
    assert s.out_ids.tolist() == [74]
    with pytest.raises(BatchError, match="nothing of the batch is left"):
        s.split_simple(32)


def test_equal_split_of_5_and_4_tokens() -> None:
    s = SBatch(batch_of(*((i, 0) for i in range(5)), *((i, 1) for i in range(4)), logits=(4, 8)), simple_split=False)
    u = s.split_equal(512)
    assert (u.equal_seqs, u.n_tokens, u.n_seq_tokens, u.n_seqs) == (True, 8, 4, 2)
    assert u.seq_id == [(1,), (0,)] and u.ids.tolist() == [5, 6, 7, 8, 0, 1, 2, 3]
    u = s.split_equal(512)
    assert (u.n_tokens, u.n_seq_tokens, u.n_seqs, u.ids.tolist()) == (1, 1, 1, [4])
    assert s.out_ids.tolist() == [8, 4] and s.n_tokens == 0


def test_shared_tokens_come_first() -> None:
    """Six tokens, four of which belong to two sequences."""
    batch = batch_of((0, (0, 1)), (2, (0, 1)), (4, 0), (1, (0, 1)), (3, (0, 1)), (4, 1))
    s = SBatch(batch, simple_split=False)
    assert s.ids.tolist() == [0, 3, 1, 4, 2, 5]
    assert [g.length for g in s.seq] == [4, 1, 1]
    assert [(g.n_seq_id, g.seq_id, g.offset) for g in s.seq] == [(2, (0, 1), 0), (1, (0,), 4), (1, (1,), 5)]
    u = s.split_equal(512)  # runs alone
    assert (u.n_tokens, u.n_seqs, u.seq_id, u.n_seq_id) == (4, 1, [(0, 1)], [2])
    u = s.split_equal(512)
    assert (u.n_tokens, u.n_seq_tokens, u.n_seqs) == (2, 1, 2)
    s = SBatch(batch, simple_split=False)
    assert [s.split_seq(512).n_tokens for _ in range(3)] == [4, 1, 1]


def test_simple_split_is_by_position_where_a_sequence_is_out_of_order() -> None:
    s = SBatch(batch_of((2, 0), (0, 1), (0, 0), (1, 0)))
    assert s.split_simple(2).ids.tolist() == [1, 2]
    assert s.split_simple(2).ids.tolist() == [3, 0]
    assert SBatch(batch_of((7, 0), (0, 1), (8, 0), (1, 1))).ids.tolist() == [0, 1, 2, 3]


def test_wrong_split() -> None:
    with pytest.raises(BatchError, match="sorted for simple splits"):
        SBatch(Batch.one(1, 0)).split_equal(4)
    with pytest.raises(BatchError, match="sorted for equal splits"):
        SBatch(Batch.one(1, 0), simple_split=False).split_simple(4)
    with pytest.raises(BatchError, match="empty"):
        SBatch(Batch())


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Up to four sequences with a shared start of some of them, mixed."""
    batch = Batch()
    n_shared = draw(st.integers(0, 4))
    entries: list[tuple[int, tuple[int, ...]]] = [(i, (0, 2)) for i in range(n_shared)]
    for s in range(4):
        start = n_shared if s in (0, 2) else draw(st.integers(0, 3))
        entries += [(start + i, (s,)) for i in range(draw(st.integers(0, 6)))]
    for pos, ids in draw(st.permutations(entries or [(0, (0,))])):
        batch.add(draw(st.integers(0, 9)), pos, ids, draw(st.booleans()))
    return batch


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 9), st.sampled_from(["simple", "equal", "seq"]))
def test_every_token_comes_out_once(batch: Batch, n_ubatch: int, kind: str) -> None:
    s = SBatch(batch, simple_split=kind == "simple")
    last: dict[int, int] = {}
    ids: list[int] = []
    while s.n_tokens:
        u: UBatch = getattr(s, f"split_{kind}")(n_ubatch)
        assert 0 < u.n_tokens <= n_ubatch and u.n_tokens == u.n_seqs * u.n_seq_tokens == len(u.ids)
        assert u.equal_seqs is (kind != "simple")
        assert kind != "seq" or u.n_seqs == 1
        assert u.token is not None and u.token.tolist() == [batch.tokens[i] for i in u.ids]
        assert u.pos.tolist() == [batch.pos[i] for i in u.ids]
        assert u.outputs.tolist() == [k for k, i in enumerate(u.ids) if batch.logits[i]]
        sets = [batch.seq_ids[i] for i in u.ids]
        assert u.sets is None or [tuple(x) for x in u.sets] == sets
        assert u.seq_id == sets[:: u.n_seq_tokens]
        for k, i in enumerate(u.ids):
            assert sets[k] == u.seq_id[k // u.n_seq_tokens]
            for q in batch.seq_ids[i]:
                assert batch.pos[i] > last.get(q, -1)  # nothing is computed before what it looks at
                last[q] = batch.pos[i]
        ids += u.ids.tolist()
    assert sorted(ids) == list(range(len(batch)))
    assert s.out_ids.tolist() == [i for i in ids if batch.logits[i]]


@pytest.mark.parametrize("n", [1, 7])
def test_tokens_of_one_sequence_without_a_batch(n: int) -> None:
    tokens = np.arange(10, 10 + n, dtype=np.int32)
    s = SBatch(Batch.prompt(tokens.tolist(), pos=5), simple_split=False)
    for fast, slow in zip(ubatches_of_tokens(tokens, 5, 3), s.parts(3), strict=True):
        for name in ("equal_seqs", "n_tokens", "n_seq_tokens", "n_seqs", "embd", "sets", "seq_id"):
            assert getattr(fast, name) == getattr(slow, name)
        for name in ("token", "pos", "seq", "outputs", "ids"):
            assert getattr(fast, name).tolist() == getattr(slow, name).tolist()


def test_batch_helpers_and_errors() -> None:
    batch = Batch.prompt([5, 6, 7], pos=2, seq_ids=(3, 1, 3))
    assert (batch.tokens, batch.pos, batch.logits) == ([5, 6, 7], [2, 3, 4], [False, False, True])
    assert batch.seq_ids == [(1, 3)] * 3 and batch.n_seq_id == [2] * 3 and batch.n_tokens == len(batch) == 3
    one = Batch.one(9, 4, 2)
    assert (one.tokens, one.pos, one.seq_ids, one.logits) == ([9], [4], [(2,)], [True])
    with pytest.raises(BatchError, match="holds tokens"):
        one.add_embd([1.0, 2.0], 5)
    embd = Batch()
    embd.add_embd(np.ones(4), 0)
    for row in ([1.0, 2.0], "text", [[1.0] * 4], []):
        with pytest.raises(BatchError, match="an embedding must be a row of n_embd numbers"):
            embd.add_embd(row, 1)
    with pytest.raises(BatchError, match="holds embeddings"):
        embd.add(1, 1)
    assert embd.n_tokens == 1
