"""Decides which processes run on which nodes, and which layers each has, from the CPUs and the memory of the nodes.
These are pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from pyggml.errors import ModelError, whole


class Node(NamedTuple):
    """A machine of a cluster: its name there, its CPUs, and bytes of memory."""

    id: str
    n_cpus: int
    memory: int


class Seat(NamedTuple):
    """Where an actor runs, and on how many threads. `share` is how much of the node's CPUs it is given, `memory` how
    many of its bytes."""

    node: str
    n_threads: int
    share: float
    memory: int


def take_seats(nodes: Sequence[Node], n: int | None) -> list[Seat]:
    """Seats for `n` actors, each on the node with the most CPUs left; by default one on each node. Raises ModelError
    for a bad `n`, and when no node has CPUs."""
    able = [node for node in nodes if node.n_cpus > 0]
    if not able:
        raise ModelError("the cluster has no CPUs")
    count = [int(n is None)] * len(able)
    for _ in range(0 if n is None else whole("workers or stages", n, 1, 1024, ModelError)):
        best = max(range(len(able)), key=lambda i: (able[i].n_cpus / (count[i] + 1), -i))
        count[best] += 1
    seats: list[Seat] = []
    for node, k in zip(able, count, strict=True):
        for i in range(k):
            threads = (node.n_cpus * (i + 1)) // k - (node.n_cpus * i) // k
            seats.append(
                Seat(node.id, max(threads, 1), threads if k <= node.n_cpus else node.n_cpus / k, node.memory // k)
            )
    return seats


def spread(sizes: Sequence[int], last: int, seats: Sequence[Seat], streamed: bool) -> list[tuple[int, int]]:
    """Layers (from, up to) for each seat. The slowest seat, which has the most bytes for each of its threads, is as
    fast as possible.

    sizes: bytes of each layer. last: bytes of the output, which go to the last seat. Raises ModelError when there are
    fewer layers than seats, or the memory of the seats cannot hold them (unless weights are `streamed`).
    """
    n, k = len(sizes), len(seats)
    if k > n:
        raise ModelError(f"{k} stages of a model of {n} layers: each needs one")
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)

    def cost(s: int, a: int, b: int) -> float:
        held = sums[b] - sums[a] + (last if b == n else 0)
        return float("inf") if held > seats[s].memory and not streamed else held / seats[s].n_threads

    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # for each number of stages: end -> (slowest, begin)
    for s in range(k):
        row: dict[int, tuple[float, int]] = {}
        for b in range(s + 1, n - (k - s - 1) + 1):
            row[b] = min((max(best[s][a][0], cost(s, a, b)), a) for a in best[s] if a < b)
        best.append(row)
    if best[k][n][0] == float("inf"):
        need, have = sums[-1] + last, sum(s.memory for s in seats)
        raise ModelError(
            f"{k} stages with {have} bytes of memory cannot hold {need} bytes of weights: stream them (ram)"
        )
    ends = [n]
    for s in range(k, 0, -1):
        ends.append(best[s][ends[-1]][1])
    ends.reverse()
    return list(pairwise(ends))
