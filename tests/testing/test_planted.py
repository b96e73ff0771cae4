"""Errors planted in a kernel of another package are found from outside, and made small."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

import numpy as np
import pytest

import pyggml as gg
from pyggml.opdef import OPS
from pyggml.testing import Mismatch, check_op


def _shape(srcs, params):
    a, b = srcs
    gg.rule(all(n in (1, m) for m, n in zip(a.ne, b.ne, strict=True)), "each ne of b must be a's, or 1")
    return a.ne


@pytest.fixture
def plus(request: pytest.FixtureRequest) -> Iterator[gg.OpDef]:
    name = f"plus_{request.node.callspec.params['bug']}"
    yield gg.OpDef(
        name=name,
        srcs=("a", "b"),
        params=(),
        shape=_shape,
        dtypes={(gg.F32, gg.F32): gg.F32},
        ref=lambda a, b: a + b,
        kernel=name,
        cost=gg.elementwise_cost(1),
        inplace=(0,),
        label="a + b",
    )
    del OPS[name]


FOUND = {  # what the kernel is called -> what the message says, and ne of the smallest case
    "tail": ("NMSE|NaN|infinit", [3]),
    "stride": ("NMSE|NaN|infinit", [2, 2]),
    "past_the_end": ("bytes after .* were overwritten", [1]),
    "not_a_number": ("NaN in other places", [1, 2]),
    "broadcast": ("NMSE|NaN|infinit", [1, 2]),
    "threads": ("NMSE|NaN|infinit", [1]),
    "in_place": ("NMSE|NaN|infinit", [1]),
    "reads_beyond": ("NMSE|NaN|infinit", [4]),
    "scratch": ("bytes after the .* bytes of scratch memory of .* were overwritten", [3]),
}


@pytest.mark.parametrize("bug", FOUND)
def test_an_error_is_found_and_made_small(bug: str, plus: gg.OpDef, planted: ctypes.CDLL) -> None:
    text, ne = FOUND[bug]
    work = planted.a_row if bug == "scratch" else 0
    gg.register_kernel(plus, getattr(planted, bug), gg.F32, gg.F32, gg.F32, work=work)
    by_chance = bug == "threads"  # whether threads meet is chance: found, but not always at once, nor made small
    with pytest.raises(Mismatch, match=text) as e:
        for _ in range(20 if by_chance else 1):
            check_op(plus, max_examples=100)
    if by_chance:
        return
    smallest = [int(n) for n in re.findall(r"result = .* ne \[(.*?)\]", str(e.value))[0].split(", ")]
    assert smallest[0] == ne[0] and np.prod(smallest) <= np.prod(ne), str(e.value)
