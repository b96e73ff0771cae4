"""Sizes at the edges of int64, for every op: cases of its strategy whose strides, or whose sizes, are changed to what
no memory holds. `test_edges.py` tries some of each, `tests/deep/deep_edges.py` as many as one likes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu import lower
from pyggml.buffers.alloc import steps_of
from pyggml.buffers.buffer import Buffer
from pyggml.dtypes import DType
from pyggml.errors import GGMLError
from pyggml.tensor import Tensor
from pyggml.testing import STRATEGIES, Case, run_case
from pyggml.testing.search import search

MOST = 2**63 - 1
FAR = (0, 1, 2, 2**31, 2**32 + 1, 2**40, 2**47, 2**53, 2**60, 2**61, 2**62, MOST)  # strides, before they are rounded
HUGE = (2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**53, 2**53 + 1, 2**61 - 1, 2**61, 2**62, MOST)  # dims


def stride(rng: random.Random, dtype: DType) -> int:
    """Any stride that a tensor of this type may have: a whole number of its elements or blocks."""
    return rng.choice(FAR) // dtype.type_size * dtype.type_size


def far(rng: random.Random, t: Tensor) -> tuple[Tensor, int]:
    """A view of the elements of `t` in which some dimensions of one element have other strides; and how many have."""
    ne, nb, turned = list(t.ne), list(t.nb), t.ne[0] == 1 < t.ne[1] and t.nb[1] == t.dtype.type_size
    if turned:  # the stride of dimension 0 is another one only in a tensor that is turned
        ne[:2], nb[:2] = [ne[1], 1], [nb[1], t.dtype.type_size]
    if nb[0] != t.dtype.type_size:
        return t, 0
    ones = [i for i in (1, 2, 3) if ne[i] == 1 and rng.random() < 0.8]
    for i in ones:
        nb[i] = stride(rng, t.dtype)
    x = gg.view_4d(t, *ne, *nb[1:], 0)
    return (gg.permute(x, 1, 0, 2, 3) if turned else x), len(ones)


def drive(rng: random.Random, case: Case, levels: Sequence[str]) -> int:
    """Compute a case whose sources have such strides at all `levels`, and compare it with the reference. Returns how
    many strides are others; 0: the op has refused them, or there is none. Raises Mismatch."""
    n = 0

    def build(*srcs: Tensor | None) -> Tensor:
        nonlocal n
        changed = [(None, 0) if t is None else far(rng, t) for t in srcs]
        try:
            made = case.build(*[t for t, _ in changed])
        except GGMLError:
            n = 0
            return case.build(*srcs)
        n = sum(k for _, k in changed)
        return made

    run_case(replace(case, build=build), levels)
    return n


def huge(rng: random.Random, case: Case) -> list[tuple[int, ...] | None]:
    """The ne of the sources of a case, in which one size is huge wherever it stands: mostly one that several have, so
    that they still fit to each other."""
    old, new, axis = (
        rng.choice([n for s in case.srcs if s is not None for n in s.ne]),
        rng.choice(HUGE),
        rng.randrange(4),
    )
    out: list[tuple[int, ...] | None] = []
    for s in case.srcs:
        ne = [] if s is None else list(s.ne)
        for i, n in enumerate(ne):
            if n == old and (n > 1 or i == axis) and rng.random() < 0.9:
                ne[i] = new if i or s is None else new // s.dtype.block_size * s.dtype.block_size
        out.append(None if s is None else tuple(ne))
    return out


def nowhere() -> Buffer:
    """Memory for tensors of any size, which is not there: nothing may be computed in it."""
    buffer = Buffer(np.empty(0, np.uint8))
    buffer.base = 1 << 40
    return buffer


def record_huge(rng: random.Random, case: Case, levels: Sequence[str]) -> str:
    """Record a case with a huge size, and lower it at all levels: kernels say which scratch memory they need. Returns
    "recorded", or the name of what was raised."""
    with gg.Context() as ctx:
        try:
            srcs: list[Tensor | None] = []
            for s, ne in zip(case.srcs, huge(rng, case), strict=True):
                srcs.append(None if s is None or ne is None else ctx.new_tensor(s.dtype, ne))
            node = case.build(*srcs)
            assert 0 <= node.nbytes <= MOST and all(0 <= n <= MOST for n in (*node.ne, *node.nb))
            graph = gg.Graph().build_forward_expand(node)
            for t in (*graph.nodes, *graph.leafs):
                if t.view_src is None:
                    t.buffer = nowhere()
            for level in levels:
                assert 0 <= lower.lower(steps_of(graph.nodes), lambda t: t, level, 256).work_size <= MOST
        except GGMLError as e:
            return type(e).__name__
    return "recorded"


def try_edges(op: str, levels: Sequence[str], n_cases: int, n_huge: int, seed: int = 0) -> Counter[str]:
    """Draw `n_cases` cases of an op; drive each, and record it with huge sizes `n_huge` times. Returns how many were
    driven ("far"), and what came of huge sizes. Raises Mismatch."""
    seen = Counter[str]()

    def check(case: Case, drawn: int) -> None:
        rng = random.Random(seed + drawn)
        seen["far"] += drive(rng, case, levels) > 0
        seen.update(record_huge(rng, case, levels) for _ in range(n_huge) if case.srcs)

    search(check, op, n_cases, STRATEGIES[op], st.integers(0, 2**32))
    return seen
