"""Stretches of nodes that repeat earlier nodes of a graph (`Graph.repeat`). A backend takes over what it made of the
earlier nodes, and need not look at the nodes of the stretch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..tensor import FLAG_INPUT, FLAG_OUTPUT, Tensor


class Stretch(NamedTuple):
    """The nodes from `begin` to `end`. When they repeat another stretch, `like` is where that begins."""

    begin: int
    end: int
    like: int | None = None


def stretches_of(
    nodes: Sequence[Tensor], uses: Mapping[Tensor, int], kernels: Mapping[Tensor, object]
) -> list[Stretch]:
    """Cut the nodes into stretches: at the borders of each stretch that repeats another, and at the borders of the
    other.

    The nodes are one stretch when stretches overlap, or when a node differs from the node that it repeats in its number
    of readers (`uses`), in whether it is an input or output, or in its entry of `kernels`.
    """
    repeats = _repeats(nodes)
    spans = {span for begin, end, like in repeats for span in ((begin, end), (like, like + end - begin))}
    borders = sorted({0, len(nodes)}.union(*spans))
    cut = set(pairwise(borders))
    said = [(uses.get(t), t.flags & (FLAG_INPUT | FLAG_OUTPUT), kernels.get(t)) for t in nodes]
    same = all(said[begin:end] == said[like : like + end - begin] for begin, end, like in repeats)
    if not same or not spans <= cut:
        return [Stretch(0, len(nodes))]
    like_of = {begin: like for begin, _, like in repeats}
    return [Stretch(begin, end, like_of.get(begin)) for begin, end in sorted(cut)]


def _repeats(nodes: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """For each stretch that repeats another: where it begins, where it ends, and where the other one begins."""
    at = {t: i for i, t in enumerate(nodes)}
    found: list[tuple[int, int, int]] = []
    i = 0
    while i < len(nodes):
        like = nodes[i].like
        begin, first = i, i if like is None else at.get(like, i)
        while i < len(nodes) and first < begin and nodes[i].like is nodes[first + i - begin]:
            i += 1
        if i > begin:
            found.append((begin, i, first))
        i += i == begin
    return found
