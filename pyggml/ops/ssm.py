"""State-space models: Mamba (arXiv 2312.00752) and Mamba-2 (arXiv 2405.21060)."""

from __future__ import annotations

import numpy as np

from ..codec import Array
from ..opdef import Cost, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, I32, src
from ._recurrence import check_rows, check_state, cost_of, n_slots, run

__all__ = [
    "ssm_conv",
    "ssm_scan",
]


def _conv_shape(srcs: Srcs, params: Params) -> Ne:
    sx, c = src(srcs, 0), src(srcs, 1)
    check_rows(srcs, ("sx", "c"))
    rule(sx.ne[3] == 1 and c.ne[2:] == (1, 1), "sx must have at most 3 dimensions, c 2")
    rule(sx.ne[1] == c.ne[1], f"sx and c must have the same channels: ne[1] {sx.ne[1]} and {c.ne[1]}")
    rule(sx.ne[0] >= c.ne[0], f"rows of sx must be as long as those of c, or longer: {sx.ne[0]} and {c.ne[0]}")
    return (c.ne[1], sx.ne[0] - c.ne[0] + 1, sx.ne[2], 1)


def _conv_ref(sx: Array, c: Array) -> Array:
    windows = np.lib.stride_tricks.sliding_window_view(sx[0], c.shape[3], axis=2)
    return np.einsum("sctk,ck->stc", windows, c[0, 0])


def _conv_cost(t: Tensor) -> Cost:
    return cost_of(2 * t.n_elements * src(t.src, 1).ne[0], t)


SSM_CONV = OpDef(
    name="ssm_conv",
    srcs=("sx", "c"),
    params=(),
    shape=_conv_shape,
    dtypes={(F32, F32): F32},
    ref=_conv_ref,
    kernel="ssm_conv",
    cost=_conv_cost,
    inplace=(),
    label="ssm_conv(sx, c)",
)


def ssm_conv(sx: Tensor, c: Tensor) -> Tensor:
    """Convolve each channel with its own weights over time (ggml_ssm_conv): y[i, t] = sum of sx[t + k, i] * c[k, i].
    This is the short convolution of Mamba and of most linear attention.

    sx: F32, ne [d_conv - 1 + n_tokens, d_inner, n_seqs]: the last inputs before these tokens, then the tokens' inputs.
    c: F32, ne [d_conv, d_inner]. Rows dense. Result: ne [d_inner, n_tokens, n_seqs], NumPy (n_seqs, n_tokens, d_inner).
    Raises ShapeError, DTypeError.
    """
    return record(SSM_CONV, (sx, c), {})


_ROLES = ("s", "x", "dt", "A", "B", "C", "ids")


def _scan_shape(srcs: Srcs, params: Params) -> Ne:
    s, x, dt, a, b, c, ids = (src(srcs, i) for i in range(7))
    check_rows(srcs, _ROLES[:6])
    check_state(s, "s")
    d_state, head_dim, n_head, _ = s.ne
    n_tokens, n_seqs = x.ne[2:]
    rule(x.ne[:2] == (head_dim, n_head), f"x must have s's ne[1], ne[2] {[head_dim, n_head]} as ne[0], ne[1]")
    rule(dt.ne == (n_head, n_tokens, n_seqs, 1), f"dt must have ne {[n_head, n_tokens, n_seqs]}, as x")
    rule(a.ne in ((1, n_head, 1, 1), (d_state, n_head, 1, 1)), f"A must have ne [1 or d_state = {d_state}, {n_head}]")
    rule(b.ne == c.ne, f"B and C must have the same ne, not {list(b.ne)} and {list(c.ne)}")
    rule(
        (b.ne[0], *b.ne[2:]) == (d_state, n_tokens, n_seqs) and n_head % b.ne[1] == 0,
        f"B and C must have ne {[d_state, 'n_group', n_tokens, n_seqs]}, n_group a divisor of n_head = {n_head}",
    )
    rule(ids.ne == (n_seqs, 1, 1, 1), f"ids must name a state of s for each of x's {n_seqs} sequences")
    return (x.n_elements + n_slots(params) * d_state * head_dim * n_head * n_seqs, 1, 1, 1)


def _scan_ref(s: Array, x: Array, dt: Array, a: Array, b: Array, c: Array, ids: Array, K: int) -> Array:
    n_head, rows = x.shape[2], ids.reshape(-1)
    bad = rows[(rows < 0) | (rows >= s.shape[0])]
    if bad.size:
        raise IndexError(f"row index {bad[0]} is out of range")
    delta = np.logaddexp(0, dt[0])  # [n_seqs, n_tokens, n_head]
    b, c = (np.repeat(m, n_head // m.shape[2], axis=2) for m in (b, c))

    def step(state: Array, t: int) -> tuple[Array, Array]:  # [n_seqs, n_head, head_dim, d_state]
        decay = np.exp(delta[:, t, :, None] * a[0, 0])
        added = (x[:, t] * delta[:, t, :, None])[..., None] * b[:, t, :, None, :]
        state = state * decay[:, :, None, :] + added
        return (state * c[:, t, :, None, :]).sum(axis=3), state

    return run(step, s[rows], x.shape[1], K)


def _scan_cost(t: Tensor) -> Cost:
    s, x, a = src(t.src, 0), src(t.src, 1), src(t.src, 3)
    return cost_of(x.n_elements * s.ne[0] * (6 if a.ne[0] == 1 else 26), t)


SSM_SCAN = OpDef(
    name="ssm_scan",
    srcs=_ROLES,
    params=("K",),
    shape=_scan_shape,
    dtypes={(F32, F32, F32, F32, F32, F32, I32): F32},
    ref=_scan_ref,
    kernel="ssm_scan",
    cost=_scan_cost,
    inplace=(),
    label="ssm_scan(s, x)",
)


def ssm_scan(s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ids: Tensor, K: int = 1) -> Tensor:
    """The selective scan of Mamba (ggml_ssm_scan): each head of each sequence turns its state, token by token, into
    exp(A * d) * state + d * x B with d = softplus(dt), and reads C . state.

    s: states, F32, ne [d_state, head_dim, n_head, n_states], contiguous; ids: I32, ne [n_seqs]: the state with which
    each sequence begins. x: F32, ne [head_dim, n_head, n_tokens, n_seqs]; dt: F32, ne [n_head, n_tokens, n_seqs] (with
    its bias, before the softplus). A: F32, ne [1, n_head] (Mamba-2) or [d_state, n_head] (Mamba-1: head_dim is 1); a
    negative A lets states fade. B, C: F32, ne [d_state, n_group, n_tokens, n_seqs]; n_head / n_group heads share a
    group. Rows dense.

    Result: F32, one row: y [head_dim, n_head, n_tokens, n_seqs], then K times states [d_state, head_dim, n_head,
    n_seqs]: after the last token, after the one before it, and so on (zeros when tokens run out). Use views.
    Raises ShapeError, DTypeError, and BackendError for an id outside of s.
    """
    return record(SSM_SCAN, (s, x, dt, A, B, C, ids), {"K": K})
