"""Helpers for ops in which each token in turn changes a state (csrc/kernels/state.h)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..codec import Array
from ..opdef import Cost, Params, Srcs, rule
from ..tensor import Tensor
from ._common import MAX_INT, is_int, src


def check_rows(srcs: Srcs, roles: tuple[str, ...]) -> None:
    """Check that the rows of all sources are dense. For a shape rule."""
    for i, role in enumerate(roles):
        t = src(srcs, i)
        dense = t.ne[0] == 1 or t.nb[0] == t.dtype.type_size
        rule(dense, f"rows of {role} must be dense (nb[0] = {t.nb[0]}, not {t.dtype.type_size}); cont({role}) is")


def check_state(state: Tensor, role: str) -> None:
    """Check that the states are contiguous. For a shape rule."""
    rule(state.is_contiguous, f"{role} must be contiguous (cont({role}) is)")


def n_slots(params: Params) -> int:
    """How many of the latest states an op returns (its parameter K)."""
    rule(is_int(params["K"], 1), f"K must be a whole number from 1 to {MAX_INT}, not {params['K']}")
    return int(params["K"])


def run(step: Callable[[Array, int], tuple[Array, Array]], state: Array, n_tokens: int, slots: int = 1) -> Array:
    """Reference: run all tokens. Returns the results of all tokens, followed by the last `slots` states, newest first.
    When there are fewer tokens than slots, the rest is zeros.

    step(state [n_seqs, ...], token) -> (the token's results [n_seqs, ...], the state after the token).
    """
    results: list[Array] = []
    states: list[Array] = []
    for t in range(n_tokens):
        y, state = step(state, t)
        results.append(y)
        states.append(state)
    latest = [*reversed(states), *[np.zeros_like(state)] * slots][:slots]
    return np.concatenate([np.stack(results, axis=1).ravel(), *(s.ravel() for s in latest)])


def cost_of(flops: int, t: Tensor) -> Cost:
    """The cost of a node with `flops` operations that reads and writes everything once."""
    return Cost(flops, sum(s.nbytes for s in t.src if s is not None), t.nbytes)
