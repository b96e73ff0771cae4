"""What stays in memory and what takes turns: always within the budget, neighbours apart, everything somewhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pyggml.errors import ModelError
from pyggml.stream.layout import Item, Layout, lay_out
from pyggml.stream.sizes import memory_size


@pytest.mark.parametrize(
    ("text", "n"),
    [(5, 5), ("2GiB", 2 << 30), ("2g", 2 << 30), ("700MB", 700_000_000), ("1.5 KiB", 1536), (" 12 ", 12), ("3b", 3)],
)
def test_sizes(text: int | str, n: int) -> None:
    assert memory_size(text) == n


@pytest.mark.parametrize("text", ["", "GiB", "9" * 400, "2x", "-1", "1e9", "2 i", 0, -5, 1.5, None, "0", [1]])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ModelError, match="ram"):
        memory_size(text)  # pyright: ignore[reportArgumentType]


def model(sizes: list[int], n_items: int) -> list[list[Item]]:
    return [[Item(f"{g}.{i}", bool(i % 2), n + i) for i in range(n_items)] for g, n in enumerate(sizes)]


def overlap(layout: Layout, a: int, b: int) -> bool:
    (start, end), (first, last) = layout.span(a), layout.span(b)
    return start < last and first < end


def test_all_that_holds() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        groups = model(rng.integers(1, 3000, rng.integers(1, 12)).tolist(), int(rng.integers(1, 5)))
        fixed = [Item("norm", False, 100)]
        with pytest.raises(ModelError) as e:
            lay_out(groups, fixed, 1, beside=50)
        least = int(str(e.value).split("model is ")[1].split()[0])
        with pytest.raises(ModelError, match=f"{least - 1} bytes are too few"):
            lay_out(groups, fixed, least - 1, beside=50)
        budget = least + int(rng.integers(0, 12000))
        layout = lay_out(groups, fixed, budget, beside=50)
        assert layout.size + 50 <= budget
        places = sorted((layout.offsets[i], i.size) for i in layout.pinned)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(places))
        ring = sum(n for _, n in places)
        n_streamed = len(layout.groups)
        for g in range(n_streamed):
            assert ring <= layout.span(g)[0] < layout.span(g)[1] <= layout.size
            if g + 1 < n_streamed:
                assert not overlap(layout, g, g + 1)
        if n_streamed > 1 and n_streamed % 2 == 0:
            assert not overlap(layout, 0, n_streamed - 1)
        there = {i for of in layout.groups for i in of} | set(layout.pinned)
        assert there == {i for of in groups for i in of} | set(fixed)


def test_what_fits_stays() -> None:
    groups = model([1000, 1000, 5000, 1000, 1000], 2)
    everything = lay_out(groups, [], 1 << 20)
    assert not everything.groups
    less = lay_out(groups, [], everything.size - 64)
    assert len(less.groups) >= 2
    assert {i.name for i in less.pinned} >= {"2.0", "2.1"}  # the largest


def test_those_that_stay_are_spread() -> None:
    groups = model([1024] * 16, 1)
    layout = lay_out(groups, [], 1024 * (8 + 2))
    streamed = [int(of[0].name.split(".")[0]) for of in layout.groups]
    assert len(streamed) == 8
    assert max(b - a for a, b in itertools.pairwise(streamed)) <= 4
