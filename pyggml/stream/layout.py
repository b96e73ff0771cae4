"""Decides which weights of a model stay in memory, and where the others take turns. These are pure functions: they take
sizes and return places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyggml.buffers.buffer import ALIGNMENT
from pyggml.errors import ModelError

from .sizes import shown_size

_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly however many are taken


class Item(NamedTuple):
    """A weight, the form in which it is read (repacked or as stored), and its size in bytes."""

    name: str
    packed: bool
    size: int


@dataclass(frozen=True)
class Layout:
    """Places of items in one block of `size` bytes. Items in `pinned` keep theirs for good. Those in `groups`, in the
    order of the graph, have theirs while their group is in memory: groups that follow each other do not overlap, nor do
    the last and the first when that is possible."""

    size: int
    pinned: tuple[Item, ...]
    groups: tuple[tuple[Item, ...], ...]
    offsets: dict[Item, int]

    def span(self, group: int) -> tuple[int, int]:
        """Where a group begins and ends."""
        items = self.groups[group]
        return self.offsets[items[0]], self.offsets[items[-1]] + padded(items[-1].size)


def padded(n: int) -> int:
    """The bytes that something of `n` occupies."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def lay_out(groups: Sequence[Sequence[Item]], fixed: Sequence[Item], budget: int, beside: int = 0) -> Layout:
    """Choose the items that stay, within `budget` less the bytes `beside` them. All of `fixed` stay. Then whole groups
    stay, the largest first; groups of one size are spread evenly, so that there is time to read those between them.
    Then single items stay that fit.

    Raises ModelError, which names the least budget, when two neighbouring groups do not fit beside `fixed`.
    """
    kept = beside + sum(padded(i.size) for i in fixed)
    left = [[padded(i.size) for i in items] for items in groups]  # sizes; 0: pinned
    sums = [sum(sizes) for sizes in left]
    least = kept + _ring(sums)
    if least > budget:
        raise ModelError(f"ram: {budget} bytes are too few: the least for this model is {least} ({shown_size(least)})")
    pinned: list[Item] = list(fixed)
    for g in sorted(range(len(groups)), key=lambda g: (-sums[g], g * _GOLDEN % 1)):
        if kept + sums[g] + _ring([s for i, s in enumerate(sums) if i != g]) <= budget:
            kept, sums[g], left[g] = kept + sums[g], 0, [0] * len(left[g])
            pinned += groups[g]
    ring = _ring(sums)
    for g in sorted(range(len(groups)), key=lambda g: g * _GOLDEN % 1):
        for i, size in enumerate(left[g]):
            if size and size < sums[g] and kept + size + ring <= budget:
                kept, sums[g], left[g][i] = kept + size, sums[g] - size, 0
                pinned.append(groups[g][i])
    stream = [tuple(item for item, size in zip(groups[g], left[g], strict=True) if size) for g in range(len(groups))]
    return _placed(pinned, [items for items in stream if items])


def _ring(sums: Sequence[int]) -> int:
    """How many bytes groups of these sizes need to take turns: enough for any two neighbours. A size of 0 is no
    group."""
    sizes = [s for s in sums if s]
    if len(sizes) < 2:
        return sum(sizes)
    return max(a + b for a, b in zip(sizes, sizes[1:] + sizes[:1], strict=True))


def _placed(pinned: Sequence[Item], groups: Sequence[tuple[Item, ...]]) -> Layout:
    """Places: every second group lies at the beginning of the ring, the others at its end."""
    offsets = dict(_row(pinned, 0))
    start = sum(padded(i.size) for i in pinned)
    sums = [sum(padded(i.size) for i in items) for items in groups]
    end = start + _ring(sums)
    for g, items in enumerate(groups):
        offsets |= _row(items, end - sums[g] if g % 2 else start)
    return Layout(end, tuple(pinned), tuple(groups), offsets)


def _row(items: Sequence[Item], start: int) -> Iterator[tuple[Item, int]]:
    for item in items:
        yield item, start
        start += padded(item.size)
