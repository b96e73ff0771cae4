"""Which snapshots are kept, found and dropped, beside a search through all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml.llm.generate import snapshots
from pyggml.llm.generate.prefixes import common_prefix
from pyggml.llm.generate.snapshots import Snapshots

texts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=12)


def empty(keeps_all: bool, n_bytes: int) -> Snapshots:
    ctx: Any = SimpleNamespace(memory=SimpleNamespace(keeps_all=keeps_all, stores=()))
    return Snapshots(ctx, n_bytes, n_checkpoints=2)


def begins(text: list[int], beginning: list[int]) -> bool:
    return text[: len(beginning)] == beginning


@pytest.mark.parametrize("keeps_all", [True, False])
@given(kept=texts, asked=texts)
def test_what_is_found(keeps_all: bool, kept: list[list[int]], asked: list[list[int]]) -> None:
    store = empty(keeps_all, 1 << 20)
    expected: list[tuple[int, list[int]]] = []
    with mock.patch.object(snapshots, "own_seq_bytes", return_value=b"12345"):
        for i, text in enumerate(kept):
            store.keep(i % 2, text, 0)
            of_key = [t for k, t in expected if k == i % 2]
            if keeps_all and not any(begins(t, text) for t in of_key):
                expected = [(k, t) for k, t in expected if k != i % 2 or not begins(text, t)] + [(i % 2, text)]
            elif not keeps_all and text not in of_key:
                expected.append((i % 2, text))
    assert sorted((s.key, s.tokens) for s in store.kept) == sorted(expected)
    assert store.nbytes == 5 * len(expected)
    for text in asked:
        usable = [common_prefix(t, text) for k, t in expected if k == 0 and (keeps_all or begins(text, t))]
        found, n = store.find(0, text)
        assert n == max(usable, default=0) and (found is None) == (n == 0)
        assert found is None or common_prefix(found.tokens, text) == n
    for s in store.kept:  # worth: the tokens that no other has
        others = [common_prefix(t, s.tokens) for k, t in expected if k == s.key and t != s.tokens]
        store._use(s)  # pyright: ignore[reportPrivateUsage]
        assert s.worth == (len(s.tokens) - max(others, default=0)) / 5


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.booleans()), max_size=200))
def test_the_least_worth_is_dropped(asked: list[tuple[int, int, bool]]) -> None:
    store = empty(False, 20 * 5000)
    with mock.patch.object(snapshots, "own_seq_bytes", return_value=b"x" * 5000):
        for first, n, is_checkpoint in asked:
            before = {s: s.worth for s in store.kept}
            store.keep(None, [first] * n, 0, is_checkpoint)
            gone = [s for s in before if s not in store.kept]
            if gone and not is_checkpoint:
                assert [s.worth for s in gone] == [min(before.values())]
            assert sorted(map(id, store._marks)) == sorted(id(s) for s in store.kept if s.is_checkpoint)  # pyright: ignore[reportPrivateUsage]
            assert len(store._by_worth) <= 2 * len(store.kept) + 65  # pyright: ignore[reportPrivateUsage]


def test_a_dropped_snapshot_is_restored() -> None:
    store = empty(True, 5000)
    with mock.patch.object(snapshots, "own_seq_bytes", return_value=b"x" * 5000):
        store.keep(None, [1] * 30, 0)
        found, _ = store.find(None, [1] * 40)
        store.keep(None, [2] * 40, 0)  # takes its place
        assert found is not None and found not in store.kept
        with mock.patch.object(snapshots, "load_own_seq") as load:
            assert store.restore(found, 3) and load.call_args.args[1:] == (found.data, 3)
        assert [s.tokens[0] for s in store.kept] == [2]
        store.keep(None, [3] * 50, 0)
    assert [s.tokens[0] for s in store.kept] == [3] and store.nbytes == 5000


def test_what_is_dropped() -> None:
    store = empty(True, 3 * 5000)
    with mock.patch.object(snapshots, "own_seq_bytes", return_value=b"x" * 5000):
        for text in ([1] * 40, [2] * 30, [3] * 50, [2] * 30, [4] * 20):
            store.keep(None, text, 0)
        assert [s.tokens[0] for s in store.kept] == [1, 3, 4]  # [2] is the shortest
        assert store.nbytes == 15000
        for i in range(5, 9):
            store.keep(None, [i] * 20, 0, is_checkpoint=True)
    assert sum(s.is_checkpoint for s in store.kept) <= 2 and store.nbytes == 5000 * len(store.kept) <= 15000
