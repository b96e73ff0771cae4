"""Helpers for ops in which one token after the other changes a state (csrc/kernels/state.h)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..codec import Array
from ..opdef import Cost, Params, Srcs, rule
from ..tensor import Tensor
from ._common import MAX_INT, is_int, src


def check_rows(srcs: Srcs, roles: tuple[str, ...]) -> None:
    """The rule that rows of all sources are dense."""
    for i, role in enumerate(roles):
        t = src(srcs, i)
        dense = t.ne[0] == 1 or t.nb[0] == t.dtype.type_size
        rule(dense, f"rows of {role} must be dense (nb[0] = {t.nb[0]}, not {t.dtype.type_size}); cont({role}) is")


def check_state(state: Tensor, role: str) -> None:
    """The rule that states lie side by side."""
    rule(state.is_contiguous, f"{role} must be contiguous (cont({role}) is)")


def n_slots(params: Params) -> int:
    """How many of the latest states an op gives back."""
    rule(is_int(params["K"], 1), f"K must be a whole number from 1 to {MAX_INT}, not {params['K']}")
    return int(params["K"])


def run(step: Callable[[Array, int], tuple[Array, Array]], state: Array, n_tokens: int, slots: int = 1) -> Array:
    """Reference: the results of all tokens, then the last states, newest first, zeros from before the first token.

    step(state [n_seqs, ...], token) -> (its results [n_seqs, ...], the state after it).
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
