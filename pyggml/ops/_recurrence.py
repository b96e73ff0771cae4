"""Helpers for ops in which each token in turn changes a state (csrc/kernels/state.h)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..codec import Array
from ..opdef import OPS, Cost, Gradient, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, MAX_INT, is_int, src
from ._gradients import dense, packed


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


class Turns(NamedTuple):
    """What tokens do to a state [value, key], as the kernels have it (csrc/kernels/scan_back.h): along = state a, u = v
    + c along, state = state * w + u k^T + along b^T, y = state r (`before`: of the state as it was).

    w, k, r, a, b: [n_seqs, n_tokens, n_head, n]; v: [n_seqs, n_tokens, n_head, n_rows]; c: [n_seqs, n_tokens, n_head].
    As a field of a gradient, each is the gradient of that.
    """

    w: Array
    k: Array
    r: Array
    v: Array
    a: Array | None = None
    b: Array | None = None
    c: Array | None = None


def _row_of(vector: Array | None, t: int) -> Array | float:
    """A token's vectors, beside a state [n_seqs, n_head, value, key]."""
    return 0.0 if vector is None else vector[:, t, :, None, :]


def run_back(x: Turns, state: Array, gy: Array, slots: Array, before: bool = False) -> tuple[Turns, Array]:
    """Reference: the gradients of what tokens do, and of the state before the first one. gy: as v, the gradients of
    y; slots [K, n_seqs, n_head, n_rows, n]: those of the last states, newest first."""
    n_tokens = gy.shape[1]
    states, along, u = [state], list[Array](), list[Array]()
    for t in range(n_tokens):
        along.append((state * _row_of(x.a, t)).sum(axis=-1))
        u.append(x.v[:, t] + (0.0 if x.c is None else x.c[:, t, :, None] * along[t]))
        state = state * _row_of(x.w, t) + u[t][..., None] * _row_of(x.k, t) + along[t][..., None] * _row_of(x.b, t)
        states.append(state)
    w, k, r, v = (np.zeros(a.shape) for a in x[:4])
    a, b, c = (None if t is None else np.zeros(t.shape) for t in (x.a, x.b, x.c))
    g = Turns(w, k, r, v, a, b, c)
    m = np.zeros(state.shape)  # the gradient of the state after token t
    for t in reversed(range(n_tokens)):
        if n_tokens - 1 - t < len(slots):
            m = m + slots[n_tokens - 1 - t]
        read = gy[:, t, ..., None] * _row_of(x.r, t)
        g.r[:, t] = (gy[:, t, ..., None] * states[t if before else t + 1]).sum(axis=2)
        if not before:
            m = m + read
        g.v[:, t] = (m * _row_of(x.k, t)).sum(axis=-1)
        g.k[:, t] = (m * u[t][..., None]).sum(axis=2)
        g.w[:, t] = (m * states[t]).sum(axis=2)
        g_along = (m * _row_of(x.b, t)).sum(axis=-1)
        if x.c is not None and g.c is not None:
            g.c[:, t] = (g.v[:, t] * along[t]).sum(axis=-1)
            g_along = g_along + x.c[:, t, :, None] * g.v[:, t]
        if g.b is not None:
            g.b[:, t] = (m * along[t][..., None]).sum(axis=2)
        if g.a is not None:
            g.a[:, t] = (g_along[..., None] * states[t]).sum(axis=2)
        m = m * _row_of(x.w, t) + g_along[..., None] * _row_of(x.a, t)
        if before:
            m = m + read
    return g, m


def split_results(gy: Array, v_shape: tuple[int, ...], state_shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The gradients of what tokens read, as v, and of the last states [K, *state_shape], from that of a result."""
    flat = gy.reshape(-1)
    n = int(np.prod(v_shape))
    return flat[:n].reshape(v_shape), flat[n:].reshape(-1, *state_shape)


def joined(*gradients: Array) -> Array:
    """Reference: gradients one after the other."""
    return np.concatenate([g.ravel() for g in gradients])


def grad_by_back(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """The gradients of all F32 sources, which one node of the op NAME_back computes."""
    return packed(lambda: record(OPS[f"{node.op}_back"], (dense(gy), *node.src), node.op_params), node.src)


def define_back(
    of: OpDef,
    ref: Callable[..., Array],
    flops: Callable[[Srcs], int],
    grad: Callable[[Tensor, Tensor], Sequence[Gradient]] | None = None,
) -> OpDef:
    """The op that computes the gradients of all F32 sources of a recurrence, one after the other in one row, from `gy`,
    that of its result. `flops`: the operations of the recurrence itself, by its sources."""

    def shape(srcs: Srcs, params: Params) -> Ne:
        gy, own = src(srcs, 0), srcs[1:]
        ne = of.shape(own, params)
        rule(gy.ne == ne, f"gy must have the ne of {of.name}'s result, {list(ne)}, not {list(gy.ne)}")
        rule(gy.is_contiguous, "gy must be contiguous (cont(gy) is)")
        return (sum(s.n_elements for s in own if s is not None and s.dtype is F32), 1, 1, 1)

    return OpDef(
        name=f"{of.name}_back",
        srcs=("gy", *of.srcs),
        params=of.params,
        shape=shape,
        dtypes={(F32, *row): F32 for row in of.dtypes},
        ref=ref,
        kernel=f"{of.name}_back",
        cost=lambda t: cost_of(4 * flops(t.src[1:]), t),
        inplace=(),
        label=f"gradient of {of.name}",
        grad=grad,
    )


def cost_of(flops: int, t: Tensor) -> Cost:
    """The cost of a node with `flops` operations that reads and writes everything once."""
    return Cost(flops, sum(s.nbytes for s in t.src if s is not None), t.nbytes)
