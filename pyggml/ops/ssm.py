"""State-space models: Mamba (arXiv 2312.00752) and Mamba-2 (arXiv 2405.21060)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..codec import Array
from ..opdef import Gradient, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, I32, src
from ._gradients import dense, part
from ._recurrence import (
    Turns,
    check_rows,
    check_state,
    cost_of,
    define_back,
    grad_by_back,
    joined,
    n_slots,
    run,
    run_back,
    split_results,
)

__all__ = [
    "ssm_conv",
    "ssm_conv_back",
    "ssm_scan",
    "ssm_scan_back",
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


def _conv_back_ref(gy: Array, sx: Array, c: Array) -> Array:
    g, n = gy[0], c.shape[3]  # [n_seqs, n_tokens, d_inner]
    windows = np.lib.stride_tricks.sliding_window_view(sx[0], n, axis=2)
    g_sx = np.zeros(sx[0].shape)
    for k in range(n):
        g_sx[:, :, k : k + g.shape[1]] += np.swapaxes(g, 1, 2) * c[0, 0, :, k, None]
    return joined(g_sx, np.einsum("sctk,stc->ck", windows, g))


def _conv_flops(srcs: Srcs) -> int:
    return 2 * src(srcs, 0).n_elements * src(srcs, 1).ne[0]


def _grad_conv_back(node: Tensor, gy: Tensor) -> Sequence[Gradient]:
    """The result is linear in gy, and each of its halves in sx or c."""
    g, sx, c = (src(node.src, i) for i in range(3))
    row = dense(gy)
    h_sx, h_c = part(row, sx, 0), part(row, c, sx.n_elements)

    def of_sx() -> Tensor:
        return part(record(SSM_CONV_BACK, (g, sx, h_c), {}), sx, 0)

    def of_c() -> Tensor:
        return part(record(SSM_CONV_BACK, (g, h_sx, c), {}), c, sx.n_elements)

    return lambda: ssm_conv(h_sx, c) + ssm_conv(sx, h_c), of_sx, of_c


SSM_CONV = OpDef(
    name="ssm_conv",
    srcs=("sx", "c"),
    params=(),
    shape=_conv_shape,
    dtypes={(F32, F32): F32},
    ref=_conv_ref,
    kernel="ssm_conv",
    cost=lambda t: cost_of(_conv_flops(t.src), t),
    inplace=(),
    label="ssm_conv(sx, c)",
    grad=grad_by_back,
)
SSM_CONV_BACK = define_back(SSM_CONV, _conv_back_ref, _conv_flops, _grad_conv_back)


def ssm_conv(sx: Tensor, c: Tensor) -> Tensor:
    """Convolve each channel with its own weights over time (ggml_ssm_conv): y[i, t] = sum of sx[t + k, i] * c[k, i].
    This is the short convolution of Mamba and of most linear attention.

    sx: F32, ne [d_conv - 1 + n_tokens, d_inner, n_seqs]: the last inputs before these tokens, then the tokens' inputs.
    c: F32, ne [d_conv, d_inner]. Rows dense. Result: ne [d_inner, n_tokens, n_seqs], NumPy (n_seqs, n_tokens, d_inner).
    Raises ShapeError, DTypeError.
    """
    return record(SSM_CONV, (sx, c), {})


def ssm_conv_back(gy: Tensor, sx: Tensor, c: Tensor) -> Tensor:
    """The gradients of `ssm_conv` by sx and c, from that of its result.

    gy: F32, ne [d_inner, n_tokens, n_seqs], contiguous; sx, c: as there. Result: F32, one row: that of sx, then that of
    c, each of the shape of its source. Use views. Raises ShapeError, DTypeError.
    """
    return record(SSM_CONV_BACK, (gy, sx, c), {})


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


def _states_of(ids: Array, n_states: int) -> Array:
    rows = ids.reshape(-1)
    bad = rows[(rows < 0) | (rows >= n_states)]
    if bad.size:
        raise IndexError(f"row index {bad[0]} is out of range")
    return rows


def _scan_ref(s: Array, x: Array, dt: Array, a: Array, b: Array, c: Array, ids: Array, K: int) -> Array:
    n_head, rows = x.shape[2], _states_of(ids, s.shape[0])
    delta = np.logaddexp(0, dt[0])  # [n_seqs, n_tokens, n_head]
    b, c = (np.repeat(m, n_head // m.shape[2], axis=2) for m in (b, c))

    def step(state: Array, t: int) -> tuple[Array, Array]:  # [n_seqs, n_head, head_dim, d_state]
        decay = np.exp(delta[:, t, :, None] * a[0, 0])
        added = (x[:, t] * delta[:, t, :, None])[..., None] * b[:, t, :, None, :]
        state = state * decay[:, :, None, :] + added
        return (state * c[:, t, :, None, :]).sum(axis=3), state

    return run(step, s[rows], x.shape[1], K)


def _scan_back_ref(gy: Array, s: Array, x: Array, dt: Array, a: Array, b: Array, c: Array, ids: Array, K: int) -> Array:
    (n_seqs, n_tokens, n_head, _), rows = x.shape, _states_of(ids, s.shape[0])
    per_group, d_state = n_head // b.shape[2], b.shape[3]
    delta = np.logaddexp(0, dt[0])[..., None]  # [n_seqs, n_tokens, n_head, 1]
    turns = Turns(
        w=np.exp(delta * a[0, 0]) * np.ones(d_state),
        k=np.repeat(b, per_group, axis=2),
        r=np.repeat(c, per_group, axis=2),
        v=x * delta,
    )
    g, g_state = run_back(turns, s[rows], *split_results(gy, x.shape, (n_seqs, *s.shape[1:])))
    g_states = np.zeros(s.shape)
    np.add.at(g_states, rows, g_state)
    g_exponent = g.w * turns.w  # of delta * a
    g_delta = (g.v * x).sum(axis=3) + (g_exponent * a[0, 0]).sum(axis=3)
    g_dt = g_delta * -np.expm1(-delta[..., 0])  # the slope of softplus: 1 - e^-softplus
    g_a = (g_exponent * delta).sum(axis=(0, 1))
    g_a = g_a if a.shape[3] > 1 else g_a.sum(axis=1)
    of_groups = (n_seqs, n_tokens, -1, per_group, d_state)
    g_b, g_c = (m.reshape(of_groups).sum(axis=3) for m in (g.k, g.r))
    return joined(g_states, g.v * delta, g_dt, g_a, g_b, g_c)


def _scan_flops(srcs: Srcs) -> int:
    s, x, a = src(srcs, 0), src(srcs, 1), src(srcs, 3)
    return x.n_elements * s.ne[0] * (6 if a.ne[0] == 1 else 26)


SSM_SCAN = OpDef(
    name="ssm_scan",
    srcs=_ROLES,
    params=("K",),
    shape=_scan_shape,
    dtypes={(F32, F32, F32, F32, F32, F32, I32): F32},
    ref=_scan_ref,
    kernel="ssm_scan",
    cost=lambda t: cost_of(_scan_flops(t.src), t),
    inplace=(),
    label="ssm_scan(s, x)",
    grad=grad_by_back,
)
SSM_SCAN_BACK = define_back(SSM_SCAN, _scan_back_ref, _scan_flops)


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


def ssm_scan_back(
    gy: Tensor, s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ids: Tensor, K: int = 1
) -> Tensor:
    """The gradients of `ssm_scan` by all sources except ids, from that of its result. States are not kept: they are
    computed again from some of them, the square root of n_tokens apart.

    gy: F32, ne as the result, contiguous; the others as there. Result: F32, one row: the gradients of s (states that no
    sequence begins with: 0), x, dt, A, B, C, each of the shape of its source. Use views. Raises ShapeError, DTypeError,
    and BackendError for an id outside of s.
    """
    return record(SSM_SCAN_BACK, (gy, s, x, dt, A, B, C, ids), {"K": K})
