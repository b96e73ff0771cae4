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
