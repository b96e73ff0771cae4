"""Sizes at the edges of int64: every op with dims, strides, offsets and parameters that no memory holds.

Layouts are computed with Python's integers when a graph is recorded, and refused there when a byte of them has no
address. What is lowered for C has strides within memory, and sizes of scratch memory that are counted without
overflow. Each draw ends in a named exception, or in a tensor that can be computed.
"""

from __future__ import annotations

import random
import resource
from collections import Counter
from typing import Any

import pytest

import pyggml as gg
from pyggml.buffers.buffer import Buffer
from pyggml.errors import AllocError, GGMLError
from pyggml.opdef import OPS
from pyggml.testing import STRATEGIES, levels_of

from .edges import try_edges

MOST = 2**63 - 1
DIMS = (1, 2, 3, 4, 32, 256, 2**16, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**53 + 1, 2**61 - 1, 2**61, 2**62, MOST)
BEYOND = (0, -1, 2**63, 2**64, 2**64 + 4, -(2**63), -(2**63) - 1)
TYPES = (gg.F32, gg.F32, gg.F32, gg.F16, gg.I32, gg.Q4_0, gg.Q8_0)
SMALL = 1 << 20  # bytes that a graph may take to be run
N_DRAWS = 12  # of each op


def dims(rng: random.Random, beyond: bool = False) -> tuple[int, ...]:
    """Few are large: most products of more than one do not fit."""
    ne = [rng.choice(DIMS[:6]) for _ in range(rng.randint(1, 4))]
    for _ in range(rng.randint(0, 2)):
        ne[rng.randrange(len(ne))] = rng.choice(DIMS + BEYOND if beyond else DIMS)
    return tuple(ne)


def source(rng: random.Random, ctx: gg.Context) -> gg.Tensor:
    """A leaf, or a view of one at an offset and with strides that are drawn, too."""
    t = ctx.new_tensor(rng.choice(TYPES), dims(rng))
    kind = rng.randrange(4)
    if kind == 1:
        return gg.permute(t, *rng.sample(range(4), 4))
    if kind == 2:
        numbers = (*DIMS, *BEYOND)
        return gg.view_4d(t, *(rng.choice(DIMS) for _ in range(4)), *(rng.choice(numbers) for _ in range(4)))
    return t


def number(rng: random.Random) -> Any:
    return rng.choice((*DIMS, *BEYOND, 0, 1, 1, 2, 0.5, 1e38))


def attempt(rng: random.Random, name: str) -> str:
    """Record the op, plan its graph, and run it when it is small: what came of it."""
    op = OPS[name]
    with gg.Context() as ctx:
        try:
            srcs = [source(rng, ctx) if not r.endswith("?") or rng.random() < 0.5 else None for r in op.srcs]
            while srcs and srcs[-1] is None:
                srcs.pop()
            if rng.random() < 0.5 and len(srcs) > 1:
                srcs = [srcs[0]] * len(srcs)
            made = getattr(gg, name)(*srcs, *(number(rng) for _ in op.params), **({} if srcs else {"ctx": ctx}))
        except GGMLError as e:
            return type(e).__name__
        except TypeError:  # the function of this op takes its arguments in another way
            return "other arguments"
        t: gg.Tensor = made[0] if isinstance(made, tuple) else made
        assert 0 <= t.nbytes <= MOST and all(0 <= n <= MOST for n in (*t.ne, *t.nb))
        graph = gg.Graph()
        graph.build_forward_expand(t)
        need = sum(x.nbytes for x in (*graph.nodes, *graph.leafs) if x.view_src is None)
        try:
            if need <= SMALL or need > 2**44:  # what lies between would be granted, page by page
                gg.compute(graph, n_threads=1)
        except GGMLError as e:
            return type(e).__name__
        assert need <= 2**44
        return "recorded"


@pytest.mark.parametrize("first", range(4))
def test_every_op_is_driven(first: int) -> None:
    """Sound cases of every op: with any strides of dimensions of one element it gives what the reference does; with
    a huge size it is recorded and lowered, or refused."""
    outcomes = Counter[str]()
    for name in sorted(STRATEGIES)[first::4]:
        outcomes += try_edges(name, levels_of(name)[-1:], 2, 2)
    assert {"far", "recorded", "ShapeError"} <= outcomes.keys()


def test_any_arguments() -> None:
    rng = random.Random(0)
    outcomes = set[str]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in sorted(OPS):
        if hasattr(gg, name):
            outcomes |= {attempt(rng, name) for _ in range(N_DRAWS)}
    assert outcomes >= {"ShapeError", "recorded"}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB: nothing huge was allocated


@pytest.mark.parametrize("ne", [(2**61, 2), (2**62,), (MOST,), (2**32, 2**31), (2**16, 2**16, 2**16, 2**16), (2**63,)])
def test_leafs_without_an_address(ne: tuple[int, ...]) -> None:
    with gg.Context() as ctx, pytest.raises(gg.ShapeError):
        ctx.new_tensor(gg.F32, ne)


@pytest.mark.parametrize("n", [2**60, MOST, 2**63, 2**64])
def test_memory_that_there_is_not(n: int) -> None:
    with pytest.raises(AllocError, match="cannot allocate"):
        Buffer.allocate(n)
