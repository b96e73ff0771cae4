"""Linear attention and related ops: each head has a state [S, S]. Keys and values change it, queries read it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..codec import Array
from ..opdef import OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, src
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
    "gated_delta_net",
    "gated_delta_net_back",
    "gated_linear_attn",
    "gated_linear_attn_back",
    "rwkv_wkv6",
    "rwkv_wkv6_back",
    "rwkv_wkv7",
    "rwkv_wkv7_back",
]


def _flops(srcs: Srcs) -> int:
    n = src(srcs, 0).ne[0]
    return 8 * n * n * src(srcs, 1).n_rows


def _define(
    name: str,
    srcs: tuple[str, ...],
    params: tuple[str, ...],
    shape: Callable[[Srcs, Params], Ne],
    ref: Callable[..., Array],
    ref_back: Callable[..., Array],
) -> tuple[OpDef, OpDef]:
    """A recurrence, and the op that computes its gradients."""
    op = OpDef(
        name=name,
        srcs=srcs,
        params=params,
        shape=shape,
        dtypes={(F32,) * len(srcs): F32},
        ref=ref,
        kernel=name,
        cost=lambda t: cost_of(_flops(t.src), t),
        inplace=(),
        label=f"{name}({', '.join(srcs)})",
        grad=grad_by_back,
    )
    return op, define_back(op, ref_back, _flops)


def _token_rows(roles: tuple[str, ...]) -> Callable[[Srcs, Params], Ne]:
    """Shape rule: all sources have a row of S for each head and token; only tf has one for each head, and the states
    have shapes of their own."""

    def shape(srcs: Srcs, params: Params) -> Ne:
        first, state = src(srcs, 0), src(srcs, len(roles) - 1)
        check_rows(srcs, roles[:-1])
        check_state(state, "state")
        s, n_head, n_tokens, _ = first.ne
        for i, role in enumerate(roles[:-1]):
            ne = (s, n_head, 1, 1) if role == "tf" else (s, n_head, n_tokens, 1)
            rule(src(srcs, i).ne == ne, f"{role} must have ne {list(ne)}, not {list(src(srcs, i).ne)}")
        n_seqs = state.ne[1]
        rule(
            state.ne == (s * s * n_head, n_seqs, 1, 1) and n_tokens % n_seqs == 0,
            f"state must have ne [{s * s * n_head}, n_seqs], n_seqs a divisor of the {n_tokens} tokens",
        )
        return (s * n_head, n_tokens + s * n_seqs, 1, 1)

    return shape


def _by_sequence(state: Array, *tokens: Array) -> tuple[Array, ...]:
    """[n_seqs, n_head, S, S] of the states, and [n_seqs, n_tokens, n_head, S] of what tokens bring."""
    n_head, s = tokens[0].shape[2:]
    n_seqs = state.shape[2]
    return (state.reshape(n_seqs, n_head, s, s), *(x.reshape(n_seqs, -1, n_head, s) for x in tokens))


def _outer(rows: Array, columns: Array) -> Array:
    return rows[..., :, None] * columns[..., None, :]


def _wkv6_ref(k: Array, v: Array, r: Array, tf: Array, td: Array, state: Array) -> Array:
    s0, k, v, r, td = _by_sequence(state, k, v, r, td)

    def step(s: Array, t: int) -> tuple[Array, Array]:
        own = (r[:, t] * tf[0, 0] * k[:, t]).sum(axis=-1, keepdims=True)
        y = own * v[:, t] + np.einsum("nhi,nhij->nhj", r[:, t], s)
        return y, td[:, t][..., None] * s + _outer(k[:, t], v[:, t])

    return run(step, s0, k.shape[1])


def _by_key(gy: Array, state: Array, v: Array) -> tuple[Array, Array]:
    """The gradients of what tokens read and of the last states, [1, n_seqs, n_head, value, key], of an op whose states
    are [key, value]."""
    read, last = split_results(gy, v.shape, state.shape)
    return read, np.swapaxes(last, 3, 4)


def _wkv6_back_ref(gy: Array, k: Array, v: Array, r: Array, tf: Array, td: Array, state: Array) -> Array:
    s0, k, v, r, td = _by_sequence(state, k, v, r, td)
    read, last = _by_key(gy, s0, v)
    own = (r * tf[0, 0] * k).sum(axis=-1, keepdims=True)
    g, g_state = run_back(Turns(w=td, k=k, r=r, v=v), np.swapaxes(s0, 2, 3), read, last, before=True)
    g_own = (read * v).sum(axis=-1, keepdims=True)
    g_k, g_r = g.k + g_own * r * tf[0, 0], g.r + g_own * k * tf[0, 0]
    g_tf = (g_own * r * k).sum(axis=(0, 1))
    return joined(g_k, g.v + own * read, g_r, g_tf, g.w, np.swapaxes(g_state, 2, 3))


def _gla_ref(k: Array, v: Array, q: Array, g: Array, state: Array, scale: float) -> Array:
    s0, k, v, q, g = _by_sequence(state, k, v, q, g)

    def step(s: Array, t: int) -> tuple[Array, Array]:
        own = (q[:, t] * k[:, t]).sum(axis=-1, keepdims=True) * scale
        y = own * v[:, t] + np.einsum("nhi,nhij->nhj", q[:, t] * g[:, t] * scale, s)
        return y, g[:, t][..., None] * s + _outer(k[:, t], v[:, t])

    return run(step, s0, k.shape[1])


def _gla_back_ref(gy: Array, k: Array, v: Array, q: Array, g: Array, state: Array, scale: float) -> Array:
    s0, k, v, q, g = _by_sequence(state, k, v, q, g)
    turns = Turns(w=g, k=k, r=q * scale, v=v)
    of, g_state = run_back(turns, np.swapaxes(s0, 2, 3), *_by_key(gy, s0, v))
    return joined(of.k, of.v, of.r * scale, of.w, np.swapaxes(g_state, 2, 3))


def _wkv7_ref(r: Array, w: Array, k: Array, v: Array, a: Array, b: Array, state: Array) -> Array:
    s0, r, w, k, v, a, b = _by_sequence(state, r, w, k, v, a, b)

    def step(s: Array, t: int) -> tuple[Array, Array]:
        along = np.einsum("nhij,nhj->nhi", s, a[:, t])
        s = s * w[:, t][:, :, None, :] + _outer(v[:, t], k[:, t]) + _outer(along, b[:, t])
        return np.einsum("nhij,nhj->nhi", s, r[:, t]), s

    return run(step, s0, k.shape[1])


def _wkv7_back_ref(gy: Array, r: Array, w: Array, k: Array, v: Array, a: Array, b: Array, state: Array) -> Array:
    s0, r, w, k, v, a, b = _by_sequence(state, r, w, k, v, a, b)
    g, g_state = run_back(Turns(w=w, k=k, r=r, v=v, a=a, b=b), s0, *split_results(gy, v.shape, s0.shape))
    assert g.a is not None and g.b is not None
    return joined(g.r, g.w, g.k, g.v, g.a, g.b, g_state)


_WKV6 = ("k", "v", "r", "tf", "td", "state")
_WKV7 = ("r", "w", "k", "v", "a", "b", "state")
_GLA = ("k", "v", "q", "g", "state")
_GDN = ("q", "k", "v", "g", "beta", "state")

RWKV_WKV6, RWKV_WKV6_BACK = _define("rwkv_wkv6", _WKV6, (), _token_rows(_WKV6), _wkv6_ref, _wkv6_back_ref)
RWKV_WKV7, RWKV_WKV7_BACK = _define("rwkv_wkv7", _WKV7, (), _token_rows(_WKV7), _wkv7_ref, _wkv7_back_ref)
GATED_LINEAR_ATTN, GATED_LINEAR_ATTN_BACK = _define(
    "gated_linear_attn", _GLA, ("scale",), _token_rows(_GLA), _gla_ref, _gla_back_ref
)


def rwkv_wkv6(k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> Tensor:
    """The time mixing of RWKV-6 (ggml_rwkv_wkv6; arXiv 2404.05892). Per head and token, with s[key, value]:
    y = (r . tf k) v + r s, s = td * s + k v^T; tf and td scale the rows of keys.

    k, v, r, td (the decay, 0 to 1): F32, ne [S, n_head, n_tokens], the tokens of n_seqs sequences of equal length one
    after the other; tf (the bonus of the token itself): F32, ne [S, n_head]. Rows dense. state: F32, ne
    [S * S * n_head, n_seqs], contiguous: s with values side by side.
    Result: F32, ne [S * n_head, n_tokens + S * n_seqs]: y of all tokens, then the states after the last ones, laid out
    as `state`. Use views. Raises ShapeError, DTypeError.
    """
    return record(RWKV_WKV6, (k, v, r, tf, td, state), {})


def gated_linear_attn(k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    """Gated linear attention (ggml_gated_linear_attn; arXiv 2312.06635). Per head and token, with s[key, value]:
    s' = g * s + k v^T and y = scale * q s', computed as scale * ((q . k) v + q (g * s)). g scales the rows of keys.

    Shapes, result and errors as in `rwkv_wkv6`, g in the place of td, without tf. scale is rounded to f32.
    """
    return record(GATED_LINEAR_ATTN, (k, v, q, g, state), {"scale": scale})


def rwkv_wkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """The time mixing of RWKV-7 (ggml_rwkv_wkv7; arXiv 2503.14456). Per head and token, with s[value, key]:
    s = s * w + v k^T + (s a) b^T, y = s r; w scales the columns of keys.

    r, w (the decay, 0 to 1), k, v, a, b: F32, ne [S, n_head, n_tokens]. state: F32, ne [S * S * n_head, n_seqs],
    contiguous: s with keys side by side. Order of tokens, result and errors as in `rwkv_wkv6`.
    """
    return record(RWKV_WKV7, (r, w, k, v, a, b, state), {})


def _gdn_shape(srcs: Srcs, params: Params) -> Ne:
    q, k, v, g, beta, state = (src(srcs, i) for i in range(6))
    check_rows(srcs, _GDN[:-1])
    check_state(state, "state")
    s, n_head, n_tokens, n_seqs = v.ne
    for role, x in (("q", q), ("k", k)):
        fits = (x.ne[0], x.ne[2]) == (s, n_tokens) and n_head % x.ne[1] == 0 and n_seqs % x.ne[3] == 0
        rule(fits, f"{role} must have v's ne {list(v.ne)}, or divisors of its heads and sequences; not {list(x.ne)}")
    rule(g.ne[0] in (1, s) and g.ne[1:] == v.ne[1:], f"g must have ne [1 or {s}, {n_head}, {n_tokens}, {n_seqs}]")
    rule(beta.ne == (1, *v.ne[1:]), f"beta must have ne [1, {n_head}, {n_tokens}, {n_seqs}]")
    rule(state.ne == (s, s, n_head, n_seqs), f"state must have ne [{s}, {s}, {n_head}, {n_seqs}]")
    return (s * n_head, n_tokens * n_seqs + n_slots(params) * s * n_seqs, 1, 1)


def _shared(x: Array, v: Array) -> Array:
    """q or k for each head and sequence of v."""
    return np.tile(np.repeat(x, v.shape[0] // x.shape[0], 0), (1, 1, v.shape[2] // x.shape[2], 1))


def _unshared(g: Array, x: Array) -> Array:
    """The gradient of q or k from that of all heads and sequences."""
    n_seqs, n_tokens, n_head, n = x.shape
    return g.reshape(n_seqs, -1, n_tokens, g.shape[2] // n_head, n_head, n).sum(axis=(1, 3))


def _gdn_ref(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, K: int) -> Array:
    n_tokens, n = v.shape[1], v.shape[3]
    q, k = _shared(q, v), _shared(k, v)

    def step(s: Array, t: int) -> tuple[Array, Array]:  # [n_seqs, n_head, value, key]
        s = s * np.exp(g[:, t])[:, :, None, :]
        new = (v[:, t] - np.einsum("nhji,nhi->nhj", s, k[:, t])) * beta[:, t]
        s = s + _outer(new, k[:, t])
        return np.einsum("nhji,nhi->nhj", s, q[:, t]) / np.sqrt(n), s

    return run(step, state, n_tokens, K)


def _gdn_back_ref(gy: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, K: int) -> Array:
    keys, scale, w = _shared(k, v), v.shape[3] ** -0.5, np.exp(g) * np.ones(v.shape[3])
    turns = Turns(w=w, k=keys, r=_shared(q, v) * scale, v=v * beta, a=w * keys, c=-beta[..., 0])
    of, g_state = run_back(turns, state, *split_results(gy, v.shape, state.shape))
    assert of.a is not None and of.c is not None
    g_g = (of.w + of.a * keys) * w
    g_g = g_g if g.shape[3] > 1 else g_g.sum(axis=3)
    g_beta = (of.v * v).sum(axis=3) - of.c
    return joined(_unshared(of.r * scale, q), _unshared(of.k + of.a * w, k), of.v * beta, g_g, g_beta, g_state)


GATED_DELTA_NET, GATED_DELTA_NET_BACK = _define("gated_delta_net", _GDN, ("K",), _gdn_shape, _gdn_ref, _gdn_back_ref)


def gated_delta_net(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, K: int = 1) -> Tensor:
    """The gated delta rule (ggml_gated_delta_net; arXiv 2412.06464). Per head and token, with s[value, key]: first s
    decays by exp(g). Then the value that it has under the key moves by beta towards v: s = s + beta * (v - s k) k^T.
    Last it is read: y = s q / sqrt(S).

    v: F32, ne [S, n_head, n_tokens, n_seqs]. q, k: the same, or with divisors of n_head (all heads are repeated in
    turn) and of n_seqs (each sequence is repeated). g: ne [1, ...] or, for a decay per key (arXiv 2510.26692), [S,
    ...], the rest as v; beta: ne [1, ...], the rest as v. Rows dense. state: F32, ne [S, S, n_head, n_seqs],
    contiguous, keys side by side. Result: F32, ne [S * n_head, n_tokens * n_seqs + K * S * n_seqs]: y [S, n_head,
    n_tokens, n_seqs], then K times states, laid out as `state`: after the last token, after the one before it, and so
    on (zeros when tokens run out). Use views. Raises ShapeError, DTypeError.
    """
    return record(GATED_DELTA_NET, (q, k, v, g, beta, state), {"K": K})


def rwkv_wkv6_back(gy: Tensor, k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> Tensor:
    """The gradients of `rwkv_wkv6` by all sources, from that of its result. States are not kept: they are computed
    again from some of them, the square root of the number of tokens apart.

    gy: F32, ne as the result, contiguous; the others as there. Result: F32, one row: the gradients of k, v, r, tf, td,
    state, each of the shape of its source. Use views. Raises ShapeError, DTypeError.
    """
    return record(RWKV_WKV6_BACK, (gy, k, v, r, tf, td, state), {})


def gated_linear_attn_back(
    gy: Tensor, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float
) -> Tensor:
    """The gradients of `gated_linear_attn` by all sources, k, v, q, g, state. As `rwkv_wkv6_back`."""
    return record(GATED_LINEAR_ATTN_BACK, (gy, k, v, q, g, state), {"scale": scale})


def rwkv_wkv7_back(
    gy: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> Tensor:
    """The gradients of `rwkv_wkv7` by all sources, r, w, k, v, a, b, state. As `rwkv_wkv6_back`."""
    return record(RWKV_WKV7_BACK, (gy, r, w, k, v, a, b, state), {})


def gated_delta_net_back(
    gy: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, K: int = 1
) -> Tensor:
    """The gradients of `gated_delta_net` by all sources, q, k, v, g, beta, state. As `rwkv_wkv6_back`."""
    return record(GATED_DELTA_NET_BACK, (gy, q, k, v, g, beta, state), {"K": K})
